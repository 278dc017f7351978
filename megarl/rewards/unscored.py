"""Rollouts whose reward failed: how many there may be, and what is said of them."""

from __future__ import annotations

from collections import Counter

from megarl.config import ConfigError, RewardConfig
from megarl.types import Rollouts

_SHOWN = 3


def unscored_reasons(rollouts: Rollouts) -> str:
    """`12 x gsm8k: it raised ... (first on the sample '7'), ...`, the most frequent first; empty where none failed."""
    found = Counter((part, why) for part, why, _ in rollouts.unscored_for)
    first = {(part, why): sample for part, why, sample in reversed(rollouts.unscored_for)}
    shown = [
        f"{count} x {part}: {' '.join(why.split())} (on the sample {first[part, why]!r})"
        for (part, why), count in found.most_common(_SHOWN)
    ]
    return ", ".join(shown) + (f", and {len(found) - _SHOWN} other reasons" if len(found) > _SHOWN else "")


def check_unscored(rollouts: Rollouts, config: RewardConfig) -> None:
    """Raise ConfigError where more than `reward.max_failed` of those that were not aborted have no reward, an episode
    being one."""
    rollouts = rollouts.whole_episodes()
    count, of = int((rollouts.unscored > 0).sum()), int((~rollouts.are("aborted")).sum())
    if count > config.max_failed * of:
        raise ConfigError(
            f"{count} of {of} rollouts have no reward, more than reward.max_failed={config.max_failed:g} allows: "
            f"{unscored_reasons(rollouts)}"
        )
