"""Supervised fine-tuning: maximise the log-probability of the assistant's tokens in finished conversations."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megarl.algorithms.token_stats import sequence_sums
from megarl.config import Config
from megarl.controllers.controller import Controller, Flow, StepResult
from megarl.controllers.mini_batches import MetricMeans, split_mini_batches
from megarl.observe.metrics import SourceMeans
from megarl.types import ModelOutput, Rollout, TokenLoss, TrainBatch, reads


class SFTController(Controller):
    item = "conversations"

    @classmethod
    def roles(cls, config: Config) -> tuple[str, ...]:
        return ("actor",)

    def load_items(self, flow: Flow) -> Sequence[Rollout]:
        return flow.data.load_conversations(self.config.data.train)

    def step(self, flow: Flow, items: Sequence[Rollout]) -> StepResult:
        batch = TrainBatch.from_rollouts(flow.data.shard(items))

        @reads()
        def negative_logprob(output: ModelOutput, part: TrainBatch) -> TokenLoss:
            assert output.logprobs is not None
            return TokenLoss(-output.logprobs, {"actor/nll": -output.logprobs.detach()})

        means = MetricMeans()
        for mini in split_mini_batches(batch, self.config, seed=0):
            means.add(flow.actor.update(mini, negative_logprob))
        return StepResult(means.sync())

    def load_eval_items(self, flow: Flow) -> Sequence[Rollout]:
        return flow.data.load_conversations(self.config.data.eval)

    def evaluate(self, flow: Flow, items: Sequence[Rollout]) -> dict[str, float]:
        """Return the mean negative log-probability of the assistant's tokens in held-out conversations: in total and by
        source."""
        means, batch_size = SourceMeans(), self.config.data.prompts_per_step
        for start in range(0, len(items), batch_size):
            rollouts = flow.data.shard(items[start : start + batch_size])
            batch = TrainBatch.from_rollouts(rollouts)
            logprobs = flow.actor.forward(batch).wait().logprobs
            assert logprobs is not None
            nll = torch.where(batch.loss_mask, -logprobs.double(), 0.0)
            means.add("eval/nll", batch.all_gather(sequence_sums(nll, batch.cu_seqlens)), rollouts.actions, rollouts)
        return means.result()
