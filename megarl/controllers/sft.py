"""Supervised fine-tuning: maximise the log-probability of the assistant's tokens in finished conversations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from megarl.controllers.base import Controller, MeanOf, StepResult, mini_batches
from megarl.data.sft import sft_rollouts
from megarl.types import ModelOutput, Rollout, TokenLoss, TrainBatch

if TYPE_CHECKING:
    from megarl.flow import HybridFlow


class SFTController(Controller):
    def roles(self) -> tuple[str, ...]:
        return ("actor",)

    def items(self, flow: HybridFlow) -> Sequence[Rollout]:
        return sft_rollouts(self.config.data.train, flow.chat.tokenizer)

    def step(self, flow: HybridFlow, items: Sequence[Rollout]) -> StepResult:
        batch = TrainBatch.from_rollouts(items)

        def negative_logprob(output: ModelOutput, part: TrainBatch) -> TokenLoss:
            assert output.logprobs is not None
            return TokenLoss(-output.logprobs, {"actor/nll": -output.logprobs.detach()})

        means = MeanOf()
        for mini in mini_batches(batch, self.config, seed=0):
            means.add(flow.actor.update(mini, negative_logprob))
        return StepResult(means.result())
