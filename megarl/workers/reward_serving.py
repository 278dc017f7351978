"""Rewards by a model on Megatron, as `algorithm: reward_model` trains and exports it, beside those by functions."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from megarl.config import ConfigError, LoraConfig
from megarl.models.registry import load_hf_config
from megarl.parallel.placement import role_config
from megarl.rewards.functions import LARGEST, Parts
from megarl.types import Rollout, Rollouts, TrainBatch
from megarl.workers.context import Context
from megarl.workers.model import ModelWorker
from megarl.workers.reward import RewardWorker


class MegatronRewardWorker(RewardWorker, ModelWorker):
    """`reward.model`, if it is set: its score of each conversation, at its last token, of the ids that the engine saw.
    Its layout is the policy's, or `roles.reward.parallel`."""

    role = "reward_model"
    placed = "reward"

    def __init__(self, context: Context, reward_fn: Callable[[Rollout], float] | None = None) -> None:
        self.judges = "model" if context.config.reward.model else ""
        super().__init__(context, reward_fn)

    def start(self) -> None:
        """Load it in fp32, whatever the policy's type: weights alone."""
        if path := self.config.reward.model:
            config = role_config(self.config, self.placed)
            settings = dataclasses.replace(config.model, dtype="float32")
            config = dataclasses.replace(config, model=settings, lora=LoraConfig())
            self.build(load_hf_config(path), path, config, trains=False)

    def ready(self) -> None:
        if self.config.reward.model:
            super().ready()

    def judged(self, whole: Rollouts) -> Sequence[Parts]:
        batch = TrainBatch.from_rollouts(whole).with_(routing=None)
        found = self._forward(batch, "scores", every=True).scores
        assert found is not None
        scores = found[batch.cu_seqlens[1:] - 1].tolist()
        return [self._part(rollout, value) for rollout, value in zip(whole.here, scores, strict=True)]

    def _part(self, rollout: Rollout, value: float) -> Parts:
        if not abs(value) <= LARGEST:
            raise ConfigError(f"reward.model gave the sample {rollout.prompt.id!r} the score {value}")
        return value, {self.judges: value}

    @property
    def _remedy(self) -> str:
        return f"look at the model of reward.model={self.config.reward.model}"
