"""Figures of agents' sessions, over all engines."""

from __future__ import annotations

import torch

from megarl.rollout.conversations import Conversations
from megarl.sessions.recording import Figures
from megarl.types import Everyone

COUNTED = ("sessions", "requests", "refused", "failed", "forks", "branches", "drift", "turns_over", "observations_cut")


class Agents:
    """wanted: whether there are any. talks: of this rank's engine."""

    def __init__(self, wanted: bool, everyone: Everyone, talks: Conversations | None) -> None:
        self._wanted, self._everyone, self._talks = wanted, everyone, talks
        self._before = torch.zeros(len(COUNTED) + 1, dtype=torch.int64)
        self.figures: dict[str, float] = {}

    def note(self) -> None:
        """Look at what has come since the last time. Collective."""
        if not self._wanted:
            return
        own = Figures() if self._talks is None else self._talks.sessions
        mine = torch.tensor([*(getattr(own, name) for name in COUNTED), sum(own.ignored.values())])
        found = dict(zip((*COUNTED, "ignored"), self._everyone.total(mine - self._before).tolist(), strict=True))
        self._before = mine
        drift, branches = found.pop("drift"), found["branches"]
        self.figures = {f"agents/{name}": float(count) for name, count in found.items()}
        self.figures["agents/drift_frac"] = drift / max(1, branches)
