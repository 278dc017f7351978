"""Training steps whose peaks of memory were measured on an H200: the table in megarl/models/README.md.

The steps are of some layers of a published model, in bf16, on one rank with Transformer Engine, with SwiGLU not fused.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarl.config import Config, from_dict
from megarl.models.registry import load_hf_config

ROOT = Path(__file__).resolve().parents[2]
_NAMES = {"Qwen3-30B-A3B": "qwen3_30b_a3b", "Qwen2.5-7B": "qwen2.5_7b", "DeepSeek-V3, 16 experts": "deepseek_v3"}
_FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


@dataclass(frozen=True)
class MeasuredStep:
    """A row of the table."""

    hf: dict[str, Any]
    config: Config
    sequences: int
    length: int
    """Tokens of each sequence."""
    measured: float
    """GB."""
    planned: str
    planned_ratio: str
    rehearsed: str
    rehearsed_ratio: str


def read_steps() -> list[MeasuredStep]:
    text = (ROOT / "megarl/models/README.md").read_text().partition("| layers of | micro-batch |")[2]
    lines = text.partition("\n\n")[0].splitlines()[2:]
    steps = [_step(*(cell.strip() for cell in line.strip("|").split("|"))) for line in lines]
    assert len(steps) == 8
    return steps


def _step(
    layers: str,
    batch: str,
    recomputed: str,
    planned: str,
    measured: str,
    planned_ratio: str,
    rehearsed: str,
    rehearsed_ratio: str,
) -> MeasuredStep:
    count, _, name = layers.partition(" of ")
    hf = load_hf_config(ROOT / f"configs/models/{_NAMES[name]}.json")
    hf |= {"num_hidden_layers": int(count), "vocab_size": 32000}
    if name.startswith("DeepSeek"):
        hf |= {"n_routed_experts": 16, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
        hf = {key: value for key, value in hf.items() if key != "quantization_config"}
    sequences, length = map(int, batch.replace(",", "").split(" x "))
    megatron = {"bias_activation_fusion": False} | (_FULL if recomputed == "full" else {})
    train = {"max_tokens_per_gpu": sequences * length, "logits_chunk_size": 1024}
    tree = {"model": {"dtype": "bfloat16", "megatron": megatron}, "train": train, "algorithm": "grpo"}
    config = from_dict(tree | {"rollout": {"max_context": sequences * length}})
    ratios = planned_ratio, rehearsed, rehearsed_ratio
    return MeasuredStep(hf, config, sequences, length, float(measured), planned, *ratios)
