"""Shared parts of policy-gradient controllers: prompts, evaluation, loss, and metrics of a sampled batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from megarl.algorithms.kl import kl_estimate
from megarl.algorithms.policy_losses import Clip, PolicyLossInput
from megarl.algorithms.token_stats import diff_stats
from megarl.config import Config
from megarl.controllers.choose_loss import load_policy_loss
from megarl.controllers.controller import Controller, Evaluation
from megarl.controllers.evaluate import AsyncEvaluation, compute_eval_metrics, sampling_modes
from megarl.controllers.logprob_check import current_policy_mask
from megarl.types import ModelOutput, Prompt, Rollouts, Status, TokenLoss, TrainBatch

if TYPE_CHECKING:
    from megarl.flow import HybridFlow

TRUNCATED: tuple[Status, ...] = ("length", "max_turns")
"""Statuses of rollouts that a length limit or the turn limit ended."""


class PolicyController(Controller):
    """Base of controllers whose items are prompts and whose policy is evaluated on held-out prompts. The loss is
    `policy_loss`, with a ratio to the policy that sampled."""

    item = "prompts"
    is_off_policy = True

    def load_items(self, flow: HybridFlow) -> Sequence[Prompt]:
        """Return the rendered training prompts; those that leave no room for a response are dropped and counted."""
        return flow.data.load_prompts(self.config.data.train)

    def load_eval_items(self, flow: HybridFlow) -> Sequence[Prompt]:
        return () if self.config.rollout.replay else flow.data.load_prompts(self.config.data.eval)

    def evaluate(self, flow: HybridFlow, items: Sequence[Prompt]) -> dict[str, float]:
        """Return the reward on held-out prompts, in total and by source: of one greedy answer each, and of
        `run.eval_samples` samples each, drawn as in training unless `rollout.eval_temperature` and `rollout.eval_top_p`
        are set.

        `eval/weight_version` is the version of the weights that answered, where it is known.
        """
        generate = flow.rollout.generate
        modes = sampling_modes(self.config)
        return compute_eval_metrics(
            flow, ((mode, generate(items, mode.samples, mode.greedy, held_out=True)) for mode in modes)
        )

    def begin_evaluation(self, flow: HybridFlow, items: Sequence[Prompt]) -> Evaluation | None:
        modes = sampling_modes(self.config)
        return AsyncEvaluation(
            flow,
            [(mode, flow.rollout.start_generation(items, mode.samples, mode.greedy, held_out=True)) for mode in modes],
        )


def select_trainable(rollouts: Rollouts, config: Config) -> Rollouts:
    """Return the rollouts that losses and group statistics use: no aborted ones, none whose reward failed, and no
    truncated ones where `loss.truncated` is `drop`."""
    is_dropped = rollouts.has_status("aborted", *(TRUNCATED if config.loss.truncated == "drop" else ()))
    return rollouts.select(~is_dropped & (rollouts.unscored == 0))


def apply_loss_masks(batch: TrainBatch, rollouts: Rollouts, config: Config) -> TrainBatch:
    """Mask tokens of the batch out of its losses: truncated rollouts where `loss.truncated` is `mask`, and tokens that
    `correction.kind: reject` rejects. Values computed from them before, such as their group's mean, stay."""
    if config.loss.truncated == "mask":
        is_truncated = rollouts.has_status(*TRUNCATED)
        batch = batch.with_(loss_mask=batch.loss_mask & ~is_truncated[batch.sequence_ids])
    if config.correction.kind == "reject":
        assert batch.importance is not None
        batch = batch.with_(loss_mask=batch.loss_mask & (batch.importance > 0), importance=None)
    return batch


def policy_loss_columns(config: Config, batch: TrainBatch | None = None) -> tuple[str, ...]:
    """Return the columns that `policy_loss` reads. batch: the batch to train on, if it may lack `old_logprobs`."""
    names = ["old_logprobs", "advantages"]
    if batch is not None and batch.old_logprobs is None:
        names += ["rollout_logprobs", "staleness"]
    if config.kl.place == "loss":
        names.append("ref_logprobs")
    if load_policy_loss(config)[0].mark is not None:
        names.append("marked")
    if config.correction.has_weights:
        names.append("importance")
    return tuple(names)


