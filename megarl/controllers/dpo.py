"""Direct preference optimization (DPO, arXiv:2305.18290) and its relatives: a policy from preference pairs.

`options.loss` and the other options select the loss (`algorithms/preference_losses.py`); `dpo`, `ipo`, `simpo`, `cpo`
and `orpo` are recipes. Only the log-probs of the two answers enter, so no engine starts. The reference's are computed
once per step, before the updates; a loss without a reference builds none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from megarl.algorithms.preference_losses import PreferenceOptions, chosen_mean_weights, preference_loss
from megarl.algorithms.token_stats import sequence_sums
from megarl.config import Config
from megarl.controllers.controller import Controller, Flow, StepResult
from megarl.controllers.mini_batches import MetricMeans, split_indices
from megarl.controllers.reward_model import shard_pairs
from megarl.data.datasets import Pair
from megarl.observe.metrics import SourceMeans
from megarl.types import ModelOutput, Rollouts, TokenLoss, TrainBatch, reads

EVAL_NAMES = {"rewards/accuracy": "accuracy", "rewards/margin": "margin", "actor/nll_loss": "nll"}
"""Metrics of the loss that an evaluation reports, under eval/."""


class DPOController(Controller):
    item = "pairs"
    Options = PreferenceOptions

    @classmethod
    def read_options(cls, config: Config) -> Any:
        options = super().read_options(config)
        options.check()
        return options

    @classmethod
    def roles(cls, config: Config) -> tuple[str, ...]:
        return ("actor",) if cls.read_options(config).reference_free else ("actor", "reference")

    def load_items(self, flow: Flow) -> Sequence[Pair]:
        return flow.data.load_preferences(self.config.data.train)

    def step(self, flow: Flow, items: Sequence[Pair]) -> StepResult:
        _, batch = self.make_batch(flow, items)

        @reads("ref_logprobs")
        def loss(output: ModelOutput, part: TrainBatch) -> TokenLoss:
            assert output.logprobs is not None
            return preference_loss(output.logprobs, part, self.options)

        means = MetricMeans()
        for pairs in split_indices(len(items), self.config.run.num_update, self.config.run.ppo_epochs, seed=0):
            mini = batch.select([sequence for pair in pairs for sequence in (2 * pair, 2 * pair + 1)])
            means.add(flow.actor.update(mini.with_(loss_weights=chosen_mean_weights(mini)), loss))
        return StepResult(means.sync())

    def load_eval_items(self, flow: Flow) -> Sequence[Pair]:
        return flow.data.load_preferences(self.config.data.eval)

    def evaluate(self, flow: Flow, items: Sequence[Pair]) -> dict[str, float]:
        """Return loss, accuracy and margin of the implicit rewards, and the chosen answers' NLL per token, on the
        held-out pairs, under eval/: in total and by source."""
        means, batch_size = SourceMeans(), self.config.data.prompts_per_step
        for start in range(0, len(items), batch_size):
            rollouts, batch = self.make_batch(flow, items[start : start + batch_size])
            logprobs = flow.actor.forward(batch).wait().logprobs
            assert logprobs is not None
            result = preference_loss(logprobs, batch, self.options)
            weights = chosen_mean_weights(batch) * (batch.num_sequences // 2)
            values = {"loss": result.loss, **{EVAL_NAMES[name]: result.metrics[name] for name in EVAL_NAMES}}
            for name, per_token in values.items():
                sums = batch.all_gather(sequence_sums(per_token * weights, batch.cu_seqlens))  # 0 of the rejected
                means.add(f"eval/{name}", sums, torch.full_like(sums, 0.5), rollouts)
        return means.result()

    def make_batch(self, flow: Flow, pairs: Sequence[Pair]) -> tuple[Rollouts, TrainBatch]:
        """Return the two conversations of each pair and their batch, as `shard_pairs` does, with the reference's
        log-probs if the loss has a reference."""
        rollouts, batch = shard_pairs(flow, pairs)
        if not self.options.reference_free:
            batch = batch.with_(ref_logprobs=flow.reference.forward(batch).wait().logprobs)
        return rollouts, batch
