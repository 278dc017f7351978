"""Rewards from a Megatron model, as `algorithm: reward_model` trains and exports it, in addition to functions."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from megarl.config import LoraConfig
from megarl.models.registry import load_hf_config
from megarl.parallel.placement import role_config
from megarl.types import Rollout, Rollouts, TrainBatch
from megarl.types.reward_values import RewardResult, parse_model_score
from megarl.workers.context import Context
from megarl.workers.model_worker import ModelWorker
from megarl.workers.reward import RewardWorker


class MegatronRewardWorker(RewardWorker, ModelWorker):
    """Scores each conversation with `reward.model`, if set, at the last of the token ids that the engine saw.

    The model's layout is the policy's, or `roles.reward.parallel`.
    """

    role = "reward_model"
    placement_key = "reward"

    def __init__(self, context: Context, reward_fn: Callable[[Rollout], float] | None = None, **options: Any) -> None:
        self.model_part = "model" if context.config.reward.model else ""
        super().__init__(context, reward_fn, **options)

    def start(self) -> None:
        """Load the model in fp32, independent of the policy's dtype, without an optimizer."""
        if path := self.config.reward.model:
            config = role_config(self.config, self.placement_key)
            settings = dataclasses.replace(config.model, dtype="float32")
            config = dataclasses.replace(config, model=settings, lora=LoraConfig())
            self.build(load_hf_config(path), path, config, trains=False)
        RewardWorker.start(self)

    def wait_ready(self) -> None:
        if self.config.reward.model:
            ModelWorker.wait_ready(self)
        RewardWorker.wait_ready(self)

    def score_part(self, rollouts: Rollouts, part: str) -> Sequence[RewardResult]:
        if part != self.model_part:
            return super().score_part(rollouts, part)
        batch = TrainBatch.from_rollouts(rollouts).with_(routing=None)
        token_scores = self._forward(batch, "scores", all_tokens=None).wait().scores
        assert token_scores is not None
        scores = token_scores[batch.cu_seqlens[1:] - 1].tolist()
        return [parse_model_score(value) for value in scores]
