"""Rewards: each rank scores its share of the rollouts, every rank gets them all."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from megarl.config import ConfigError
from megarl.parallel.ranks import all_gather_objects
from megarl.rewards.functions import load_functions, score
from megarl.types import Rollout
from megarl.workers.context import Context, Worker


class RewardWorker(Worker):
    def __init__(self, context: Context, reward_fn: Callable[[Rollout], float] | None = None) -> None:
        super().__init__(context)
        if reward_fn is not None:
            self.functions = {getattr(reward_fn, "__name__", "reward_fn"): reward_fn}
        else:
            self.functions = load_functions(self.config.reward.functions)
        if not self.functions:
            raise ConfigError("there is no reward: set reward.functions to a list of module:name, or pass reward_fn")

    def score(self, rollouts: Sequence[Rollout]) -> list[Rollout]:
        """The rollouts with `reward` and `reward_parts`; an error of a function on one rank is raised on all."""
        with self.clock.phase("reward"):
            share = list(rollouts)[self.ranks.rank :: self.ranks.world]
            result: list[Rollout] | str
            try:
                result = score(share, self.functions)
            except ValueError as error:
                result = str(error)
            parts = all_gather_objects(result)
        for part in parts:
            if isinstance(part, str):
                raise ConfigError(part)
        scored: list[Rollout] = [None] * len(rollouts)  # type: ignore[list-item]
        for rank, part in enumerate(parts):
            scored[rank :: self.ranks.world] = part
        return scored
