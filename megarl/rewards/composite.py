"""Combine the parts of a reward (functions, environments, a model, a service) into one number by weights."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace

from megarl.config import ConfigError, RewardConfig
from megarl.types import Episodes, Rollout, Rollouts
from megarl.types.reward_values import RewardError, RewardFailure, RewardResult, parse_number, sum_reward

PART = "environment"
NO_REWARD = RewardFailure("its agent returned no reward, and there are no reward.functions")
"""An agent may leave the reward to the reward functions, which must then exist."""
Weights = Mapping[str, float]
"""Weights by part; a missing part has weight 1."""


def combine_reward(rollout: Rollout, verdicts: Mapping[str, RewardResult], weights: Weights) -> Rollout:
    """Return the rollout with its total reward, its unweighted parts and sub-parts `part/name`, and its turn rewards.

    If a part failed, or the total exceeds `MAX_REWARD`, there is no reward: `unscored` holds the reasons.
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
        terms = [(applied_weights[name], verdict.turns) for name, verdict in successes.items() if verdict.turns]
        turn_rewards = iter(
            0.0 if unscored else math.fsum(weight * rewards[index] for weight, rewards in terms)
            for index in range(sum(turn.is_action for turn in turns))
        )
        turns = tuple(replace(turn, reward=next(turn_rewards)) if turn.is_action else turn for turn in turns)
    reward = 0.0 if unscored else total
    return replace(rollout, turns=turns, reward=reward, reward_parts=parts, unscored=unscored)


def clear_reward(rollout: Rollout) -> Rollout:
    """Return the rollout without any reward, as for an aborted one."""
    return replace(combine_reward(rollout, {}, {}), reward_parts={})


def combine_episode_rewards(
    rollouts: Rollouts, verdicts: Sequence[Mapping[str, RewardResult]], weights: Weights
) -> list[Rollout]:
    """Return the local rollouts with their episodes' rewards; only the last branches get turn rewards.

    verdicts: one per episode that was not aborted, on its last branch.
    """
    next_verdict, episodes = iter(verdicts), Episodes.from_ids(rollouts.episode[rollouts.local_indices])
    last_branches = [
        clear_reward(rollout) if rollout.status == "aborted" else combine_reward(rollout, next(next_verdict), weights)
        for rollout in (rollouts.local[number] for number in episodes.last.tolist())
    ]
    result = []
    episode_ids, is_last_branch = episodes.episode_ids.tolist(), episodes.is_last.tolist()
    for rollout, number, is_last in zip(rollouts.local, episode_ids, is_last_branch, strict=True):
        last, branch = last_branches[number], clear_reward(rollout)
        branch = replace(branch, reward=last.reward, reward_parts=last.reward_parts, unscored=last.unscored)
        result.append(last if is_last else branch)
    return result


_SHOWN = 3
NOT_SCORED = RewardFailure("it was not graded, because too many had failed")
"""Verdict on a rollout that was not scored because too many others had failed."""


def too_many(num_failed: int, total: int, config: RewardConfig) -> bool:
    """Return whether the number of failed rollouts exceeds `reward.max_failed_frac`."""
    return num_failed > config.max_failed_frac * total


def has_failed(verdicts: Mapping[str, RewardResult]) -> bool:
    return any(isinstance(verdict, RewardFailure) for verdict in verdicts.values())


def mark_unscored(verdicts: Mapping[str, RewardResult], parts: Sequence[str]) -> dict[str, RewardResult]:
    """Mark a rollout that is no longer waited for: its first missing part as `NOT_SCORED`, unless a part has failed."""
    missing = [part for part in parts if part not in verdicts]
    return dict(verdicts) if has_failed(verdicts) or not missing else {**verdicts, missing[0]: NOT_SCORED}


async def call_while(call: Callable[[int], Awaitable[bool]], count: int, max_concurrent: int) -> None:
    """Await `call(0)` to `call(count - 1)`. Once one returns False, cancel the others."""
    semaphore = asyncio.Semaphore(max_concurrent)

    async def run(number: int) -> None:
        async with semaphore:
            should_continue = await call(number)
        if not should_continue:
            for task in set(tasks) - {asyncio.current_task()}:
                task.cancel()

    tasks = [asyncio.create_task(run(number)) for number in range(count)]
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(result, BaseException) and not isinstance(result, asyncio.CancelledError):
            raise result


def summarize_unscored(rollouts: Rollouts) -> str:
    """Return the failure reasons, the most frequent first: `12 x gsm8k: it raised ... (on the sample '7'), ...`."""
    failed = [entry for entry in rollouts.unscored_reasons if entry[1] != NOT_SCORED.reason]
    counts = Counter((part, why) for part, why, _ in failed)
    first_samples = {(part, why): sample for part, why, sample in reversed(failed)}
    summaries = [
        f"{count} x {part}: {' '.join(why.split())} (on the sample {first_samples[part, why]!r})"
        for (part, why), count in counts.most_common(_SHOWN)
    ]
    return ", ".join(summaries) + (f", and {len(counts) - _SHOWN} other reasons" if len(counts) > _SHOWN else "")


def check_unscored(rollouts: Rollouts, config: RewardConfig) -> None:
    """Raise ConfigError if more than `reward.max_failed_frac` of the rollouts that were not aborted have no reward."""
    rollouts = rollouts.merge_branches()
    count, of = int((rollouts.unscored > 0).sum()), int((~rollouts.has_status("aborted")).sum())
    if too_many(count, of, config):
        dropped = sum(why == NOT_SCORED.reason for _, why, _ in rollouts.unscored_reasons)
        suffix = f" (the other {dropped} were not graded)" if dropped else ""
        raise ConfigError(
            f"{count - dropped} of {of} rollouts have no reward, more than "
            f"reward.max_failed_frac={config.max_failed_frac:g} allows{suffix}: {summarize_unscored(rollouts)}"
        )
