"""Reward functions that the pool's processes import by name."""

from __future__ import annotations

import os
import time
from typing import Any

from megarl.types import Rollout


def length(rollout: Rollout) -> float:
    return float(len(rollout.token_ids))


async def later(rollout: Rollout) -> dict[str, Any]:
    return {"reward": 0.5, "parts": {"turns": 1}, "turns": [0.25]}


def dies(rollout: Rollout) -> float:
    """Kill its process on one sample."""
    if rollout.prompt.id == "p3":
        os._exit(9)
    return 1.0


def sleeps(rollout: Rollout) -> float:
    time.sleep(600.0)
    return 1.0
