"""Rewards: functions, of which each rank calls its share, and a reward model on all ranks; every rank gets them all."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from megarl.config import ConfigError, LoraConfig
from megarl.megatron.model import MegatronModel
from megarl.models.registry import load_hf_config
from megarl.parallel.ranks import all_gather_objects, patient
from megarl.rewards.deadline import GRACE_S
from megarl.rewards.functions import LARGEST, checked, load_functions, score
from megarl.types import Rollout, TrainBatch
from megarl.workers.context import Context, Worker

_A_DAY_S = 86400.0
MODEL = "model"
"""Name of the reward model's part among a rollout's `reward_parts`."""


class RewardWorker(Worker):
    def __init__(self, context: Context, reward_fn: Callable[[Rollout], float] | None = None) -> None:
        super().__init__(context)
        if reward_fn is not None:
            self.functions = {getattr(reward_fn, "__name__", "reward_fn"): checked(reward_fn, "reward_fn")}
        else:
            self.functions = load_functions(self.config.reward.functions)
        self.model: MegatronModel | None = None
        if not self.functions and not self.config.reward.model:
            raise ConfigError(
                "there is no reward: set reward.functions to a list of module:name, or reward.model, or pass reward_fn"
            )
        if MODEL in self.functions and self.config.reward.model:
            raise ConfigError(f"a reward function may not be called {MODEL!r} beside reward.model; rename it")

    def start(self) -> None:
        """Load the reward model in fp32, whatever the policy's type: weights alone, laid out as the policy."""
        path = self.config.reward.model
        if path:
            with self.clock.phase("load"):
                settings = dataclasses.replace(self.config.model, dtype="float32")
                config = dataclasses.replace(self.config, model=settings, lora=LoraConfig())
                self.model = MegatronModel(load_hf_config(path), config, self.ranks, "reward_model", trains=False)
                self.model.load_hf(path)
                self.context.models.add(self.model)

    def score(self, rollouts: Sequence[Rollout]) -> list[Rollout]:
        """The rollouts with `reward` and `reward_parts`; an error of a function on one rank is raised on all.

        Aborted ones are shown to nobody and stay without.
        """
        whole = [rollout for rollout in rollouts if rollout.status != "aborted"]
        scored = iter(self._score(whole) if whole else [])
        return [rollout if rollout.status == "aborted" else next(scored) for rollout in rollouts]

    def _score(self, rollouts: list[Rollout]) -> list[Rollout]:
        with self.clock.phase("reward"):
            share = rollouts[self.ranks.job.rank :: self.ranks.job.world]
            limit = self.config.reward.timeout
            result: list[Rollout] | str
            # The longest that the slowest rank may take, if each of its calls takes as long as one may.
            calls = -(-len(rollouts) // self.ranks.job.world) * len(self.functions)
            longest = max(self.config.run.timeout_s, (min(limit, _A_DAY_S) + GRACE_S) * calls)
            with patient(longest):
                try:
                    result = score(share, self.functions, limit)
                except ValueError as error:
                    result = str(error)
                parts = all_gather_objects(result)
            for part in parts:
                if isinstance(part, str):
                    raise ConfigError(part)
            scored: list[Rollout] = [None] * len(rollouts)  # type: ignore[list-item]
            for rank, part in enumerate(parts):
                scored[rank :: self.ranks.job.world] = part
            return scored if self.model is None else self._with_model(scored, self.model)

    def _with_model(self, rollouts: list[Rollout], model: MegatronModel) -> list[Rollout]:
        """The same with the model's score of each conversation, at its last token: the ids that the engine saw. What
        was aborted has none."""
        whole = [rollout for rollout in rollouts if rollout.status != "aborted"]
        if not whole:
            return rollouts
        batch = TrainBatch.from_rollouts(whole)
        scores = iter(model.forward(batch)["scores"][batch.cu_seqlens[1:] - 1].tolist())
        return [rollout if rollout.status == "aborted" else _plus(rollout, next(scores)) for rollout in rollouts]


def _plus(rollout: Rollout, value: float) -> Rollout:
    if not abs(value) <= LARGEST:
        raise ConfigError(f"reward.model gave the sample {rollout.prompt.id!r} the score {value}")
    parts = {**rollout.reward_parts, MODEL: value}
    return dataclasses.replace(rollout, reward=rollout.reward + value, reward_parts=parts)
