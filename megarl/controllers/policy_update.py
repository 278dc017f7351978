"""Shared steps of PPO and GRPO: collect experience, run the models over it, update them, adapt the KL coefficient.

Subclasses add what their papers define: advantages and losses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from megarl.algorithms.kl import AdaptiveKL, kl_estimate
from megarl.algorithms.token_stats import token_mean
from megarl.config import Config
from megarl.controllers.controller import LossFn, MetricMeans, StepResult, split_mini_batches
from megarl.controllers.correction import apply_correction, compute_old_logprobs
from megarl.controllers.mask_nonfinite import add_metrics, mask_nonfinite
from megarl.controllers.policy_gradient import PolicyController, apply_loss_masks, select_trainable
from megarl.types import ModelOutput, Prompt, Rollouts, TrainBatch

if TYPE_CHECKING:
    from megarl.flow import HybridFlow


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
        self.kl = AdaptiveKL(kl.coef, kl.target, kl.horizon, max_coef=kl.most, max_kl=config.guards.kl)
        self.steps = 0

    def collect_experience(self, flow: HybridFlow, items: Sequence[Prompt]) -> Experience:
        """Sample the prompts and score the rollouts."""
        rollouts = flow.reward.score(flow.rollout.generate(items, self.config.rollout.samples_per_prompt))
        return Experience(rollouts, select_trainable(rollouts, self.config))

    def needs_policy_logprobs(self) -> bool:
        """Return whether the policy's log-probs must be computed before the step's updates."""
        return True

    def run_models(self, flow: HybridFlow, experience: Experience) -> tuple[TrainBatch, ModelOutput, dict[str, float]]:
        """Run the models over the rollouts and mask sequences with non-finite values. Returns the batch with
        `old_logprobs`, `ref_logprobs`, `values` and correction weights, as far as the algorithm uses them; the policy's
        output before the updates; and metrics."""
        flow.rollout.sleep()
        rollouts = experience.trained_rollouts
        batch = TrainBatch.from_rollouts(rollouts)
        roles = self.roles(self.config)
        # Start all passes before waiting for the first: roles on separate ranks run at the same time.
        policy_future = compute_old_logprobs(flow, batch, self.needs_policy_logprobs())
        critic = flow.critic.forward(batch) if "critic" in roles else None
        reference = flow.reference.forward(batch) if "reference" in roles else None
        if reference is not None:
            batch = batch.with_(ref_logprobs=reference.wait().logprobs)
        if critic is not None:
            batch = batch.with_(values=critic.wait().values)
        batch, (policy,), masked = mask_nonfinite(flow, rollouts, batch, policy_future.wait())
        batch, corrections = apply_correction(flow, batch, policy, self.steps)
        return batch, policy, experience.metrics | corrections | masked

    def token_kl(self, batch: TrainBatch, policy: ModelOutput) -> tuple[torch.Tensor | None, float | None]:
        """Return [T] estimates of the KL to the reference before the updates, and their mean; None where either model
        has not been run."""
        if policy.logprobs is None or batch.ref_logprobs is None:
            return None, None
        kl = kl_estimate(policy.logprobs, batch.ref_logprobs, self.config.kl.resolved_estimator, batch.loss_mask)
        return kl, token_mean(kl, batch.loss_mask, batch.all_reduce)

    def mask_again(
        self, flow: HybridFlow, experience: Experience, batch: TrainBatch, metrics: dict[str, float]
    ) -> tuple[TrainBatch, dict[str, float]]:
        """Mask sequences whose advantages are not finite, and count them in `metrics`."""
        batch, _, masked = mask_nonfinite(flow, experience.trained_rollouts, batch)
        return batch, add_metrics(metrics, masked)

    def update_models(
        self, flow: HybridFlow, experience: Experience, batch: TrainBatch, losses: Mapping[str, LossFn]
    ) -> MetricMeans:
        """Update each role by its loss, mini-batch by mini-batch; then give the engines the policy's weights."""
        means = MetricMeans()
        trained = apply_loss_masks(batch, experience.trained_rollouts, self.config)
        for mini in split_mini_batches(trained, self.config, seed=self.steps):
            for role, loss in losses.items():
                means.add(getattr(flow, role).update(mini, loss))
        flow.rollout.update_weights(flow.actor)
        return means

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
        self.kl = self.kl.restored(state["kl"])
        self.steps = state["steps"]
