"""Rewards by what answers over HTTP, a service or a generative judge, beside those by functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from megarl.parallel.ranks import patient, together
from megarl.rewards import judge, service
from megarl.types import Rollout, Rollouts
from megarl.types.verdicts import Failed, Reward, Verdict
from megarl.workers.context import Context
from megarl.workers.reward import RewardWorker


class ServiceRewardWorker(RewardWorker):
    """The backend `http` of the role: each rank asks about its own rollouts. Options and protocol are those of
    `rewards/service.py`."""

    judges = service.PART

    def __init__(self, context: Context, reward_fn: Callable[[Rollout], float] | None = None, **options: Any) -> None:
        super().__init__(context, reward_fn)
        self.service = self.asked(options)

    def asked(self, options: dict[str, Any]) -> service.Service | judge.Judge:
        return service.Service(service.ServiceOptions.read(options))

    def start(self) -> None:
        together(self.service.asker.check_here)
        together(self.service.look, lead=True)

    def judged(self, whole: Rollouts) -> Sequence[Verdict]:
        fullest = int(torch.bincount(whole.home).max())
        found: list[Verdict] = []

        def ask() -> None:
            for said in self.service.scores(whole.here, self.config.reward.max_failed * len(whole)):
                found.append(said if isinstance(said, Failed) else Reward(*said))

        with patient(max(self.config.run.timeout_s, self.service.longest(fullest))):
            together(ask)
        return found


class JudgeRewardWorker(ServiceRewardWorker):
    """The backend `judge` of the role: each rank asks about its own rollouts. Options are those of
    `rewards/judge.py`."""

    judges = judge.PART

    def asked(self, options: dict[str, Any]) -> judge.Judge:
        return judge.Judge(judge.JudgeOptions.read(options))
