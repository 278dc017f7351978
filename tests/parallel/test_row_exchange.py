"""Rows that ranks deliver to each other, on one machine and on pretended several."""

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
def test_random_deliveries_bring_what_a_gather_of_everything_brings(
    run_ranks: Callable[..., list[dict[str, Any]]], world: int, per_machine: int, machines: list[list[int]]
) -> None:
    for result in run_ranks(world, SCRIPT, "cases", str(world * 10 + per_machine), str(per_machine)):
        assert result["wrong"] == []
        assert result["machines"] == machines
        assert result["held"] == result["descriptors"] == 0
        assert not result["sent"]["machine"] or per_machine > 1
        assert not result["sent"]["network"] or len(machines) > 1


@pytest.mark.parametrize("world", [1, 2, 4])
def test_gathers_of_any_sizes_and_sums_in_order(run_ranks: Callable[..., list[dict[str, Any]]], world: int) -> None:
    for result in run_ranks(world, SCRIPT, "gathers", "3"):
        assert result["wrong"] == []


def test_rows_outlive_what_they_were_sent_from_and_memory_is_given_back(
    run_ranks: Callable[..., list[dict[str, Any]]],
) -> None:
    for rank, result in enumerate(run_ranks(2, SCRIPT, "lasting", "0")):
        assert result["made"] == 400_000
        assert result["own rows are views"]
        assert result["wrote"] == {"machine": 400_000, "network": 0}  # not what lies in shared memory already
        assert result["sender's stays"] == 2 * rank
        other = 1 - rank
        assert result["theirs"] == [[other, other + 1], [2 * (7 + other), 2 * (8 + other)]]
        assert result["given back"] == [0, 0]


@pytest.mark.parametrize("per_machine", [1, 2, 4])
def test_a_rank_that_is_gone_is_an_error_to_all_who_need_it(
    run_ranks: Callable[..., list[dict[str, Any]]], per_machine: int
) -> None:
    for rank, result in enumerate(run_ranks(4, SCRIPT, "killed", "0", str(per_machine), timeout=120.0)):
        assert result == {"first": [0, 1, 2, 3], "second": None if rank == 1 else "ConnectionError"}
