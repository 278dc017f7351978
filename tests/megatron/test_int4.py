"""Training with INT4 experts: the weights are rounded to the engine's values, and gradients ignore the rounding."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import int4_folder
import torch

sys.path.insert(0, str(Path(__file__).parent))
import tiny

from megarl.models import registry

LAYOUTS = ["tp=2,ep=2", "etp=2"]


def write_folders(folder: Path) -> None:
    """Write a tiny Kimi K2 with INT4 experts, and its dequantised copy."""
    hf = tiny.HF["kimi_k2"] | {"hidden_size": 64, "moe_intermediate_size": 64, "model_type": "kimi_k2"}
    generator = torch.Generator().manual_seed(2)
    params = registry.family_of(hf).params(hf, 1)
    tensors = {t.name: 0.1 * torch.randn(t.shape, generator=generator) for param in params for t in param.hf}
    int4_folder.write_model(folder / "plain", hf, tensors)
    dense = int4_folder.quantise_experts(folder / "plain", folder / "int4")
    int4_folder.write_model(folder / "dense", hf, dense)


def test_experts_are_rounded_after_each_update_and_gradients_are_not(
    run_ranks: Callable[..., list[dict[str, Any]]], tmp_path: Path
) -> None:
    write_folders(tmp_path)
    for rank, result in enumerate(run_ranks(2, "tests/megatron/ranks_int4.py", str(tmp_path), *LAYOUTS)):
        assert list(result) == LAYOUTS
        for layout, numbers in result.items():
            assert numbers.pop("masters") >= 4 and numbers.pop("off grid") > 0.5, (rank, layout)
            assert set(numbers.values()) == {1.0}, (rank, layout, numbers)
