"""Combine the parts of a reward, with values computed by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from megarl.config import ConfigError
from megarl.rewards.composite import clear_reward, combine_episode_rewards, combine_reward
from megarl.rewards.reward_settings import check_weights
from megarl.types import Prompt, Rollout, Rollouts, Turn, as_branches
from megarl.types.reward_values import Reward, RewardFailure, RewardResult

pytestmark = pytest.mark.alone

ROLLOUT = Rollout(
    Prompt("p", ()),
    (Turn((1,)), Turn((2,), (0.0,), True, 3), Turn((4,)), Turn((5, 6), (0.0, -1.0), True, 3)),
    reward=9.0,
    reward_parts={"old": 9.0},
    unscored={"old": "as it was"},
)


def test_sums_parts_by_weight_which_defaults_to_1() -> None:
    results = {"gsm8k": Reward(1.0), "model": Reward(-2.0, {"margin": 0.5}), "service": Reward(3.0)}
    result = combine_reward(ROLLOUT, results, {"gsm8k": 0.4, "model": 0.5})
    assert result.reward == pytest.approx(0.4 - 1.0 + 3.0)
    assert result.reward_parts == {"gsm8k": 1.0, "model": -2.0, "model/margin": 0.5, "service": 3.0}
    assert result.unscored == {} and result.turns is ROLLOUT.turns
    assert combine_reward(ROLLOUT, results, {}).reward == 2.0
    assert combine_reward(ROLLOUT, {}, {}).reward == 0.0


def test_weights_turn_rewards() -> None:
    """0.5 * (1 + 0.25 + 0.5) + 2 * (0 - 0.25 + 0)."""
    results = {"a": Reward(1.0, turns=(0.25, 0.5)), "b": Reward(0.0, turns=(-0.25, 0.0)), "c": Reward(1.0)}
    result = combine_reward(ROLLOUT, results, {"a": 0.5, "b": 2.0, "c": 0.0})
    assert [turn.reward for turn in result.turns] == [0.0, 0.125 - 0.5, 0.0, 0.25]
    assert result.reward == 0.875 - 0.5 and result.reward_parts == {"a": 1.75, "b": -0.25, "c": 1.0}
    assert tuple(replace(turn, reward=0.0) for turn in result.turns) == ROLLOUT.turns
    combined_again = combine_reward(result, {"c": Reward(1.0)}, {})
    assert combined_again.turns == ROLLOUT.turns and combined_again.reward == 1.0
    assert clear_reward(result) == replace(ROLLOUT, reward=0.0, reward_parts={}, unscored={})


@pytest.mark.parametrize("failed_part", [RewardFailure("it raised"), Reward(8e5, turns=(1e5, 0.0))])
def test_a_failed_part_leaves_the_rollout_unscored(failed_part: RewardResult) -> None:
    results: dict[str, RewardResult] = {"good": Reward(2e5, turns=(1.0, 1.0)), "other": failed_part}
    result = combine_reward(ROLLOUT, results, {})
    assert result.reward == 0.0 and not any(turn.reward for turn in result.turns)
    assert result.reward_parts["good"] == 200002.0
    if isinstance(failed_part, RewardFailure):
        assert result.unscored == {"other": "it raised"}
    else:
        assert list(result.unscored) == ["sum"] and "returned 1.1e+06; beyond 1e+06" in result.unscored["sum"]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (
            {"gsm": 1.0},
            "reward.weights: no part of the reward is called 'gsm'; did you mean gsm8k.*it has gsm8k, model",
        ),
        ({"gsm8k": math.nan}, "reward.weights.gsm8k must be a number from -1e[+]06 to 1e[+]06, not nan"),
        ({"gsm8k": -math.inf}, "not -inf"),
        ({"gsm8k": True}, "not True"),
        ({"gsm8k": "1"}, "not '1'"),
        ({"gsm8k": None}, "not None"),
        ({"model": 10**7}, "not 10000000"),
        ([1.0], r"such as \{right: 1, short: 0.1\}, not \[1.0\]; .* the environment's part is named environment"),
        (None, "must be a mapping"),
    ],
)
def test_refuses_invalid_weights(value: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        check_weights(value, ("gsm8k", "model"))
    assert "\n" not in str(error.value)


def test_accepts_weights_of_known_parts() -> None:
    assert check_weights({"model": 2, "gsm8k": -0.5}, ("gsm8k", "model")) == {"model": 2.0, "gsm8k": -0.5}
    assert check_weights({}, ()) == {}


def test_scores_the_last_branch_for_the_whole_episode() -> None:
    """Turn rewards go to the last branch, and earlier rewards of all branches are cleared."""
    turn = Turn((7,), (0.0,), True, reward=3.0)
    branches = as_branches([replace(ROLLOUT, turns=(Turn((1,)), turn)), ROLLOUT], 0)
    aborted = as_branches([ROLLOUT, replace(ROLLOUT, status="aborted", failure="late")], 1)
    rollouts = Rollouts.gather([*branches, *aborted, ROLLOUT, *as_branches([ROLLOUT] * 3, 2)])
    results: list[dict[str, RewardResult]] = [
        {"a": Reward(1.0, {"b": 2.0}, (0.25, 0.5))},
        {"a": Reward(5.0)},
        {"a": RewardFailure("x")},
    ]
    first, last, *cleared, single, second_group, fourth, fifth = combine_episode_rewards(rollouts, results, {"a": 2.0})
    assert last == combine_reward(branches[1], results[0], {"a": 2.0}) and [turn.reward for turn in last.turns] == [
        0,
        0.5,
        0,
        1.0,
    ]
    assert first.turns == (Turn((1,)), replace(turn, reward=0.0)) and first.messages == branches[0].messages
    assert first.reward == last.reward == 3.5 and first.reward_parts == last.reward_parts == {"a": 1.75, "a/b": 2.0}
    assert cleared == [clear_reward(rollout) for rollout in aborted]
    assert single == combine_reward(ROLLOUT, results[1], {"a": 2.0}) and single.reward == 10.0
    assert second_group.unscored == fourth.unscored == fifth.unscored == {"a": "x"} and second_group.reward == 0.0
    assert [rollout.episode for rollout in (first, last, *cleared, single, second_group)] == [0, 0, 1, 1, -1, 2]
