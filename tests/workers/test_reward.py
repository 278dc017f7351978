"""Rewards on several ranks: slow ones are awaited, failures are known on all ranks, and too many end the run."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

LATE = "it took longer than reward.timeout=0.3 s; make it faster or raise reward.timeout"


@pytest.fixture(scope="module")
def results(
    run_ranks: Callable[..., list[dict[str, Any]]], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, Any]]:
    """Return both ranks' equal results; the third rollout is aborted."""
    folder = tmp_path_factory.mktemp("rewards")
    first, second = run_ranks(2, "tests/workers/ranks_reward.py", str(folder), timeout=300.0)
    assert first == second
    assert {path.name for path in Path(folder, "logs").iterdir()} == {"rewards_0.log", "rewards_1.log"}
    return first


def test_slow_rewards_are_waited_for(results: dict[str, dict[str, Any]]) -> None:
    assert results["slow"]["reward"] == [1.0, 1.0, 0.0, 1.0] and results["slow"]["unscored"] == [0] * 4
    assert results["slow"]["parts"] == {"slow": [1.0, 1.0, 0.0, 1.0]} and results["slow"]["metrics"] == {}


@pytest.mark.parametrize(
    ("job", "part", "reason"), [("hangs", "hangs", LATE), ("dies", "dies", "its process ended with exit status 9")]
)
def test_failed_rewards_are_not_zero_and_too_many_end_the_run(
    results: dict[str, dict[str, Any]], job: str, part: str, reason: str
) -> None:
    allowed = "more than reward.max_failed_frac=0.1 allows"
    message = f"1 of 3 rollouts have no reward, {allowed}: 1 x {part}: {reason} (on the sample "
    assert results[job] == f"{message}'p3')"
    allowed_failure = results[f"one {job}"]
    assert allowed_failure["unscored"] == [0, 0, 0, 1] and allowed_failure["reward"] == [1.0, 1.0, 0.0, 0.0]
    assert allowed_failure["reasons"] == [[part, reason, "p3"]]


def test_all_slow_rewards_end_the_run_at_the_failure_limit(results: dict[str, Any]) -> None:
    """40 rollouts on two ranks would take half a minute on each. The fifth failure exceeds the limit; a few more may
    have failed by then."""
    message = results["all too slow"]
    match = re.fullmatch(
        r"(\d+) of 40 rollouts have no reward, more than reward.max_failed_frac=0.1 allows \(the other (\d+) were not "
        rf"graded\): \1 x sleeps: {re.escape(LATE.replace('0.3', '1.5'))} \(on the sample 'p0'\)",
        message,
    )
    assert match, message
    failed, num_dropped = map(int, match.groups())
    assert failed in (5, 6, 7, 8) and failed + num_dropped == 40


def test_function_that_raises_system_exit_fails(results: dict[str, dict[str, Any]]) -> None:
    assert results["leaves"].startswith("3 of 3 rollouts have no reward")  # type: ignore[attr-defined]
    assert "3 x leaves: it raised SystemExit: 0 (" in results["leaves"]


def test_pool_functions_with_weights_and_turn_rewards(results: dict[str, dict[str, Any]]) -> None:
    """Length 3 gives 0.5 * 3 + 0.5 + 0.25. Each rank's first rollout was prefetched; one rollout is aborted."""
    pool = results["pool"]
    assert pool["reward"] == [2.25, 2.25, 0.0, 2.25] and pool["unscored"] == [0] * 4
    assert pool["parts"] == {"later": [0.75, 0.75, 0, 0.75], "later/turns": [1, 1, 0, 1], "length": [3, 3, 0, 3]}
    assert pool["turns"] == [[0.0, 0.25], [0.0, 0.25], [0.0, 0.0], [0.0, 0.25]]
    assert pool["metrics"] == pytest.approx(
        {"reward/length_weight": 0.5, "reward/later_weight": 1.0, "perf/reward_overlap_frac": 2 / 3}
    )


@pytest.mark.parametrize("job", ["branches", "branches here"])
def test_functions_see_the_last_branch_of_an_episode(results: dict[str, dict[str, Any]], job: str) -> None:
    """Each rank has an episode with branches of 3 and 4 tokens, and a rollout of 3."""
    pool, (expected_turns,) = results[job], {"branches": (0.75,), "branches here": (0.0,)}[job]
    assert pool["reward"] == [4 + expected_turns, 4 + expected_turns, 3 + expected_turns] * 2
    assert pool["unscored"] == [0] * 6
    if job == "branches":
        assert pool["turns"][:3] == [[0.0, 0.0], [0.0, 0.25], [0.0, 0.25]]


def test_weights_can_change_during_the_run(results: dict[str, dict[str, Any]]) -> None:
    changed = results["changed"]
    assert changed["reward"] == [4.5, 4.5, 0.0, 4.5] and changed["turns"][0] == [0.0, 0.5]
    assert changed["metrics"] == {
        "reward/length_weight": 1.0,
        "reward/later_weight": 2.0,
        "perf/reward_overlap_frac": 0.0,
    }


def test_environment_reward_is_a_weighted_part(results: dict[str, dict[str, Any]]) -> None:
    """2 * (0.5 + 0.25); rollouts without an environment reward have the other parts only."""
    single = results["environment"]
    assert single["reward"] == [1.5, 1.5, 0.0, 1.5] and single["turns"] == [[0.0, 0.5]] * 2 + [[0.0, 0.0], [0.0, 0.5]]
    assert single["parts"] == {"environment": [0.75, 0.75, 0, 0.75], "environment/tries": [3, 3, 0, 3]}
    assert results["environment and function"]["reward"] == [4.0, 3.0, 0.0, 2.0]
    assert results["failed"]["reasons"] == [["environment", "Guess: reward raised", "p3"]]
    assert results["recorded"]["reward"] == [3.0, 3.0, 0.0, 3.0]
    assert "toy_environments:Plain has no `reward`, and there are no reward.functions" in results["no reward"]
    assert "there is no reward: set reward.functions" in results["nothing"]


def test_weight_of_an_unknown_part_raises(results: dict[str, dict[str, Any]]) -> None:
    assert "no part of the reward is called 'lenght'; did you mean length" in results["no such part"]
