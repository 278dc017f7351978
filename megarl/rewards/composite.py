"""Combine the parts of a reward (functions, environments, a model, a service) into one number by weights.

If a part failed there is no reward. `Rollout.env_reward` holds the part that an environment gave.
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
"""An agent may leave it to others, who must be there then."""


def has_environment_reward(config: RolloutConfig, others: bool) -> bool:
    """Whether environments have a `reward`. others: whether there are other parts. Raises ConfigError where there are
    none, and nobody would say what the conversations of an environment are worth."""
    environments = load_catalog(config).environments.values()
    for one in environments:
        if not one.has_reward and not others:
            raise ConfigError(
                f"{ENVIRONMENTS_KEY}: {one.spec} has no `reward`, and there are no reward.functions: nobody says what its "
                "conversations are worth; give it one, or set the latter"
            )
    return any(one.has_reward for one in environments)


Weights = Mapping[str, float]
"""By part; one that is not named weighs 1."""


def check_weights(given: Any, parts: Collection[str], key: str = "reward.weights") -> dict[str, float]:
    """The weights, if they are finite numbers of at most `LARGEST` for parts that there are. Raises ConfigError."""
    if not isinstance(given, Mapping):
        raise ConfigError(
            f"{key} must be a mapping of parts to numbers, such as {{gsm8k: 0.5}}, not {short_repr(given)}"
        )
    for name, weight in given.items():
        if name not in parts:
            near = closest_match(str(name), parts)
            hint = f"; did you mean {near}?" if near else ""
            raise ConfigError(
                f"{key}: no part of the reward is called {short_repr(name)}{hint} (it has {', '.join(parts)})"
            )
        number = isinstance(weight, int | float) and not isinstance(weight, bool)
        if not number or not abs(weight) <= MAX_REWARD:
            raise ConfigError(
                f"{key}.{name} must be a number from -{MAX_REWARD:g} to {MAX_REWARD:g}, not {short_repr(weight)}"
            )
    return {name: float(weight) for name, weight in given.items()}


def combine_reward(rollout: Rollout, verdicts: Mapping[str, RewardResult], weights: Weights) -> Rollout:
    """The rollout with its reward, the parts of it before their weights, and the rewards of its turns.

    What a part says besides is recorded as `part/name`. Where a part failed, or all of it is beyond `LARGEST`, there is
    no reward: `unscored` says why, and no turn has one either.
    """
    good = {name: said for name, said in verdicts.items() if not isinstance(said, RewardFailure)}
    parts: dict[str, float] = {}
    for name, said in good.items():
        parts |= {name: sum_reward(said)} | {f"{name}/{part}": value for part, value in said.parts.items()}
    unscored = {name: said.reason for name, said in verdicts.items() if isinstance(said, RewardFailure)}
    weighed = {name: weights.get(name, 1.0) for name in good}
    whole = math.fsum(weighed[name] * parts[name] for name in good)
    try:
        parse_number(whole, "the sum of all parts")
    except RewardError as error:
        unscored["sum"] = str(error)
    turns = rollout.turns
    if any(turn.reward for turn in turns) or any(said.turns for said in good.values()):
        of_turns = iter(range(sum(turn.is_action for turn in turns)))
        turns = tuple(
            replace(turn, reward=0.0 if unscored else _combine_turn_reward(next(of_turns), good, weighed))
            if turn.is_action
            else turn
            for turn in turns
        )
    reward = 0.0 if unscored else whole
    return replace(rollout, turns=turns, reward=reward, reward_parts=parts, unscored=unscored)


def clear_reward(rollout: Rollout) -> Rollout:
    """Without any reward, as one that was aborted."""
    return replace(combine_reward(rollout, {}, {}), reward_parts={})


def combine_episode_rewards(
    rollouts: Rollouts, verdicts: Sequence[Mapping[str, RewardResult]], weights: Weights
) -> list[Rollout]:
    """Those that are here with their rewards. verdicts: of each episode that was not aborted, on its last branch, which
    alone has what was said of turns; the reward is of all branches."""
    said, episodes = iter(verdicts), Episodes.from_ids(rollouts.episode[rollouts.local_indices])
    last = [
        clear_reward(one) if one.status == "aborted" else combine_reward(one, next(said), weights)
        for one in (rollouts.local[number] for number in episodes.last.tolist())
    ]
    return [
        last[number]
        if is_last
        else replace(
            clear_reward(one),
            reward=last[number].reward,
            reward_parts=last[number].reward_parts,
            unscored=last[number].unscored,
        )
        for one, number, is_last in zip(
            rollouts.local, episodes.episode_ids.tolist(), episodes.is_last.tolist(), strict=True
        )
    ]


def _combine_turn_reward(number: int, good: Mapping[str, Any], weighed: Weights) -> float:
    return math.fsum(weighed[name] * said.turns[number] for name, said in good.items() if said.turns)
