"""Straggler detection from the working time of each rank."""

from __future__ import annotations

import pytest

from megarl.observe.hang_watchdog import StragglerDetector, find_slowest

pytestmark = pytest.mark.alone


def test_slowest_rank_is_relative_to_the_median_of_its_phase() -> None:
    worked = [{"actor_update": 1.0}, {"actor_update": 4.0, "critic_update": 9.0}, {"actor_update": 1.2}]
    assert find_slowest(worked) == (1, "actor_update", 4.0, 1.1)
    assert find_slowest([{"a": 1.0, "b": 2.0}, {"a": 1.5, "b": 8.0}]) == (1, "b", 8.0, 2.0)


@pytest.mark.parametrize("worked", [[], [{}], [{"a": 5.0}, {"b": 1.0}], [{}, {}]])
def test_needs_two_ranks_in_a_phase(worked: list[dict[str, float]]) -> None:
    assert find_slowest(worked) is None
    assert StragglerDetector(["n"] * len(worked)).check(1, worked) == ({}, "")


def test_names_a_rank_slow_for_two_steps_and_its_recovery() -> None:
    stragglers, slow, balanced = (
        StragglerDetector(["n1", "n1", "n2"]),
        [{"u": 1.0}, {"u": 1.0}, {"u": 10.0}],
        [{"u": 1.0}] * 3,
    )
    results = [
        stragglers.check(step, worked)
        for step, worked in enumerate([balanced, slow, slow, slow, balanced, balanced, slow])
    ]
    lines = [line for _, line in results]
    assert [bool(line) for line in lines] == [False, False, True, False, True, False, False]
    assert lines[2] == (
        "step 2: rank 2 on node n2 is slow and delays the others: 10.0 s of work in u, 10.0 times as much as the "
        "others' 1.0 s"
    )
    assert lines[4] == "step 4: rank 2 on node n2 is no longer slow"
    assert results[1][0] == {"perf/slowest_rank": 2.0, "perf/slowest_ratio": 10.0}
    assert results[0][0]["perf/slowest_ratio"] == 1.0


def test_ignores_short_phases() -> None:
    stragglers = StragglerDetector(["n", "n"])
    assert [stragglers.check(step, [{"u": 0.01}, {"u": 0.2}])[1] for step in (1, 2, 3)] == ["", "", ""]
