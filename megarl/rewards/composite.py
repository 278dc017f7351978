"""Combine the parts of a reward (functions, environments, a model, a service) into one number by weights.

If any part failed, the rollout has no reward. `Rollout.env_reward` holds the environment's part.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from megarl.config import ConfigError, RolloutConfig
from megarl.config.strict import closest_match, short_repr
from megarl.environments.catalog import ENVIRONMENTS_KEY, load_catalog
from megarl.types import Episodes, RewardFailure, Rollout, Rollouts
from megarl.types.reward_values import MAX_REWARD, RewardError, RewardResult, parse_number, sum_reward

PART = "environment"
NO_REWARD = RewardFailure("its agent returned no reward, and there are no reward.functions")
"""An agent may leave the reward to the reward functions, which must then exist."""


def has_environment_reward(config: RolloutConfig, has_other_parts: bool) -> bool:
    """Return whether any environment has a `reward`. others: whether the reward has other parts.

    Raises ConfigError for an environment without a reward if there are no other parts either.
    """
    environments = load_catalog(config).environments.values()
    for environment in environments:
        if not environment.has_reward and not has_other_parts:
            raise ConfigError(
                f"{ENVIRONMENTS_KEY}: {environment.spec} has no `reward`, and there are no reward.functions: "
                "nobody says what its "
                "conversations are worth; give it one, or set the latter"
            )
    return any(environment.has_reward for environment in environments)


Weights = Mapping[str, float]
"""Weights by part; a missing part has weight 1."""


def check_weights(weights: Any, parts: Collection[str], key: str = "reward.weights") -> dict[str, float]:
    """Return the weights as floats. Raises ConfigError for an unknown part or a weight beyond `MAX_REWARD`."""
    if not isinstance(weights, Mapping):
        raise ConfigError(
            f"{key} must be a mapping of parts to numbers, such as {{gsm8k: 0.5}}, not {short_repr(weights)}"
        )
    for name, weight in weights.items():
        if name not in parts:
            match = closest_match(str(name), parts)
            hint = f"; did you mean {match}?" if match else ""
            raise ConfigError(
                f"{key}: no part of the reward is called {short_repr(name)}{hint} (it has {', '.join(parts)})"
            )
        is_number = isinstance(weight, int | float) and not isinstance(weight, bool)
        if not is_number or not abs(weight) <= MAX_REWARD:
            raise ConfigError(
                f"{key}.{name} must be a number from -{MAX_REWARD:g} to {MAX_REWARD:g}, not {short_repr(weight)}"
            )
    return {name: float(weight) for name, weight in weights.items()}


def combine_reward(rollout: Rollout, verdicts: Mapping[str, RewardResult], weights: Weights) -> Rollout:
    """Return the rollout with its total reward, its unweighted parts, and its turn rewards.

    Sub-parts are recorded as `part/name`. If a part failed, or the total exceeds `MAX_REWARD`, there is no reward:
    `unscored` holds the reasons, and no turn has a reward either.
    """
    successes = {name: verdict for name, verdict in verdicts.items() if not isinstance(verdict, RewardFailure)}
    parts: dict[str, float] = {}
    for name, verdict in successes.items():
        parts |= {name: sum_reward(verdict)} | {f"{name}/{part}": value for part, value in verdict.parts.items()}
    unscored = {name: verdict.reason for name, verdict in verdicts.items() if isinstance(verdict, RewardFailure)}
    applied_weights = {name: weights.get(name, 1.0) for name in successes}
    total = math.fsum(applied_weights[name] * parts[name] for name in successes)
    try:
        parse_number(total, "the sum of all parts")
    except RewardError as error:
        unscored["sum"] = str(error)
    turns = rollout.turns
    if any(turn.reward for turn in turns) or any(verdict.turns for verdict in successes.values()):
        action_indices = iter(range(sum(turn.is_action for turn in turns)))
        turns = tuple(
            replace(
                turn, reward=0.0 if unscored else _combine_turn_reward(next(action_indices), successes, applied_weights)
            )
            if turn.is_action
            else turn
            for turn in turns
        )
    reward = 0.0 if unscored else total
    return replace(rollout, turns=turns, reward=reward, reward_parts=parts, unscored=unscored)


def clear_reward(rollout: Rollout) -> Rollout:
    """Return the rollout without any reward, as for an aborted one."""
    return replace(combine_reward(rollout, {}, {}), reward_parts={})


def combine_episode_rewards(
    rollouts: Rollouts, verdicts: Sequence[Mapping[str, RewardResult]], weights: Weights
) -> list[Rollout]:
    """Return the local rollouts with their rewards.

    verdicts: one per episode that was not aborted, on its last branch. Only the last branch gets turn rewards; all
    branches get the episode's reward.
    """
    next_verdict, episodes = iter(verdicts), Episodes.from_ids(rollouts.episode[rollouts.local_indices])
    last_branches = [
        clear_reward(rollout) if rollout.status == "aborted" else combine_reward(rollout, next(next_verdict), weights)
        for rollout in (rollouts.local[number] for number in episodes.last.tolist())
    ]
    return [
        last_branches[number]
        if is_last
        else replace(
            clear_reward(rollout),
            reward=last_branches[number].reward,
            reward_parts=last_branches[number].reward_parts,
            unscored=last_branches[number].unscored,
        )
        for rollout, number, is_last in zip(
            rollouts.local, episodes.episode_ids.tolist(), episodes.is_last.tolist(), strict=True
        )
    ]


def _combine_turn_reward(action_index: int, successes: Mapping[str, Any], weights: Weights) -> float:
    return math.fsum(weights[name] * reward.turns[action_index] for name, reward in successes.items() if reward.turns)
