"""A reward model from preferences: of two answers to a prompt, the preferred one gets the higher score.

Bradley-Terry on pairs (arXiv:2203.02155, section 3.5). Other runs use the export as `reward.model`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megarl.algorithms.losses import bradley_terry, pair_mean_weights
from megarl.algorithms.token_stats import sequence_sums
from megarl.config import Config
from megarl.controllers.controller import Controller, Flow, StepResult
from megarl.controllers.mini_batches import MetricMeans, split_indices
from megarl.data.datasets import Pair
from megarl.observe.metrics import SourceMeans
from megarl.types import ModelOutput, Rollouts, TokenLoss, TrainBatch, reads


class RewardModelController(Controller):
    item = "pairs"
    trained_roles = ("reward_model",)
    has_scalar_head = True

    @classmethod
    def roles(cls, config: Config) -> tuple[str, ...]:
        return ("reward_model",)

    def load_items(self, flow: Flow) -> Sequence[Pair]:
        return flow.data.load_preferences(self.config.data.train)

    def step(self, flow: Flow, items: Sequence[Pair]) -> StepResult:
        @reads()
        def loss(output: ModelOutput, part: TrainBatch) -> TokenLoss:
            assert output.scores is not None
            return bradley_terry(output.scores, part.cu_seqlens, part.group)

        means = MetricMeans()
        for part in split_indices(len(items), self.config.run.num_update, self.config.run.ppo_epochs, seed=0):
            _, batch = shard_pairs(flow, [items[i] for i in part])
            means.add(flow.reward_model.update(batch, loss))
        return StepResult(means.sync())

    def load_eval_items(self, flow: Flow) -> Sequence[Pair]:
        return flow.data.load_preferences(self.config.data.eval)

    def evaluate(self, flow: Flow, items: Sequence[Pair]) -> dict[str, float]:
        """Return loss, accuracy and margin on the held-out pairs, under eval/: in total and by source."""
        means, batch_size = SourceMeans(), self.config.data.prompts_per_step
        for start in range(0, len(items), batch_size):
            rollouts, batch = shard_pairs(flow, items[start : start + batch_size])
            scores = flow.reward_model.forward(batch).wait().scores
            assert scores is not None
            result = bradley_terry(scores, batch.cu_seqlens, batch.group[batch.local_indices])
            for name, values in {"loss": result.loss, **result.metrics}.items():
                sums = batch.all_gather(sequence_sums(values, batch.cu_seqlens))  # at the chosen sequence of each pair
                halves = torch.full_like(sums, 0.5)
                means.add(f"eval/{name.removeprefix('reward_model/')}", sums, halves, rollouts)
        return means.result()


def shard_pairs(flow: Flow, pairs: Sequence[Pair]) -> tuple[Rollouts, TrainBatch]:
    """Return the two conversations of each pair, and their batch: sequences 2k and 2k + 1 are the chosen and the
    rejected one of pair k, and the weights make the loss a mean over pairs."""
    rollouts = flow.data.shard([rollout for pair in pairs for rollout in (pair.chosen, pair.rejected)], group_size=2)
    batch = TrainBatch.from_rollouts(rollouts)
    group = torch.arange(len(pairs)).repeat_interleave(2)
    weights = pair_mean_weights(batch.cu_seqlens, batch.all_reduce)
    return rollouts, batch.with_(group=group, loss_weights=weights, keeps_groups=True)
