"""Proximal policy optimisation with a critic (arXiv:1707.06347), token by token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import torch

from megarl.algorithms.advantages import gae, length_adaptive_lam, token_rewards, whiten
from megarl.algorithms.losses import explained_variance, positive_nll, value_loss
from megarl.config import Config, Range, Weight
from megarl.config.strict import Share
from megarl.controllers.controller import Flow, StepResult
from megarl.controllers.mini_batches import MetricMeans
from megarl.controllers.policy_gradient import PolicyUpdateController, policy_loss, policy_loss_columns
from megarl.types import ModelOutput, Prompt, Rollouts, TokenLoss, TrainBatch, reads


@dataclass(frozen=True)
class PPOOptions:
    critic_lam: Share | None = None
    """GAE's lambda of the critic's returns, if it differs from the policy's `advantage.lam` (VC-PPO, arXiv:2503.01491):
    1 propagates a reward at the end of a long answer to its beginning."""
    length_adaptive_alpha: Annotated[float, Range(0, 100)] = 0.0
    """Alpha of a policy lambda that follows the length l of an answer, 1 - 1 / (alpha l), in place of `advantage.lam`
    (VAPO, arXiv:2504.05118, section 4.2; 0.05 there). 0 is off."""
    positive_nll_coef: Weight = 0.0
    """Weight of the negative log-probability of answers with a reward above 0, added to the policy's loss (VAPO,
    section 4.3; 0.1 there)."""


class PPOController(PolicyUpdateController):
    trained_roles = ("actor", "critic")
    Options = PPOOptions

    @classmethod
    def roles(cls, config: Config) -> tuple[str, ...]:
        reference = ("reference",) if config.kl.apply_to != "none" else ()
        return ("rollout", "actor", *reference, "critic", "reward")

    def num_updates(self, role: str) -> int:
        """Return the role's updates in the run; the policy is not updated while the critic warms up."""
        run, warmup = self.config.run, self.config.critic.warmup_steps
        return (run.num_rollout - warmup if role == "actor" else run.num_rollout) * run.num_update

    def step(self, flow: Flow, items: Sequence[Prompt]) -> StepResult:
        config = self.config

        # 1. Experience: scored rollouts; log-probs of policy and reference, values of the critic.
        experience = self.collect_experience(flow, items)
        batch, policy, metrics = self.run_models(flow, experience)
        values, mask, cu = batch.values, batch.loss_mask, batch.cu_episodes
        assert policy.logprobs is not None and values is not None

        # 2. Advantages: the outcome on an episode's last action, the KL penalty on every action, then GAE.
        kl, kl_mean = self.token_kl(batch, policy)
        outcome = batch.local_episodes.take_last(batch.sequence_reward[batch.local_indices])
        penalty = kl if config.kl.apply_to == "reward" else None
        rewards = token_rewards(outcome, cu, mask, penalty, self.kl.coef, batch.turn_rewards)
        advantages, returns = self.compute_advantages(batch, experience.trained_rollouts, rewards, values)
        if config.advantage.whiten:
            advantages = whiten(advantages, mask, batch.all_reduce)
        batch = batch.with_(rewards=rewards, advantages=advantages, returns=returns)
        batch, metrics = self.mask_again(flow, experience, batch, metrics)

        # 3. Updates: the critic towards the returns, the policy along the advantages; then the weight sync.
        @reads("values", "returns")
        def critic_loss(output: ModelOutput, part: TrainBatch) -> TokenLoss:
            assert output.values is not None and part.values is not None and part.returns is not None
            return value_loss(output.values, part.values, part.returns, part.loss_mask, config.loss.value_clip)

        @reads(*policy_loss_columns(config, batch))
        def actor_loss(output: ModelOutput, part: TrainBatch) -> TokenLoss:
            loss = policy_loss(output, part, config, self.kl.coef)
            if not (coef := self.options.positive_nll_coef):
                return loss
            assert output.logprobs is not None
            nll = positive_nll(output.logprobs, part)
            return replace(loss, loss=loss.loss + coef * nll.loss, metrics={**loss.metrics, **nll.metrics})

        means = MetricMeans()
        for mini in self.mini_batches(experience, batch):
            means.add(flow.critic.update(mini, critic_loss))
            if self.steps >= config.critic.warmup_steps:
                means.add(flow.actor.update(mini, actor_loss))
        flow.rollout.update_weights(flow.actor)
        metrics |= means.sync()
        metrics["critic/explained_variance"] = explained_variance(values, returns, mask, batch.all_reduce)
        return self.finish_step(experience, batch, metrics, kl_mean)

    def compute_advantages(
        self, batch: TrainBatch, rollouts: Rollouts, rewards: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return [T] advantages and returns by GAE; with `critic_lam`, the returns use a lambda of their own."""
        config, critic_lam = self.config.advantage, self.options.critic_lam
        lam: float | torch.Tensor = config.lam
        if alpha := self.options.length_adaptive_alpha:
            lam = length_adaptive_lam(batch.local_episodes.sum_branches(rollouts.actions[batch.local_indices]), alpha)
            critic_lam = config.lam if critic_lam is None else critic_lam
        return gae(rewards, values, batch.loss_mask, batch.cu_episodes, config.gamma, lam, critic_lam)
