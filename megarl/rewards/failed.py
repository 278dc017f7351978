"""No reward, and why: what judged a rollout could not. It is never a silent 0."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Failed:
    reason: str
    """In one line."""
