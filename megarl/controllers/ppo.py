"""Proximal policy optimisation with a critic (arXiv:1707.06347), token by token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

import torch

from megarl.algorithms.advantages import decoupled_gae, gae, length_adaptive_lam, whiten
from megarl.algorithms.kl import AdaptiveKL, kl_estimate
from megarl.algorithms.losses import explained_variance, positive_nll, value_loss
from megarl.algorithms.token_rewards import token_rewards
from megarl.algorithms.token_stats import token_mean
from megarl.config import Config, Range, Weight
from megarl.config.strict import Share
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

if TYPE_CHECKING:
    from megarl.flow import HybridFlow


@dataclass(frozen=True)
class PPOOptions:
    critic_lam: Share | None = None
    """GAE's lambda of the critic's returns where it is another than `advantage.lam`, the policy's (VC-PPO,
    arXiv:2503.01491): 1 lets a reward at the end of a long answer reach its beginning."""
    length_adaptive: Annotated[float, Range(0, 100)] = 0.0
    """Alpha of a lambda of the policy that follows an answer's l tokens, 1 - 1 / (alpha l), in place of `advantage.lam`
    (VAPO, arXiv:2504.05118, section 4.2; 0.05 there). 0 is off."""
    positive_nll: Weight = 0.0
    """Weight of the negative log-probability of answers whose reward is above 0, which is added to the policy's loss
    (VAPO, section 4.3; 0.1 there)."""


class PPOController(PolicyController):
    trained_roles = ("actor", "critic")
    Options = PPOOptions

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        kl = config.kl
        self.kl = AdaptiveKL(kl.coef, kl.target, kl.horizon, max_coef=kl.most, max_kl=config.guards.kl)
        self.steps = 0

    @classmethod
    def roles(cls, config: Config) -> tuple[str, ...]:
        reference = ("reference",) if config.kl.place != "none" else ()
        return ("rollout", "actor", *reference, "critic", "reward")

    def num_updates(self, role: str) -> int:
        """The policy has none while the critic warms up."""
        run, warmup = self.config.run, self.config.critic.warmup_steps
        return (run.num_rollout - warmup if role == "actor" else run.num_rollout) * run.num_update

    def step(self, flow: HybridFlow, items: Sequence[Prompt]) -> StepResult:
        config = self.config

        # 1. Experience: rollouts by the engine, scored; then everything that the update needs to know about them.
        rollouts = flow.reward.score(flow.rollout.generate(items, config.rollout.samples_per_prompt))
        flow.rollout.sleep()
        taken, chosen = self.select_rollouts(select_trainable(rollouts, config))
        batch = TrainBatch.from_rollouts(taken)
        policy, critic = compute_old_logprobs(flow, batch), flow.critic.forward(batch)
        reference = flow.reference.forward(batch) if config.kl.place != "none" else ModelOutput()
        batch = batch.with_(ref_logprobs=reference.logprobs, values=critic.values)
        batch, (policy,), odd = mask_nonfinite(flow, taken, batch, policy)
        batch, metrics = apply_correction(flow, batch, policy, self.steps)
        assert policy.logprobs is not None and batch.values is not None
        values, mask = batch.values, batch.loss_mask
        metrics |= chosen | odd

        # 2. Advantages: outcome on an episode's last action, the KL penalty on every one, then GAE over its actions.
        kl_mean = penalty = None
        if batch.ref_logprobs is not None:
            kl = kl_estimate(policy.logprobs, batch.ref_logprobs, config.kl.resolved_estimator, mask)
            kl_mean = token_mean(kl, mask, batch.all_reduce)
            penalty = kl if config.kl.place == "reward" else None
        outcome, cu = batch.local_episodes.take_last(batch.sequence_reward[batch.local_indices]), batch.cu_episodes
        rewards = token_rewards(outcome, cu, mask, penalty, self.kl.coef, batch.turn_rewards)
        discount, lam = config.advantage.gamma, self.compute_lambda(batch, taken)
        critic_lam = self.options.critic_lam
        if critic_lam is None and isinstance(lam, float):
            advantages, returns = gae(rewards, values, mask, cu, discount, lam)
        else:
            critic_lam = config.advantage.lam if critic_lam is None else critic_lam
            advantages, returns = decoupled_gae(rewards, values, mask, cu, discount, lam, critic_lam)
        if config.advantage.whiten:
            advantages = whiten(advantages, mask, batch.all_reduce)
        batch = batch.with_(rewards=rewards, advantages=advantages, returns=returns)
        batch, _, odd = mask_nonfinite(flow, taken, batch)
        metrics = add_metrics(metrics, odd)

        # 3. Updates: the critic towards the returns, the policy along the advantages.
        @reads(*policy_loss_columns(config, batch))
        def actor_loss(output: ModelOutput, part: TrainBatch) -> TokenLoss:
            found = policy_loss(output, part, config, self.kl.coef)
            return add_positive_nll(found, output, part, self.options.positive_nll)

        @reads("values", "returns")
        def critic_loss(output: ModelOutput, part: TrainBatch) -> TokenLoss:
            assert output.values is not None and part.values is not None and part.returns is not None
            return value_loss(output.values, part.values, part.returns, part.loss_mask, config.loss.value_clip)

        means = MetricMeans()
        for mini in split_mini_batches(apply_loss_masks(batch, taken, config), config, seed=self.steps):
            means.add(flow.critic.update(mini, critic_loss))
            if self.steps >= config.critic.warmup_steps:
                means.add(flow.actor.update(mini, actor_loss))

        # 4. The engine gets the new weights.
        flow.rollout.update_weights(flow.actor)
        metrics |= means.result()
        metrics["critic/explained_variance"] = explained_variance(values, returns, mask, batch.all_reduce)
        if kl_mean is not None:
            metrics |= {"actor/kl_to_reference": kl_mean, "actor/kl_coef": self.kl.coef}
            self.kl = self.kl.updated(kl_mean, len(batch.episodes))
        self.steps += 1
        return StepResult(metrics, rollouts, batch, taken)

    def compute_lambda(self, batch: TrainBatch, taken: Rollouts) -> float | torch.Tensor:
        """GAE's lambda of the policy: one for all, or of each episode that is here."""
        if alpha := self.options.length_adaptive:
            return length_adaptive_lam(batch.local_episodes.sum_branches(taken.actions[batch.local_indices]), alpha)
        return self.config.advantage.lam

    def select_rollouts(self, rollouts: Rollouts) -> tuple[Rollouts, dict[str, float]]:
        """What the step's batch is made of, out of what can be trained on, and figures about that."""
        return rollouts, {}

    def state_dict(self) -> dict[str, Any]:
        return {"kl": self.kl.state_dict(), "steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.kl = self.kl.restored(state["kl"])
        self.steps = state["steps"]


def add_positive_nll(loss: TokenLoss, output: ModelOutput, part: TrainBatch, weight: float) -> TokenLoss:
    if not weight:
        return loss
    assert output.logprobs is not None
    imitation = positive_nll(output.logprobs, part)
    return replace(loss, loss=loss.loss + weight * imitation.loss, metrics={**loss.metrics, **imitation.metrics})
