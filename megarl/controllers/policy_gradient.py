"""Shared parts of policy-gradient controllers: prompts, evaluation, experience, policy loss, updates.

PPO and GRPO add what their papers define: advantages and losses. Sequences with non-finite values are masked, counted
and logged: a single answer may overflow in a model that is correct on all others. If more than half of the sequences
do, the model is at fault and its worker ends the run (`workers/model_worker.py`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch

from megarl.algorithms.kl import AdaptiveKL, kl_estimate
from megarl.algorithms.policy_losses import Clip, PolicyLossInput
from megarl.algorithms.token_stats import sequence_sums, token_mean
from megarl.config import Config
from megarl.controllers.controller import Controller, Evaluation, Flow, StepResult
from megarl.controllers.evaluation import AsyncEvaluation, compute_eval_metrics, sampling_modes
from megarl.controllers.mini_batches import load_policy_loss, split_mini_batches
from megarl.controllers.rollout_correction import apply_correction, behavior_logprobs, compute_old_logprobs
from megarl.types import ModelOutput, Prompt, Rollouts, Status, TokenLoss, TrainBatch
from megarl.workers.futures import Future

TRUNCATED: tuple[Status, ...] = ("length", "max_turns")
"""Statuses of rollouts that a length limit or the turn limit ended."""


class PolicyController(Controller):
    """Base of controllers whose items are prompts and whose policy is evaluated on held-out prompts. The loss is
    `policy_loss`, with a ratio to the policy that sampled."""

    item = "prompts"
    is_off_policy = True

    def load_items(self, flow: Flow) -> Sequence[Prompt]:
        """Return the rendered training prompts; those that leave no room for a response are dropped and counted."""
        return flow.data.load_prompts(self.config.data.train)

    def load_eval_items(self, flow: Flow) -> Sequence[Prompt]:
        return () if self.config.rollout.replay else flow.data.load_prompts(self.config.data.eval)

    def evaluate(self, flow: Flow, items: Sequence[Prompt]) -> dict[str, float]:
        """Return the reward on held-out prompts, in total and by source: of one greedy answer each, and of
        `run.eval_samples` samples each, drawn as in training unless `rollout.eval_temperature` and `rollout.eval_top_p`
        are set.

        `eval/weight_version` is the version of the weights that answered, where it is known.
        """
        generate = flow.rollout.generate
        modes = sampling_modes(self.config)
        return compute_eval_metrics(
            flow, ((mode, generate(items, mode.samples, mode.greedy, held_out=True)) for mode in modes), flow.step
        )

    def begin_evaluation(self, flow: Flow, items: Sequence[Prompt]) -> Evaluation | None:
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
    if config.kl.apply_to == "loss":
        names.append("ref_logprobs")
    if load_policy_loss(config)[0].mark is not None:
        names.append("marked")
    if config.correction.has_weights:
        names.append("importance")
    return tuple(names)


def policy_loss(output: ModelOutput, batch: TrainBatch, config: Config, kl_coef: float) -> TokenLoss:
    """Return the loss that `loss.policy_loss` names, times the correction's weights, plus the KL to the reference where
    `kl.apply_to` is `loss`, minus the entropy bonus.

    The ratio is to `old_logprobs`. A batch without them is for a single update: the old policy is then the current one
    and the ratio is 1, except for tokens sampled by older weights, whose ratio is to the engine's log-probs of that
    time.
    """
    settings, (objective, options) = config.loss, load_policy_loss(config)
    assert output.logprobs is not None and batch.advantages is not None
    old = batch.old_logprobs
    if old is None:
        assert config.run.num_update == 1, "from the second update on the ratio is not 1: old_logprobs are needed"
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
    if config.kl.apply_to == "loss":
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


@dataclass(frozen=True)
class Experience:
    """Rollouts of a step, and the subset that is trained on."""

    rollouts: Rollouts
    """All rollouts of the step, for the record."""
    trained_rollouts: Rollouts
    """The rollouts in the batch, in its order."""
    baseline: torch.Tensor | None = None
    """[N] baseline to subtract from the reward of each trained rollout; None if the algorithm derives it from
    groups."""
    metrics: dict[str, float] = field(default_factory=dict)


class PolicyUpdateController(PolicyController):
    """Base of algorithms that sample, compute advantages, update the policy (and a critic), and sync its weights."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        kl = config.kl
        self.kl = AdaptiveKL(kl.coef, kl.target, kl.horizon, max_coef=kl.max_coef, max_kl=config.guards.kl)
        self.steps = 0

    def set_config(self, config: Config) -> None:
        """A new `kl.coef` replaces the adapted coefficient, also one that `guards.kl` has set to 0."""
        if config.kl.coef != self.config.kl.coef:
            self.kl = replace(self.kl, coef=config.kl.coef, initial=config.kl.coef)
        self.kl = replace(self.kl, target=config.kl.target)
        super().set_config(config)

    def collect_experience(self, flow: Flow, items: Sequence[Prompt]) -> Experience:
        """Sample the prompts, and score the rollouts if the algorithm has a reward."""
        rollouts = flow.rollout.generate(items, self.config.rollout.samples_per_prompt)
        if "reward" in self.roles(self.config):
            rollouts = flow.reward.score(rollouts)
        return Experience(rollouts, select_trainable(rollouts, self.config))

    def needs_policy_logprobs(self) -> bool:
        """Return whether the policy's log-probs must be computed before the step's updates."""
        return True

    def run_models(self, flow: Flow, experience: Experience) -> tuple[TrainBatch, ModelOutput, dict[str, float]]:
        """Run the models over the rollouts and mask sequences with non-finite values. Returns the batch with
        `old_logprobs`, `ref_logprobs` (of the reference or the teacher), `values` and correction weights, as far as the
        algorithm uses them; the policy's output before the updates; and metrics."""
        flow.rollout.sleep()
        rollouts = experience.trained_rollouts
        batch = TrainBatch.from_rollouts(rollouts)
        roles = self.roles(self.config)
        # Start all passes before waiting for the first: roles on separate ranks run at the same time.
        policy_future = compute_old_logprobs(flow, batch, self.needs_policy_logprobs())
        critic = flow.critic.forward(batch) if "critic" in roles else None
        reference = self.begin_reference(flow, experience, batch)
        if reference is not None:
            batch = batch.with_(ref_logprobs=reference.wait().logprobs)
        if critic is not None:
            batch = batch.with_(values=critic.wait().values)
        batch, (policy,), masked = mask_nonfinite(flow, rollouts, batch, policy_future.wait())
        batch, corrections = apply_correction(flow, batch, policy, self.steps)
        return batch, policy, experience.metrics | corrections | masked

    def begin_reference(self, flow: Flow, experience: Experience, batch: TrainBatch) -> Future[ModelOutput] | None:
        """Start the forward pass of the reference, or of the teacher, which gives `ref_logprobs`; None without one."""
        roles = self.roles(self.config)
        name = next((role for role in ("reference", "teacher") if role in roles), None)
        return getattr(flow, name).forward(batch) if name else None

    def token_kl(self, batch: TrainBatch, policy: ModelOutput) -> tuple[torch.Tensor | None, float | None]:
        """Return [T] estimates of the KL to the reference before the updates, and their mean; None where either model
        has not been run."""
        if policy.logprobs is None or batch.ref_logprobs is None:
            return None, None
        kl = kl_estimate(policy.logprobs, batch.ref_logprobs, self.config.kl.resolved_estimator, batch.loss_mask)
        return kl, token_mean(kl, batch.loss_mask, batch.all_reduce)

    def mask_again(
        self, flow: Flow, experience: Experience, batch: TrainBatch, metrics: dict[str, float]
    ) -> tuple[TrainBatch, dict[str, float]]:
        """Mask sequences whose advantages are not finite, and count them in `metrics`."""
        batch, _, masked = mask_nonfinite(flow, experience.trained_rollouts, batch)
        return batch, add_metrics(metrics, masked)

    def mini_batches(self, experience: Experience, batch: TrainBatch) -> Iterator[TrainBatch]:
        """Split the batch into the mini-batches of the updates, with masked tokens left out of the losses."""
        trained = apply_loss_masks(batch, experience.trained_rollouts, self.config)
        return split_mini_batches(trained, self.config, seed=self.steps)

    def finish_step(
        self, experience: Experience, batch: TrainBatch, metrics: dict[str, float], kl_mean: float | None
    ) -> StepResult:
        """Adapt the KL coefficient. Return the step's result."""
        if kl_mean is not None:
            metrics = metrics | {"actor/kl_to_reference": kl_mean, "actor/kl_coef": self.kl.coef}
            self.kl = self.kl.updated(kl_mean, len(batch.episodes))
        self.steps += 1
        return StepResult(metrics, experience.rollouts, batch, experience.trained_rollouts)

    def state_dict(self) -> dict[str, Any]:
        return {"kl": self.kl.state_dict(), "steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if "kl" in state:
            self.kl = self.kl.restored(state["kl"])
        self.steps = state["steps"]


METRIC = "rollout/masked_nonfinite"
"""Number of masked sequences of a step; absent if there are none."""


def mask_nonfinite(
    flow: Flow, rollouts: Rollouts, batch: TrainBatch, *outputs: ModelOutput
) -> tuple[TrainBatch, list[ModelOutput], dict[str, float]]:
    """Return the batch and model outputs with all episodes masked that have a non-finite value on an action token.
    Their `loss_mask` is False and all their values are 0, so they enter no mean. Values computed from their rewards
    before stay. Collective."""
    columns = {f"{name} of the batch": getattr(batch, name) for name in batch.columns()}
    for output in outputs:
        columns |= {item.name: value for item in fields(output) if (value := getattr(output, item.name)) is not None}
    # A finite sum proves quickly that all values are finite.
    nonfinite = {
        name: sequence_sums((batch.loss_mask & ~torch.isfinite(values)).int(), batch.cu_seqlens)
        for name, values in columns.items()
        if values.is_floating_point() and not bool(torch.isfinite(values.sum()))
    }
    episodes = batch.local_episodes
    num_nonfinite = sum(nonfinite.values(), torch.zeros(len(batch.local_indices), dtype=torch.int64))
    is_hit = episodes.expand(episodes.sum_branches(num_nonfinite)) > 0
    if not (count := int(batch.all_reduce(is_hit.sum()))):
        return batch, list(outputs), {}
    step_records = [
        {
            "prompt": rollout.prompt.id,
            "group": rollout.group,
            "seed": rollout.seed,
            "not_finite": {name: int(counts[number]) for name, counts in nonfinite.items() if counts[number]},
        }
        for number, rollout in enumerate(rollouts.local)
        if is_hit[number]
    ]
    flow.log.report_nonfinite(
        flow.step, [record for rank_records in batch.comm.all_gather_objects(step_records) for record in rank_records]
    )
    is_masked = torch.repeat_interleave(is_hit, batch.cu_seqlens.diff())
    floats = {name: x for name in batch.columns() if (x := getattr(batch, name)).is_floating_point()}

    def mask_columns(columns: Mapping[str, torch.Tensor | None]) -> dict[str, Any]:
        return {name: None if x is None else x.masked_fill(is_masked, 0.0) for name, x in columns.items()}

    return (
        batch.with_(loss_mask=batch.loss_mask & ~is_masked, **mask_columns(floats)),
        [ModelOutput(**mask_columns(vars(output))) for output in outputs],
        {METRIC: float(count)},
    )


def add_metrics(metrics: Mapping[str, float], counts: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics with the counts of another `mask_nonfinite` added."""
    return {**metrics, **{name: value + metrics.get(name, 0.0) for name, value in counts.items()}}