def policy_loss(output: ModelOutput, batch: TrainBatch, config: Config, kl_coef: float) -> TokenLoss:
    """Return the loss that `loss.policy` names, times the correction's weights, plus the KL to the reference where
    `kl.place` is `loss`, minus the entropy bonus.

    The ratio is to `old_logprobs`. A batch without them is for a single update: the old policy is then the current one
    and the ratio is 1, except for tokens sampled by older weights, whose ratio is to the engine's log-probs of that
    time.
    """
    settings, (objective, options) = config.loss, load_policy_loss(config)
    assert output.logprobs is not None and batch.advantages is not None
    old = batch.old_logprobs
    if old is None:
        assert config.run.num_update == 1, "of a second update the ratio is no longer 1: it needs old_logprobs"
        old = behavior_logprobs(batch, ModelOutput(logprobs=output.logprobs.detach()))
        assert old is not None
    marks = batch.marked if objective.mark is not None else None
    sampled = PolicyLossInput(output.logprobs, old, batch.advantages, batch.loss_mask, batch.cu_seqlens, marks)
    surrogate = objective.loss(sampled, Clip(settings.clip, settings.clip_high, settings.dual_clip), options)
    loss, metrics = surrogate.loss, dict(surrogate.metrics)
    weights = batch.importance if config.correction.has_weights else None
    if weights is not None:
        loss = loss * weights
    metrics["actor/pg_loss"] = loss.detach()
    if batch.old_logprobs is None and batch.staleness is None:
        metrics["rollout/logprob_diff_mean"] = (output.logprobs.detach() - batch.rollout_logprobs).abs()
    if config.kl.place == "loss":
        assert batch.ref_logprobs is not None
        kl = kl_estimate(output.logprobs, batch.ref_logprobs, config.kl.resolved_estimator, batch.loss_mask, old)
        # k3_unbiased weights by the ratio to the behavior policy, so it needs the correction, too.
        if weights is not None and config.kl.resolved_estimator == "k3_unbiased":
            kl = kl * weights
        loss = loss + kl_coef * kl
        metrics["actor/kl_loss"] = kl.detach()
    if output.entropy is not None:
        metrics["actor/entropy"] = output.entropy.detach()
        if settings.entropy_coef:
            loss = loss - settings.entropy_coef * output.entropy
    return TokenLoss(loss, metrics, surrogate.sequence_metrics)


def behavior_logprobs(batch: TrainBatch, policy: ModelOutput) -> torch.Tensor | None:
    """Return [T] log-probs by the policy that sampled the tokens: the trainer's current ones, in its own kernels, and
    the engine's recorded ones for tokens sampled by older weights."""
    if batch.staleness is None or policy.logprobs is None:
        return policy.logprobs
    return torch.where(batch.staleness > 0, batch.rollout_logprobs, policy.logprobs)


def logprob_diff_metrics(batch: TrainBatch, policy: ModelOutput, suffix: str = "") -> dict[str, float]:
    """Return the largest, 95th percentile and mean difference of engine and trainer log-probs on the same tokens.

    Both hold the same weights when a batch is sampled. A difference beyond rounding is therefore a fault of the weight
    sync, of a layout or of a kernel, and then shows on all tokens. The largest alone can jump without a fault: where
    two experts of a token tie within rounding, engine and trainer may choose differently, and that token and a few
    after it differ. `train.replay_routing` rules this out. suffix: appended to the names, if `policy` was not computed
    as in training.

    Tokens sampled by older weights also differ by what the policy has learned since; their metrics are `..._stale`.
    Tokens of the current weights behind such a token are reported as `..._carried`: the engine has kept the keys and
    values before them, or recomputed them.
    """
    if policy.logprobs is None:
        return {}
    masks = {"": batch.loss_mask}
    if batch.staleness is not None:
        fresh, stale = current_policy_mask(batch), batch.loss_mask & (batch.staleness > 0)
        masks = {"": fresh, "_carried": batch.loss_mask & ~fresh & ~stale, "_stale": stale}
    metrics = {}
    for kind, mask in masks.items():
        if (stats := diff_stats(batch.rollout_logprobs, policy.logprobs, mask, batch.all_reduce)) is not None:
            metrics[f"rollout/logprob_diff{kind}{suffix}"] = stats.largest
            metrics[f"rollout/logprob_diff_p95{kind}{suffix}"] = stats.p95
            metrics[f"rollout/logprob_diff_mean{kind}{suffix}"] = stats.mean
    return metrics


def add_trainer_logprobs(
    flow: HybridFlow, batch: TrainBatch, policy: ModelOutput, steps: int
) -> tuple[TrainBatch, dict[str, float]]:
    """Return the batch with the trainer's log-probs, for the record, and their `logprob_diff_metrics`.

    With replayed routing, the first step and every `rollout.verify_every`-th add log-probs and metrics with the experts
    that the trainer's own router chooses, which costs another forward pass. steps: steps taken so far.
    """
    metrics = logprob_diff_metrics(batch, policy)
    recorded = batch.with_(trainer_logprobs=policy.logprobs)
    if batch.routing is None or steps % flow.config.rollout.verify_every:
        return recorded, metrics
    unreplayed = flow.actor.forward(batch.with_(routing=None)).wait()
    return recorded.with_(unreplayed_logprobs=unreplayed.logprobs), metrics | logprob_diff_metrics(
        batch, unreplayed, "_unreplayed"
    )
