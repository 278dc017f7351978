"""Group relative policy optimisation (arXiv:2402.03300): the group's mean is the baseline, there is no critic.

The paper's loss is a mean over sequences of each one's mean over its tokens (eq. 3): that is `loss.mean: sequence`. The
default is a mean over all tokens of the update, as in DAPO (arXiv:2503.14476, section 3.3). The recipe has its KL in
the loss, as the paper; one in the reward is subtracted before rewards are compared, in groups whose rewards differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from megarl.algorithms.advantages import penalised_rewards, rewards_to_go, sequence_advantages, spread_to_tokens, whiten
from megarl.algorithms.kl import AdaptiveKL, kl_estimate
from megarl.algorithms.token_rewards import sequence_sums, token_rewards
from megarl.algorithms.token_stats import token_mean
from megarl.config import Config
from megarl.controllers.choose_loss import needs_old_logprobs
from megarl.controllers.controller import MetricMeans, StepResult, split_mini_batches
from megarl.controllers.correction import apply_correction, compute_old_logprobs
from megarl.controllers.mask_nonfinite import add_metrics, mask_nonfinite
from megarl.controllers.policy_gradient import (
    PolicyController,
    apply_loss_masks,
    policy_loss,
    policy_loss_columns,
    select_trainable,
)
from megarl.types import ModelOutput, Prompt, Rollouts, TokenLoss, TrainBatch, reads
from megarl.types.requirements import Requirements

if TYPE_CHECKING:
    from megarl.flow import HybridFlow


@dataclass(frozen=True)
class Experience:
    """What a step has sampled."""

    rollouts: Rollouts
    """All of it, which is recorded."""
    trained_rollouts: Rollouts
    """Those that the batch is made of."""
    baseline: torch.Tensor | None = None
    """[N] reward that each of these was to surpass; None where the algorithm finds it in their groups."""
    metrics: dict[str, float] = field(default_factory=dict)


class GRPOController(PolicyController):
    is_group_relative = True

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        kl = config.kl
        self.kl = AdaptiveKL(kl.coef, kl.target, kl.horizon, max_coef=kl.most, max_kl=config.guards.kl)
        self.steps = 0

    @classmethod
    def roles(cls, config: Config) -> tuple[str, ...]:
        reference = ("reference",) if config.kl.place != "none" else ()
        return ("rollout", "actor", *reference, "reward")

    @classmethod
    def declare_requirements(cls, config: Config) -> Requirements:
        """REINFORCE++ compares each sample with all others."""
        found = super().declare_requirements(config)
        return replace(found, is_group_relative=found.is_group_relative and config.advantage.kind != "reinforce")

    def step(self, flow: HybridFlow, items: Sequence[Prompt]) -> StepResult:
        config = self.config

        # 1. Experience.
        experience = self.collect_experience(flow, items)
        flow.rollout.sleep()
        taken = experience.trained_rollouts
        batch = TrainBatch.from_rollouts(taken)
        policy = compute_old_logprobs(flow, batch, self.should_compute_logprobs())
        reference = flow.reference.forward(batch) if config.kl.place != "none" else ModelOutput()
        batch = batch.with_(ref_logprobs=reference.logprobs)
        batch, (policy,), odd = mask_nonfinite(flow, taken, batch, policy)
        batch, found = apply_correction(flow, batch, policy, self.steps)
        metrics = experience.metrics | found | odd

        # 2. Advantages of each action token.
        kl_mean = penalty = None
        if policy.logprobs is not None and batch.ref_logprobs is not None:
            kl = kl_estimate(policy.logprobs, batch.ref_logprobs, config.kl.resolved_estimator, batch.loss_mask)
            kl_mean = token_mean(kl, batch.loss_mask, batch.all_reduce)
            penalty = self.kl.coef * kl if config.kl.place == "reward" else None
        batch = batch.with_(advantages=self.compute_advantages(batch, taken, penalty, experience.baseline))
        batch, _, odd = mask_nonfinite(flow, taken, batch)
        metrics = add_metrics(metrics, odd)

        # 3. Updates.
        @reads(*policy_loss_columns(config, batch))
        def actor_loss(output: ModelOutput, part: TrainBatch) -> TokenLoss:
            return policy_loss(output, part, config, self.kl.coef)

        means = MetricMeans()
        for mini in split_mini_batches(apply_loss_masks(batch, taken, config), config, seed=self.steps):
            means.add(flow.actor.update(mini, actor_loss))

        # 4. The engine gets the new weights.
        flow.rollout.update_weights(flow.actor)
        metrics |= means.result()
        if kl_mean is None:  # by the same estimate, of the policy before its only update
            kl_mean = metrics.get("actor/kl_loss")
        if kl_mean is not None:
            metrics |= {"actor/kl_to_reference": kl_mean, "actor/kl_coef": self.kl.coef}
            self.kl = self.kl.updated(kl_mean, len(batch.episodes))
        self.steps += 1
        return StepResult(metrics, experience.rollouts, batch, taken)

    def compute_advantages(
        self, batch: TrainBatch, taken: Rollouts, penalty: torch.Tensor | None, baseline: torch.Tensor | None
    ) -> torch.Tensor:
        """[T] advantages. penalty: [T] what the KL takes off the reward; baseline: [N] of `Experience`."""
        config, episodes, cu, mask = self.config.advantage, batch.episodes, batch.cu_episodes, batch.loss_mask
        reward = episodes.take_last(batch.sequence_reward)
        if baseline is None and config.kind != "reinforce":
            # One number per episode: its reward against those of its group. A KL in the reward counts as its sum.
            group, actions = episodes.take_last(batch.group), episodes.sum_branches(taken.actions)
            if penalty is not None:
                sums = episodes.sum_branches(batch.all_gather(sequence_sums(penalty, batch.cu_seqlens)))
                reward = penalised_rewards(reward, sums, group)
            found = sequence_advantages(config.kind, reward, group, actions, config.group_std)
            return spread_to_tokens(episodes.expand(found)[batch.local_indices], batch.cu_seqlens, mask)
        # One number per token: the outcome, minus the KL from this token on.
        outcome = batch.local_episodes.take_last(batch.sequence_reward[batch.local_indices])
        rewards = token_rewards(outcome, cu, mask, penalty, 1.0)
        if baseline is None:
            return whiten(rewards_to_go(rewards, mask, cu, config.gamma), mask, batch.all_reduce)
        own = baseline[batch.local_indices].to(rewards.dtype)
        return rewards_to_go(rewards, mask, cu) - spread_to_tokens(own, batch.cu_seqlens, mask)

    def should_compute_logprobs(self) -> bool:
        """Whether the policy's log-probs are computed before the update. Of a single update they are those that it
        computes itself, and only a look at the engine's log-probs, now and then, wants more than their mean."""
        config = self.config
        asked = config.kl.place == "reward" or needs_old_logprobs(config)
        return asked or self.steps % config.rollout.verify_every == 0

    def collect_experience(self, flow: HybridFlow, items: Sequence[Prompt]) -> Experience:
        """Samples of the prompts, with their rewards."""
        rollouts = flow.reward.score(flow.rollout.generate(items, self.config.rollout.samples_per_prompt))
        return Experience(rollouts, select_trainable(rollouts, self.config))

    def state_dict(self) -> dict[str, Any]:
        return {"kl": self.kl.state_dict(), "steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.kl = self.kl.restored(state["kl"])
        self.steps = state["steps"]
