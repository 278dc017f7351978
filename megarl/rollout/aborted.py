"""Rollouts that a failure or a time-out cut off: how many there may be, and what is said of them."""

from __future__ import annotations

from collections import Counter

from megarl.config import Config, ConfigError
from megarl.types import Rollouts

_SHOWN = 3


def abort_reasons(rollouts: Rollouts) -> str:
    """`12 x it was not done within rollout.step_timeout, ...`, the most frequent first; empty where none is aborted."""
    found = Counter(rollouts.failures)
    shown = [f"{count} x {' '.join(reason.split())}" for reason, count in found.most_common(_SHOWN)]
    more = f", and {len(found) - _SHOWN} other reasons" if len(found) > _SHOWN else ""
    return ", ".join(shown) + more


def check_aborted(rollouts: Rollouts, config: Config) -> None:
    """Raise ConfigError where more than `rollout.max_aborted` of them are, an episode being one."""
    rollouts = rollouts.whole_episodes()
    count = int(rollouts.are("aborted").sum())
    if count > config.rollout.max_aborted * len(rollouts):
        raise ConfigError(
            f"{count} of {len(rollouts)} rollouts were aborted, more than rollout.max_aborted="
            f"{config.rollout.max_aborted:g} allows: {abort_reasons(rollouts)}. What the engines say is in "
            f"{config.run.dir}/logs; where answers are only late, raise rollout.request_timeout or "
            "rollout.step_timeout, or lower rollout.max_new_tokens or rollout.concurrency"
        )
