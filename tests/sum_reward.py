"""Reward functions for tests. An untrained model earns `even` half of the time."""

from __future__ import annotations

import time

from megarl.types import Rollout


def even(rollout: Rollout) -> float:
    """Return 1 if the sampled token ids sum to an even number."""
    return float(sum(int(turn.token_ids.sum()) for turn in rollout.turns if turn.is_action) % 2 == 0)


def short(rollout: Rollout) -> float:
    """Return 100 less one for each sampled token."""
    return 100.0 - rollout.num_actions


def same(rollout: Rollout) -> float:
    """Return the same reward for all samples, so that group-relative advantages are 0."""
    return 1.0


def broken(rollout: Rollout) -> float:
    """Raise ZeroDivisionError."""
    return 1.0 / len(rollout.prompt.id[:0])


def hanging(rollout: Rollout) -> float:
    """Exceed any timeout."""
    time.sleep(600.0)
    return 1.0
