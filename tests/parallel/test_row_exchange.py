"""Row exchange between ranks, on one machine and on several pretended ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

SCRIPT = "tests/parallel/ranks_row_exchange.py"


@pytest.mark.parametrize(
    ("world", "per_machine", "machines"),
    [
        (1, 1, [[0]]),
        (2, 2, [[0, 1]]),
        (3, 1, [[0], [1], [2]]),
        (3, 2, [[0, 1], [2]]),
        (4, 2, [[0, 1], [2, 3]]),
        (4, 4, [[0, 1, 2, 3]]),
    ],
)
def test_random_deliveries_match_gathering_everything(
    run_ranks: Callable[..., list[dict[str, Any]]], world: int, per_machine: int, machines: list[list[int]]
) -> None:
    for result in run_ranks(world, SCRIPT, "cases", str(world * 10 + per_machine), str(per_machine)):
        assert result["wrong"] == []
        assert result["machines"] == machines
        assert result["allocated_at_end"] == result["descriptors"] == 0
        assert not result["sent"]["machine"] or per_machine > 1
        assert not result["sent"]["network"] or len(machines) > 1


@pytest.mark.parametrize("world", [1, 2, 4])
def test_gathers_of_any_size_and_ordered_sums(run_ranks: Callable[..., list[dict[str, Any]]], world: int) -> None:
    for result in run_ranks(world, SCRIPT, "gathers", "3"):
        assert result["wrong"] == []


def test_rows_outlive_their_source_and_memory_is_freed(
    run_ranks: Callable[..., list[dict[str, Any]]],
) -> None:
    for rank, result in enumerate(run_ranks(2, SCRIPT, "lifetime", "0")):
        assert result["allocated"] == 400_000
        assert result["local_rows_are_views"]
        assert result["bytes_sent"] == {"machine": 400_000, "network": 0}  # columns in shared memory are not copied
        assert result["sender_row"] == 2 * rank
        peer = 1 - rank
        assert result["received"] == [[peer, peer + 1], [2 * (7 + peer), 2 * (8 + peer)]]
        assert result["after_free"] == [0, 0]


@pytest.mark.parametrize("per_machine", [1, 2, 4])
def test_dead_rank_is_an_error_for_its_readers(
    run_ranks: Callable[..., list[dict[str, Any]]], per_machine: int
) -> None:
    for rank, result in enumerate(run_ranks(4, SCRIPT, "dead_rank", "0", str(per_machine), timeout=120.0)):
        assert result == {"first": [0, 1, 2, 3], "second": None if rank == 1 else "ConnectionError"}
