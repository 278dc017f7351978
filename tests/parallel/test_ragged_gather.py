"""All-gathers of exact sizes in groups of one to five ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def test_every_rank_gathers_all_contributions(run_ranks: Callable[..., list[dict[str, Any]]]) -> None:
    results = run_ranks(5, "tests/parallel/ranks_ragged_gather.py")
    assert [len(result) for result in results] == [35, 35 - 7, 35 - 14, 35 - 21, 35 - 28]
    assert [name for result in results for name, right in result.items() if not right] == []
