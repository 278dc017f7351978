"""What the policy-gradient controllers share: prompts, evaluation, loss, and the figures of a sampled batch."""

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
"""Status of a rollout that a length or the number of turns ended."""


class PolicyController(Controller):
    """One whose items are prompts, and whose policy is evaluated by what it answers to held-out ones. Its loss
    is `policy_loss`, of the ratio to the policy that sampled."""

    item = "prompts"
    is_off_policy = True

    def load_items(self, flow: HybridFlow) -> Sequence[Prompt]:
        """The training prompts, rendered; those that leave no room for an answer are dropped and counted."""
        return flow.load_prompts(self.config.data.train)

    def load_eval_items(self, flow: HybridFlow) -> Sequence[Prompt]:
        return () if self.config.rollout.replay else flow.load_prompts(self.config.data.eval)

    def evaluate(self, flow: HybridFlow, items: Sequence[Prompt]) -> dict[str, float]:
        """Reward on the held-out prompts: of one greedy answer each, and of `run.eval_samples` that are sampled as in
        training, or as `rollout.eval_temperature` and `rollout.eval_top_p` say; of each source, too.
        `eval/weight_version`: of the weights that answered, where it is known."""
        generate = flow.rollout.generate
        ways = sampling_modes(self.config)
        return compute_eval_metrics(
            flow, ((way, generate(items, way.samples, way.greedy, held_out=True)) for way in ways)
        )

    def begin_evaluation(self, flow: HybridFlow, items: Sequence[Prompt]) -> Evaluation | None:
        ways = sampling_modes(self.config)
        return AsyncEvaluation(
            flow, [(way, flow.rollout.start_generation(items, way.samples, way.greedy, held_out=True)) for way in ways]
        )


def select_trainable(rollouts: Rollouts, config: Config) -> Rollouts:
    """Those that losses and statistics of groups are about: no aborted one, none whose reward failed, and none that was
    cut off where `loss.truncated` says `drop`."""
    gone = rollouts.has_status("aborted", *(TRUNCATED if config.loss.truncated == "drop" else ()))
    return rollouts.select(~gone & (rollouts.unscored == 0))


def apply_loss_masks(batch: TrainBatch, rollouts: Rollouts, config: Config) -> TrainBatch:
    """The batch of these rollouts as its losses see it: without the tokens of those that were cut off, where
    `loss.truncated` says `mask`, and of those that `correction.kind` rejects. What was computed of them before, such as
    the mean of their group, stays."""
    if config.loss.truncated == "mask":
        cut_off = rollouts.has_status(*TRUNCATED)
        batch = batch.with_(loss_mask=batch.loss_mask & ~cut_off[batch.sequence_ids])
    if config.correction.kind == "reject":
        assert batch.importance is not None
        batch = batch.with_(loss_mask=batch.loss_mask & (batch.importance > 0), importance=None)
    return batch


def policy_loss_columns(config: Config, batch: TrainBatch | None = None) -> tuple[str, ...]:
    """The columns that `policy_loss` reads. batch: what they are of, where it may lack `old_logprobs`."""
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
    """The loss that `loss.policy` names, weighted where a correction does, plus the KL to the reference where it
    belongs into the loss, minus the entropy bonus.

    The ratio is to `old_logprobs`. A batch that has none is that of a single update: the policy before it is the one of
    now, and the ratio 1, but of tokens that older weights chose, where it is to what the engine said then.
    """
    settings, (chosen, options) = config.loss, load_policy_loss(config)
    assert output.logprobs is not None and batch.advantages is not None
    old = batch.old_logprobs
    if old is None:
        assert config.run.num_update == 1, "of a second update the ratio is no longer 1: it needs old_logprobs"
        old = behavior_logprobs(batch, ModelOutput(logprobs=output.logprobs.detach()))
        assert old is not None
    marks = batch.marked if chosen.mark is not None else None
    sampled = PolicyLossInput(output.logprobs, old, batch.advantages, batch.loss_mask, batch.cu_seqlens, marks)
    surrogate = chosen.loss(sampled, Clip(settings.clip, settings.clip_high, settings.dual_clip), options)
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
        if (
            weights is not None and config.kl.resolved_estimator == "k3_unbiased"
        ):  # which is by the ratio to who drew the token
            kl = kl * weights
        loss = loss + kl_coef * kl
        metrics["actor/kl_loss"] = kl.detach()
    if output.entropy is not None:
        metrics["actor/entropy"] = output.entropy.detach()
        if settings.entropy_coef:
            loss = loss - settings.entropy_coef * output.entropy
    return TokenLoss(loss, metrics, surrogate.sequence_metrics)


def behavior_logprobs(batch: TrainBatch, policy: ModelOutput) -> torch.Tensor | None:
    """[T] log-probs by the policy that drew the tokens. That is the trainer's of now, in its own kernels; of tokens
    that older weights chose there is what the engine said then."""
    if batch.staleness is None or policy.logprobs is None:
        return policy.logprobs
    return torch.where(batch.staleness > 0, batch.rollout_logprobs, policy.logprobs)


def logprob_diff_metrics(batch: TrainBatch, policy: ModelOutput, suffix: str = "") -> dict[str, float]:
    """How far the engine's log-probs are from the trainer's on the same tokens: largest, 95th percentile, mean.

    Both sides hold the same weights when a batch is sampled, so anything beyond rounding is a fault of the push, of a
    layout, or of a kernel, and then all tokens show it. The largest alone can jump without one: where two experts of
    a token tie within rounding, the two sides may choose differently, and that token and a few after it differ. With
    `train.replay_routing` they cannot. suffix: of the names, where `policy` was not computed as in training.

    Of tokens that older weights chose the two sides differ by what the policy has learned since: these are apart,
    `..._stale`. So are tokens of the weights of now behind such a token, `..._carried`: what is before them the engine
    has kept, or read again.
    """
    if policy.logprobs is None:
        return {}
    masks = {"": batch.loss_mask}
    if batch.staleness is not None:
        fresh, stale = current_policy_mask(batch), batch.loss_mask & (batch.staleness > 0)
        masks = {"": fresh, "_carried": batch.loss_mask & ~fresh & ~stale, "_stale": stale}
    metrics = {}
    for kind, mask in masks.items():
        if (found := diff_stats(batch.rollout_logprobs, policy.logprobs, mask, batch.all_reduce)) is not None:
            metrics[f"rollout/logprob_diff{kind}{suffix}"] = found.largest
            metrics[f"rollout/logprob_diff_p95{kind}{suffix}"] = found.p95
            metrics[f"rollout/logprob_diff_mean{kind}{suffix}"] = found.mean
    return metrics


def add_trainer_logprobs(
    flow: HybridFlow, batch: TrainBatch, policy: ModelOutput, steps: int
) -> tuple[TrainBatch, dict[str, float]]:
    """The batch with what the trainer says of its tokens, which is recorded, and `logprob_diff_metrics` of it; also as they
    would be if the trainer chose its experts itself, which costs another forward pass: of the first step and each
    `rollout.verify_every`-th. `steps`: how many have been taken."""
    metrics = logprob_diff_metrics(batch, policy)
    said = batch.with_(trainer_logprobs=policy.logprobs)
    if batch.routing is None or steps % flow.config.rollout.verify_every:
        return said, metrics
    free = flow.actor.forward(batch.with_(routing=None)).wait()
    return said.with_(unreplayed_logprobs=free.logprobs), metrics | logprob_diff_metrics(batch, free, "_unreplayed")
