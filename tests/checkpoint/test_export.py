"""Gathering an export restores the sharded tensors bitwise, and a fault on one rank is an error on all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

SCRIPT = "tests/checkpoint/ranks_export.py"
RunRanks = Callable[..., list[dict[str, Any]]]


@pytest.mark.parametrize(
    ("world", "tp", "pp", "ep", "etp"),
    [(2, 2, 1, 1, 1), (2, 1, 1, 2, 1), (2, 1, 2, 1, 1), (2, 2, 1, 2, 1), (4, 2, 2, 2, 1), (4, 1, 1, 2, 2)],
)
def test_every_rank_gathers_every_tensor_bitwise(
    run_ranks: RunRanks, world: int, tp: int, pp: int, ep: int, etp: int
) -> None:
    for rank, result in enumerate(run_ranks(world, SCRIPT, str(tp), str(pp), str(ep), str(etp))):
        for family in ("qwen2", "qwen3_moe", "deepseek_v3"):
            assert result[family] == [True] * 3, family  # tiny, small and endless buckets
        assert result["has_all_params"] == (pp == ep == 1)
        # A fault on the last rank raises on all ranks before any of them waits.
        name, faults = "decoder.layers.2.mlp.experts.3.linear_fc2.weight", result["faults"]
        assert f"rank {world - 1} lacks {name}" in faults["missing"], rank
        assert f"{name} on rank {world - 1} has shape (1, {4 // etp}), not (8, {4 // etp})" in faults["misshapen"]
        assert f"{name} on rank {world - 1} is torch.float32, not torch.bfloat16" in faults["dtype"]
        assert f"rank {world - 1} has value_head.weight, which is not in the table" in faults["unknown"]
