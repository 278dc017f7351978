"""Limits on rollouts aborted by a failure or a timeout, and the error that reports them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from megarl.config import Config, ConfigError, RolloutConfig
from megarl.types import Rollouts

_MAX_REASONS = 3


class TooManyAborted(RuntimeError):
    """More than `rollout.max_aborted_frac` are aborted while others run. `failures` has one engine's reasons."""

    def __init__(self, count: int, total: int, failures: Sequence[str]) -> None:
        super().__init__(f"{count} of {total} rollouts were aborted")
        self.count, self.total, self.failures = count, total, failures


def summarize_aborts(rollouts: Rollouts) -> str:
    """Return `12 x it did not finish within rollout.step_timeout, ...`, most frequent first; empty without aborts."""
    return _summarize_reasons(rollouts.failures)


def _summarize_reasons(failures: Iterable[str]) -> str:
    counts = Counter(failures)
    shown = [f"{count} x {' '.join(reason.split())}" for reason, count in counts.most_common(_MAX_REASONS)]
    more = f", and {len(counts) - _MAX_REASONS} other reasons" if len(counts) > _MAX_REASONS else ""
    return ", ".join(shown) + more


def is_over_abort_limit(count: int, total: int, config: RolloutConfig) -> bool:
    """Return whether `count` aborted rollouts exceed the share `rollout.max_aborted_frac` of `total`."""
    return count > config.max_aborted_frac * total


def check_abort_limit(rollouts: Rollouts, config: Config) -> None:
    """Raise ConfigError if more than `rollout.max_aborted_frac` of the episodes are aborted."""
    rollouts = rollouts.merge_branches()
    count = int(rollouts.has_status("aborted").sum())
    if is_over_abort_limit(count, len(rollouts), config.rollout):
        raise ConfigError(format_abort_error(count, len(rollouts), rollouts.failures, config))


def format_abort_error(count: int, total: int, failures: Iterable[str], config: Config) -> str:
    """Format the error for too many aborted rollouts."""
    return (
        f"{count} of {total} rollouts were aborted, more than rollout.max_aborted_frac="
        f"{config.rollout.max_aborted_frac:g} allows: {_summarize_reasons(failures)}. See the engines' logs in "
        f"{config.run.dir}/logs; if answers are only late, raise rollout.request_timeout or "
        "rollout.step_timeout, or lower rollout.max_new_tokens or rollout.concurrency"
    )
