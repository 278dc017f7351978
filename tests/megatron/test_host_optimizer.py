"""Optimizer states on the host take the same steps, bit by bit, as those on the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

CASES = ("fp32", "fp32, a half", "bf16", "bf16, EP 2", "bf16, a third", "critic", "LoRA")


@pytest.fixture(scope="module")
def results(run_ranks: Callable[..., list[dict[str, Any]]], tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("checkpoints")
    results = run_ranks(2, "tests/megatron/ranks_host_optimizer.py", str(folder))
    assert all(list(result) == list(CASES) for result in results)
    return results


@pytest.mark.parametrize("case", CASES)
def test_host_takes_the_same_steps(results: list[dict[str, Any]], case: str) -> None:
    """Loading, training, saving, resuming with other shares, offloading the rest, and rolling back."""
    for rank, result in enumerate(results):
        numbers = result[case]
        share = numbers.pop("share")
        assert 0.0 < numbers.pop("fused") < 1e-3, rank  # of the learning rate, after three steps
        assert numbers.pop("restored") == numbers.pop("resumed") == [True] * 3, rank
        assert set(numbers.values()) == {True}, (rank, numbers)
        assert share == 1.0 if "a " not in case else 0.3 < share < 0.9  # whole parameters, at least the share
