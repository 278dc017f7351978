"""Figures of a batch, worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from thread_ranks import as_ranks

from megarl.observe.metrics import rollout_metrics
from megarl.types import Prompt, Rollout, Rollouts, Status, Turn


def rollout(group: int, reward: float, lengths: tuple[int, ...], calls: int, errors: int, status: Status) -> Rollout:
    turns = [Turn((0,) * 5)]
    for length in lengths:
        turns += [Turn((1,) * length, (0.0,) * length, is_action=True), Turn((2, 2))]
    return Rollout(Prompt("p", ()), tuple(turns), status, reward, {"a": reward, "b": 0.0}, 0, group, (), calls, errors)


def test_by_hand() -> None:
    given = [
        rollout(0, 1.0, (4, 2), 1, 0, "stop"),
        rollout(0, 0.0, (3,), 0, 0, "length"),
        rollout(1, 0.5, (1, 1, 1), 3, 2, "max_turns"),
        rollout(1, 0.5, (8,), 0, 0, "stop"),
    ]
    metrics = rollout_metrics(Rollouts.of(given))
    elsewhere = as_ranks(2, lambda rank: rollout_metrics(Rollouts.of(given[2 * rank.rank :][:2], None, rank)))
    assert elsewhere == [metrics, metrics]
    expected = {
        "rollout/reward_mean": 0.5,
        "rollout/reward_std": 0.125**0.5,
        "rollout/reward_min": 0.0,
        "rollout/reward_max": 1.0,
        "rollout/response_length_mean": (6 + 3 + 3 + 8) / 4,
        "rollout/response_length_max": 8.0,
        "rollout/prompt_length_mean": 5.0,
        "rollout/length_max": 15.0,
        "rollout/turns_mean": (2 + 1 + 3 + 1) / 4,
        "rollout/tool_calls_mean": 1.0,
        "rollout/tool_errors": 2.0,
        "rollout/no_tool_frac": 0.5,
        "rollout/truncated_frac": 0.25,
        "rollout/max_turns_frac": 0.25,
        "rollout/aborted_frac": 0.0,
        "rollout/reward_failed_frac": 0.0,
        "rollout/zero_spread_frac": 0.5,
        "reward/a": 0.5,
        "reward/b": 0.0,
    }
    assert metrics == pytest.approx(expected)


def test_aborted_ones_count_as_that_and_nothing_else() -> None:
    """The group of the aborted one has no spread without it."""
    whole = [
        rollout(0, 1.0, (2,), 0, 0, "stop"),
        rollout(1, 0.0, (2,), 0, 0, "stop"),
        rollout(1, 1.0, (4,), 1, 0, "stop"),
    ]
    aborted = rollout(0, 0.0, (100,), 9, 9, "aborted")
    found = rollout_metrics(Rollouts.of([*whole, aborted]))
    assert found == rollout_metrics(Rollouts.of(whole)) | {"rollout/aborted_frac": 0.25}
    assert found["rollout/reward_mean"] == pytest.approx(2 / 3) and found["rollout/zero_spread_frac"] == 0.5
    assert rollout_metrics(Rollouts.of([aborted])) == {"rollout/aborted_frac": 1.0}


def test_those_without_a_reward_count_in_nothing_that_is_said_of_rewards() -> None:
    """Of four that were not aborted two have none, one of them for two reasons; their group has no spread then."""
    good = [rollout(0, 1.0, (2,), 0, 0, "stop"), rollout(1, 0.5, (4,), 1, 0, "stop")]
    failed = [
        replace(rollout(0, 0.0, (6,), 0, 0, "stop"), reward_parts={"a": 5.0}, unscored={"b": "it raised"}),
        replace(rollout(1, 0.0, (4,), 0, 0, "stop"), reward_parts={}, unscored={"a": "it raised", "b": "late"}),
    ]
    aborted = rollout(0, 0.0, (100,), 9, 9, "aborted")
    found = rollout_metrics(Rollouts.of([*good, *failed, aborted]))
    whole = rollout_metrics(Rollouts.of(good))
    assert found["rollout/reward_failed_frac"] == 0.5 and found["rollout/aborted_frac"] == pytest.approx(0.2)
    assert found["reward/a_failed_frac"] == 0.25 and found["reward/b_failed_frac"] == 0.5
    for name in ("rollout/reward_mean", "rollout/reward_std", "rollout/reward_min", "reward/a", "reward/b"):
        assert found[name] == whole[name]
    assert "rollout/zero_spread_frac" not in found and found["rollout/response_length_mean"] == 4.0
    nothing = rollout_metrics(Rollouts.of(failed))
    assert nothing["rollout/reward_failed_frac"] == 1.0 and "rollout/reward_mean" not in nothing


def test_a_part_that_is_weighed_is_said_beside_the_reward() -> None:
    plain = replace(rollout(0, 1.0, (1,), 0, 0, "stop"), reward_parts={"a": 1.0})
    assert "reward/a" not in rollout_metrics(Rollouts.of([plain]))
    weighed = replace(plain, reward=0.5)
    assert rollout_metrics(Rollouts.of([weighed, plain]))["reward/a"] == 1.0


def test_share_of_drafts_that_were_accepted() -> None:
    plain = rollout(0, 1.0, (1,), 0, 0, "stop")
    assert "rollout/draft_accepted" not in rollout_metrics(Rollouts.of([plain]))
    drafted = [replace(plain, drafted=6, accepted=2), replace(plain, drafted=2, accepted=2), plain]
    assert rollout_metrics(Rollouts.of(drafted))["rollout/draft_accepted"] == 0.5


def test_nothing_to_measure() -> None:
    assert rollout_metrics(Rollouts.of([])) == {}
    assert "rollout/zero_spread_frac" not in rollout_metrics(Rollouts.of([rollout(0, 1.0, (1,), 0, 0, "stop")]))
