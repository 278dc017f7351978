"""Rewards by a model on Megatron, as `algorithm: reward_model` trains and exports it, beside those by functions."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from megarl.config import LoraConfig
from megarl.models.registry import load_hf_config
from megarl.parallel.placement import role_config
from megarl.types import Rollout, Rollouts, TrainBatch
from megarl.types.reward_values import Verdict, of_model
from megarl.workers.context import Context
from megarl.workers.model_worker import ModelWorker
from megarl.workers.reward import RewardWorker


class MegatronRewardWorker(RewardWorker, ModelWorker):
    """`reward.model`, if it is set: its score of each conversation, at its last token, of the ids that the engine saw.
    Its layout is the policy's, or `roles.reward.parallel`."""

    role = "reward_model"
    placed = "reward"

    def __init__(self, context: Context, reward_fn: Callable[[Rollout], float] | None = None, **options: Any) -> None:
        self.model_part = "model" if context.config.reward.model else ""
        super().__init__(context, reward_fn, **options)

    def start(self) -> None:
        """Load it in fp32, whatever the policy's type: weights alone."""
        if path := self.config.reward.model:
            config = role_config(self.config, self.placed)
            settings = dataclasses.replace(config.model, dtype="float32")
            config = dataclasses.replace(config, model=settings, lora=LoraConfig())
            self.build(load_hf_config(path), path, config, trains=False)
        RewardWorker.start(self)

    def ready(self) -> None:
        if self.config.reward.model:
            ModelWorker.ready(self)
        RewardWorker.ready(self)

    def judged(self, whole: Rollouts, part: str) -> Sequence[Verdict]:
        if part != self.model_part:
            return super().judged(whole, part)
        batch = TrainBatch.from_rollouts(whole).with_(routing=None)
        found = self._forward(batch, "scores", every=None).scores
        assert found is not None
        scores = found[batch.cu_seqlens[1:] - 1].tolist()
        return [of_model(value) for value in scores]
