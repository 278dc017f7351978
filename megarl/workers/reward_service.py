"""Rewards by a service elsewhere, beside those by functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from megarl.parallel.ranks import patient, together
from megarl.rewards.result import Reward, Verdict
from megarl.rewards.service import PART, Service, ServiceOptions
from megarl.types import Rollout, Rollouts
from megarl.workers.context import Context
from megarl.workers.reward import RewardWorker


class ServiceRewardWorker(RewardWorker):
    """The backend `http` of the role: each rank asks about its own rollouts. Options and protocol are those of
    `rewards/service.py`."""

    judges = PART

    def __init__(self, context: Context, reward_fn: Callable[[Rollout], float] | None = None, **options: Any) -> None:
        super().__init__(context, reward_fn)
        self.service = Service(ServiceOptions.read(options))

    def start(self) -> None:
        together(self.service.look, lead=True)

    def judged(self, whole: Rollouts) -> Sequence[Verdict]:
        fullest = int(torch.bincount(whole.home).max())
        found: list[Verdict] = []

        def ask() -> None:
            found.extend(Reward(reward, parts) for reward, parts in self.service.scores(whole.here))

        with patient(max(self.config.run.timeout_s, self.service.longest(fullest))):
            together(ask)
        return found
