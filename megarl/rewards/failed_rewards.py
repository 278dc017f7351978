"""Rollouts whose reward failed: the limit on their number, and the summary of their reasons."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from megarl.config import ConfigError, RewardConfig
from megarl.types import Rollouts
from megarl.types.reward_values import RewardFailure, RewardResult

_SHOWN = 3


NOT_SCORED = RewardFailure("it was not judged any more, as too many had failed")
"""Verdict on a rollout that was not scored because too many others had failed."""


def too_many(num_failed: int, total: int, config: RewardConfig) -> bool:
    """Return whether the number of failed rollouts exceeds `reward.max_failed`."""
    return num_failed > config.max_failed * total


def has_failed(verdicts: Mapping[str, RewardResult]) -> bool:
    return any(isinstance(verdict, RewardFailure) for verdict in verdicts.values())


def mark_unscored(verdicts: Mapping[str, RewardResult], parts: Sequence[str]) -> dict[str, RewardResult]:
    """Mark a rollout that is no longer waited for.

    Its first missing part becomes `NOT_SCORED`, unless another part has failed.
    """
    missing = [part for part in parts if part not in verdicts]
    return dict(verdicts) if has_failed(verdicts) or not missing else {**verdicts, missing[0]: NOT_SCORED}


def summarize_unscored(rollouts: Rollouts) -> str:
    """Return the failure reasons, the most frequent first; empty without failures.

    Format: `12 x gsm8k: it raised ... (on the sample '7'), ...`.
    """
    failed = [entry for entry in rollouts.unscored_reasons if entry[1] != NOT_SCORED.reason]
    counts = Counter((part, why) for part, why, _ in failed)
    first_samples = {(part, why): sample for part, why, sample in reversed(failed)}
    summaries = [
        f"{count} x {part}: {' '.join(why.split())} (on the sample {first_samples[part, why]!r})"
        for (part, why), count in counts.most_common(_SHOWN)
    ]
    return ", ".join(summaries) + (f", and {len(counts) - _SHOWN} other reasons" if len(counts) > _SHOWN else "")


def check_unscored(rollouts: Rollouts, config: RewardConfig) -> None:
    """Raise ConfigError if more than `reward.max_failed` of the rollouts have no reward.

    Aborted rollouts do not count, and the branches of an episode count as one rollout.
    """
    rollouts = rollouts.merge_branches()
    count, of = int((rollouts.unscored > 0).sum()), int((~rollouts.has_status("aborted")).sum())
    if too_many(count, of, config):
        dropped = sum(why == NOT_SCORED.reason for _, why, _ in rollouts.unscored_reasons)
        suffix = f" (the other {dropped} were not judged any more)" if dropped else ""
        raise ConfigError(
            f"{count - dropped} of {of} rollouts have no reward, more than reward.max_failed={config.max_failed:g} "
            f"allows{suffix}: {summarize_unscored(rollouts)}"
        )
