"""Group relative policy optimisation (arXiv:2402.03300): the group's mean is the baseline, there is no critic.

The paper's loss is a mean over sequences of each one's mean over its tokens (eq. 3): that is `loss.mean: sequence`. The
default is a mean over all tokens of the update, as in DAPO (arXiv:2503.14476, section 3.3). The recipe has its KL in
the loss, as the paper; one in the reward is subtracted before rewards are compared, in groups whose rewards differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from megarl.algorithms.advantages import penalised_rewards, rewards_to_go, sequence_advantages, spread_to_tokens, whiten
from megarl.algorithms.token_rewards import sequence_sums, token_rewards
from megarl.config import Config
from megarl.controllers.choose_loss import needs_old_logprobs
from megarl.controllers.controller import StepResult
from megarl.controllers.policy_gradient import policy_loss, policy_loss_columns
from megarl.controllers.policy_update import Experience as Experience
from megarl.controllers.policy_update import PolicyUpdateController
from megarl.types import ModelOutput, Prompt, Rollouts, TokenLoss, TrainBatch, reads
from megarl.types.requirements import Requirements

if TYPE_CHECKING:
    from megarl.flow import HybridFlow


class GRPOController(PolicyUpdateController):
    is_group_relative = True

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

        # 1. Experience: rollouts by the engine, scored; what the policy and the reference say of them.
        experience = self.collect_experience(flow, items)
        batch, policy, metrics = self.run_models(flow, experience)

        # 2. Advantages of each action token.
        kl, kl_mean = self.token_kl(batch, policy)
        penalty = self.kl.coef * kl if kl is not None and config.kl.place == "reward" else None
        advantages = self.compute_advantages(batch, experience.trained_rollouts, penalty, experience.baseline)
        batch, metrics = self.mask_again(flow, experience, batch.with_(advantages=advantages), metrics)

        # 3. Updates. The engines get the new weights.
        @reads(*policy_loss_columns(config, batch))
        def actor_loss(output: ModelOutput, part: TrainBatch) -> TokenLoss:
            return policy_loss(output, part, config, self.kl.coef)

        metrics |= self.update_models(flow, experience, batch, {"actor": actor_loss}).sync()
        if kl_mean is None:  # the loss has the same estimate, of the policy before its only update
            kl_mean = metrics.get("actor/kl_loss")
        return self.finish_step(experience, batch, metrics, kl_mean)

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

    def needs_policy_logprobs(self) -> bool:
        """A single update computes them itself, so that only a KL in the reward, a loss that needs them, and a
        comparison with the engine's every `rollout.verify_every` steps ask for them before it."""
        config = self.config
        is_needed = config.kl.place == "reward" or needs_old_logprobs(config)
        return is_needed or self.steps % config.rollout.verify_every == 0
