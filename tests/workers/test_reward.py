"""Rewards on several ranks: slow ones are waited for, those that fail are known to all, and too many end the run."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

LATE = "it took longer than reward.timeout=0.3 s; make it faster or raise reward.timeout"


@pytest.fixture(scope="module")
def found(
    run_ranks: Callable[..., list[dict[str, Any]]], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, Any]]:
    """What both ranks found, which is the same; the third rollout was aborted."""
    folder = tmp_path_factory.mktemp("rewards")
    first, second = run_ranks(2, "tests/workers/ranks_reward.py", str(folder), timeout=300.0)
    assert first == second
    assert {path.name for path in Path(folder, "logs").iterdir()} == {"rewards_0.log", "rewards_1.log"}
    return first


def test_slow_ones_are_waited_for(found: dict[str, dict[str, Any]]) -> None:
    assert found["slow"]["reward"] == [1.0, 1.0, 0.0, 1.0] and found["slow"]["unscored"] == [0] * 4
    assert found["slow"]["parts"] == {"slow": [1.0, 1.0, 0.0, 1.0]} and found["slow"]["figures"] == {}


@pytest.mark.parametrize(
    ("job", "part", "why"), [("hangs", "hangs", LATE), ("dies", "dies", "its process ended with exit status 9")]
)
def test_one_that_fails_is_no_zero_and_too_many_end_the_run(
    found: dict[str, dict[str, Any]], job: str, part: str, why: str
) -> None:
    allowed = "more than reward.max_failed_frac=0.1 allows"
    said = f"1 of 3 rollouts have no reward, {allowed}: 1 x {part}: {why} (on the sample "
    assert found[job] == f"{said}'p3')"
    goes_on = found[f"one {job}"]
    assert goes_on["unscored"] == [0, 0, 0, 1] and goes_on["reward"] == [1.0, 1.0, 0.0, 0.0]
    assert goes_on["why"] == [[part, why, "p3"]]


def test_rewards_that_are_all_too_slow_end_the_run_when_the_limit_is_passed(found: dict[str, Any]) -> None:
    """Of 40 rollouts on two ranks, whose calls would take half a minute on each, the fifth that fails is one too many;
    one more may have failed on the other rank."""
    said, is_soon = found["all too slow"]
    match = re.fullmatch(
        r"(\d+) of 40 rollouts have no reward, more than reward.max_failed_frac=0.1 allows \(the other (\d+) were not "
        rf"graded\): \1 x sleeps: {re.escape(LATE.replace('0.3', '1.5'))} \(on the sample 'p0'\)",
        said,
    )
    assert match, said
    failed, dropped = map(int, match.groups())
    assert failed in (5, 6, 7, 8) and failed + dropped == 40 and is_soon


def test_a_function_that_leaves(found: dict[str, dict[str, Any]]) -> None:
    assert found["leaves"].startswith("3 of 3 rollouts have no reward")  # type: ignore[attr-defined]
    assert "3 x leaves: it raised SystemExit: 0 (" in found["leaves"]


def test_functions_of_the_pool_by_weights_and_turns(found: dict[str, dict[str, Any]]) -> None:
    """Of a length of 3: 0.5 * 3 + 0.5 + 0.25. Of each rank's first rollout it was told before, and one was aborted."""
    pool = found["pool"]
    assert pool["reward"] == [2.25, 2.25, 0.0, 2.25] and pool["unscored"] == [0] * 4
    assert pool["parts"] == {"later": [0.75, 0.75, 0, 0.75], "later/turns": [1, 1, 0, 1], "length": [3, 3, 0, 3]}
    assert pool["turns"] == [[0.0, 0.25], [0.0, 0.25], [0.0, 0.0], [0.0, 0.25]]
    assert pool["figures"] == pytest.approx(
        {"reward/length_weight": 0.5, "reward/later_weight": 1.0, "perf/reward_overlap_frac": 2 / 3}
    )


@pytest.mark.parametrize("job", ["branches", "branches here"])
def test_the_last_branch_of_an_episode_is_shown_to_functions(found: dict[str, dict[str, Any]], job: str) -> None:
    """Of each rank one of 4 tokens, whose episode's other branch has 3, and one of 3."""
    pool, (item,) = found[job], {"branches": (0.75,), "branches here": (0.0,)}[job]
    assert pool["reward"] == [4 + item, 4 + item, 3 + item] * 2
    assert pool["unscored"] == [0] * 6
    if job == "branches":
        assert pool["turns"][:3] == [[0.0, 0.0], [0.0, 0.25], [0.0, 0.25]]


def test_weights_that_change(found: dict[str, dict[str, Any]]) -> None:
    changed = found["changed"]
    assert changed["reward"] == [4.5, 4.5, 0.0, 4.5] and changed["turns"][0] == [0.0, 0.5]
    assert changed["figures"] == {
        "reward/length_weight": 1.0,
        "reward/later_weight": 2.0,
        "perf/reward_overlap_frac": 0.0,
    }


def test_what_an_environment_says_is_a_part_by_its_weight(found: dict[str, dict[str, Any]]) -> None:
    """2 * (0.5 + 0.25); a rollout whose environment says nothing has the other parts only."""
    alone = found["environment"]
    assert alone["reward"] == [1.5, 1.5, 0.0, 1.5] and alone["turns"] == [[0.0, 0.5]] * 2 + [[0.0, 0.0], [0.0, 0.5]]
    assert alone["parts"] == {"environment": [0.75, 0.75, 0, 0.75], "environment/tries": [3, 3, 0, 3]}
    assert found["beside"]["reward"] == [4.0, 3.0, 0.0, 2.0]
    assert found["failed"]["why"] == [["environment", "Guess: reward raised", "p3"]]
    assert found["recorded"]["reward"] == [3.0, 3.0, 0.0, 3.0]
    assert "odd_worlds:Plain has no `reward`, and there are no reward.functions" in found["nobody"]
    assert "there is no reward: set reward.functions" in found["nothing"]


def test_a_weight_of_no_part(found: dict[str, dict[str, Any]]) -> None:
    assert "no part of the reward is called 'lenght'; did you mean length" in found["no such part"]
