"""No reward, and why: what judged a rollout could not. It is never a silent 0."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Failed:
    why: str
    """In one line; the same for all samples that fail alike."""
