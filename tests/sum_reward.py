"""A reward that an untrained model gets half of the time: whether the ids that it wrote sum to an even number."""

from __future__ import annotations

import time

from megarl.types import Rollout


def even(rollout: Rollout) -> float:
    return float(sum(int(turn.token_ids.sum()) for turn in rollout.turns if turn.is_action) % 2 == 0)


def same(rollout: Rollout) -> float:
    """All samples of a prompt get it, so that group-relative advantages are 0."""
    return 1.0


def broken(rollout: Rollout) -> float:
    """A reward with a mistake in it."""
    return 1.0 / len(rollout.prompt.id[:0])


def hanging(rollout: Rollout) -> float:
    """A reward that never comes."""
    time.sleep(600.0)
    return 1.0
