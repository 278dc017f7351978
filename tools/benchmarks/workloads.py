"""What several benchmarks run: folders of the quickstart, a small MoE, batches, an engine."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megarl.config import Config, ConfigError

if TYPE_CHECKING:
    from megarl.types import TrainBatch

ROOT = Path(__file__).resolve().parents[2]


def check_quickstart(folder: Path, file: str) -> Path:
    """Return the absolute path of a folder of tools/make_quickstart.py. Raises ConfigError if it lacks the file."""
    if not (folder / file).exists():
        raise ConfigError(f"{folder} is not what tools/make_quickstart.py makes; call that first")
    return folder.resolve()


def moe_config(**sizes: int) -> dict[str, Any]:
    """Return the config.json of a Qwen3-MoE with these sizes."""
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        **sizes,
    }


def make_batch(lengths: Sequence[int], vocab: int) -> TrainBatch:
    """Return sequences of random tokens. The loss covers all tokens but the first of each, with equal weights."""
    import torch

    from megarl.types import TrainBatch

    starts = torch.tensor([0, *lengths]).cumsum(0)
    total = int(starts[-1])
    mask = torch.arange(total) - torch.repeat_interleave(starts[:-1], torch.tensor(lengths)) > 0
    tokens = torch.randint(0, vocab, (total,), generator=torch.Generator().manual_seed(2))
    groups = torch.arange(len(lengths))
    batch = TrainBatch(tokens, starts, mask, groups, torch.zeros(len(lengths)), torch.zeros(total))
    return batch.with_(loss_weights=mask / mask.sum())


@contextmanager
def start_engine(config: Config) -> Iterator[Any]:
    """Run an engine of one core until the end of the block."""
    from megarl.engine.engine_backends import engine_backend
    from megarl.engine.engine_host import HOST_VARIABLE

    backend = engine_backend(config)
    host = backend.start_host(config, threads=1)
    os.environ[HOST_VARIABLE] = host.path
    engine = backend.make_engine(config, threads=1)
    try:
        engine.start()
        engine.wait_ready()
        yield engine
    finally:
        engine.shutdown()
        host.close()
