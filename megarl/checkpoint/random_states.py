"""The random states of a rank: Python's, numpy's, torch's and Megatron's."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def file_name() -> str:
    """Of this rank, in a checkpoint."""
    return f"rng_{torch.distributed.get_rank():05d}.pt"


def current() -> dict[str, Any]:
    """As they are, in what `torch.load(weights_only=True)` reads."""
    from megatron.core import tensor_parallel

    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "python": random.getstate(),
        "numpy": (str(name), torch.from_numpy(np.asarray(keys).astype(np.int64)), position, has_gauss, cached),
        "torch": torch.get_rng_state(),
        "megatron": tensor_parallel.get_cuda_rng_tracker().get_states(),
    }


def restore(state: dict[str, Any]) -> None:
    """Go on from what `current` returned."""
    from megatron.core import tensor_parallel

    name, keys, position, has_gauss, cached = state["numpy"]
    random.setstate(state["python"])
    np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["torch"])
    tensor_parallel.get_cuda_rng_tracker().set_states(state["megatron"])


def draw_anew(step: int) -> None:
    """As the start of a run, but from `step`: equal on all ranks, but for Megatron's, which knows what must differ."""
    from megatron.core import tensor_parallel

    random.seed(step)
    np.random.seed(step % 2**32)
    torch.manual_seed(step)
    if tensor_parallel.get_cuda_rng_tracker().get_states():  # a rank without a model has none
        tensor_parallel.model_parallel_cuda_manual_seed(step + 1)
