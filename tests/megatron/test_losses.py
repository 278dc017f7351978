"""Every policy loss under every aggregation on real Megatron, in two layouts: see `ranks_losses.py`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


@pytest.mark.parametrize(("layout", "world"), [("tp=2,cp=2,ep=2", 4), ("pp=2,ep=2", 4)])
def test_policy_losses_match_transformers_under_every_aggregation(
    run_ranks: Callable[..., list[dict[str, Any]]], layout: str, world: int
) -> None:
    first, *others = run_ranks(world, "tests/megatron/ranks_losses.py", layout, timeout=600.0)
    assert all(other == first for other in others)
    assert len(first) == 8 * 3 + 6 + 1
    for case, result in first.items():
        assert result["gradients"] < 1e-5 and result["loss"] < 1e-5 and result["metrics"] < 1e-5, (case, result)
        assert result["metric change"] < 1e-6, (case, result)
        if "cov" in case:
            assert 0.05 < result["marked"] <= 0.2, (case, result)
