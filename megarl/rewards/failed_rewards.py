"""Rollouts whose reward failed: how many there may be, and what is said of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from megarl.config import ConfigError, RewardConfig
from megarl.types import Rollouts
from megarl.types.reward_values import RewardFailure, RewardResult

_SHOWN = 3


NOT_SCORED = RewardFailure("it was not judged any more, as too many had failed")
"""Of a rollout whose reward was not waited for."""


def too_many(failed: int, of: int, config: RewardConfig) -> bool:
    """Whether so many rollouts without a reward are more than `reward.max_failed` of all allows."""
    return failed > config.max_failed * of


def has_failed(verdicts: Mapping[str, RewardResult]) -> bool:
    return any(isinstance(verdict, RewardFailure) for verdict in verdicts.values())


def mark_unscored(known: Mapping[str, RewardResult], parts: Sequence[str]) -> dict[str, RewardResult]:
    """The verdicts on a rollout of which no more is waited for, where only `known` is there of `parts`."""
    missing = [part for part in parts if part not in known]
    return dict(known) if has_failed(known) or not missing else {**known, missing[0]: NOT_SCORED}


def summarize_unscored(rollouts: Rollouts) -> str:
    """`12 x gsm8k: it raised ... (first on the sample '7'), ...`, the most frequent first; empty where none failed."""
    failed = [one for one in rollouts.unscored_reasons if one[1] != NOT_SCORED.reason]
    found = Counter((part, why) for part, why, _ in failed)
    first = {(part, why): sample for part, why, sample in reversed(failed)}
    shown = [
        f"{count} x {part}: {' '.join(why.split())} (on the sample {first[part, why]!r})"
        for (part, why), count in found.most_common(_SHOWN)
    ]
    return ", ".join(shown) + (f", and {len(found) - _SHOWN} other reasons" if len(found) > _SHOWN else "")


def check_unscored(rollouts: Rollouts, config: RewardConfig) -> None:
    """Raise ConfigError where more than `reward.max_failed` of those that were not aborted have no reward, an episode
    being one."""
    rollouts = rollouts.merge_branches()
    count, of = int((rollouts.unscored > 0).sum()), int((~rollouts.has_status("aborted")).sum())
    if too_many(count, of, config):
        dropped = sum(why == NOT_SCORED.reason for _, why, _ in rollouts.unscored_reasons)
        others = f" (the other {dropped} were not judged any more)" if dropped else ""
        raise ConfigError(
            f"{count - dropped} of {of} rollouts have no reward, more than reward.max_failed={config.max_failed:g} "
            f"allows{others}: {summarize_unscored(rollouts)}"
        )
