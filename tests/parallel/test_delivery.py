"""Rows that ranks deliver to each other, on one machine and on pretended several."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

SCRIPT = "tests/parallel/ranks_delivery.py"


@pytest.mark.parametrize(
    ("world", "per_machine", "machines"),
    [
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
    for found in run_ranks(world, SCRIPT, "cases", str(world * 10 + per_machine), str(per_machine)):
        assert found["wrong"] == []
        assert found["machines"] == machines
        assert found["held"] == found["descriptors"] == 0
        assert not found["sent"]["machine"] or per_machine > 1
        assert not found["sent"]["network"] or len(machines) > 1
