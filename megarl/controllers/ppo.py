"""Proximal policy optimisation with a critic (arXiv:1707.06347), token by token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from megarl.algorithms.advantages import gae, whiten
from megarl.algorithms.kl import AdaptiveKL, kl_estimate
from megarl.algorithms.rewards import token_rewards
from megarl.algorithms.totals import token_mean
from megarl.algorithms.value_loss import explained_variance, value_loss
from megarl.config import Config
from megarl.controllers.base import MeanOf, StepResult, mini_batches
from megarl.controllers.policy import (
    PolicyController,
    drawn_by,
    masked,
    policy_loss,
    policy_reads,
    sampling_metrics,
    trained,
    unreplayed_metrics,
)
from megarl.types import ModelOutput, Prompt, TokenLoss, TrainBatch, reads

if TYPE_CHECKING:
    from megarl.flow import HybridFlow


class PPOController(PolicyController):
    trains = ("actor", "critic")

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.kl = AdaptiveKL(config.kl.coef, config.kl.target, config.kl.horizon)
        self.steps = 0

    @classmethod
    def roles(cls, config: Config) -> tuple[str, ...]:
        reference = ("reference",) if config.kl.place != "none" else ()
        return ("rollout", "actor", *reference, "critic", "reward")

    def updates(self, role: str) -> int:
        """The policy has none while the critic warms up."""
        run, warmup = self.config.run, self.config.critic.warmup_steps
        return (run.num_rollout - warmup if role == "actor" else run.num_rollout) * run.num_update

    def step(self, flow: HybridFlow, items: Sequence[Prompt]) -> StepResult:
        config = self.config

        # 1. Experience: rollouts by the engine, scored; then everything that the update needs to know about them.
        rollouts = flow.reward.score(flow.rollout.generate(items, config.rollout.samples_per_prompt))
        flow.rollout.sleep()
        taken = trained(rollouts, config)
        batch = TrainBatch.from_rollouts(taken)
        policy, critic = flow.actor.forward(batch), flow.critic.forward(batch)
        reference = flow.reference.forward(batch) if config.kl.place != "none" else ModelOutput()
        old = drawn_by(batch, policy)
        batch = batch.with_(old_logprobs=old, ref_logprobs=reference.logprobs, values=critic.values)
        assert policy.logprobs is not None and batch.values is not None
        values, mask = batch.values, batch.loss_mask
        metrics = sampling_metrics(batch, policy) | unreplayed_metrics(flow, batch, self.steps)

        # 2. Advantages: outcome on the last action, the KL penalty on every one, then GAE over the actions.
        kl_mean = 0.0
        penalty = None
        if batch.ref_logprobs is not None:
            kl = kl_estimate(policy.logprobs, batch.ref_logprobs, config.kl.kind, mask)
            kl_mean = token_mean(kl, mask, batch.total)
            penalty = kl if config.kl.place == "reward" else None
        outcome, turns = batch.sequence_reward[batch.own], batch.turn_rewards
        rewards = token_rewards(outcome, batch.cu_seqlens, mask, penalty, self.kl.coef, turns)
        discount, lam = config.advantage.gamma, config.advantage.lam
        advantages, returns = gae(rewards, values, mask, batch.cu_seqlens, discount, lam)
        if config.advantage.whiten:
            advantages = whiten(advantages, mask, batch.total)
        batch = batch.with_(rewards=rewards, advantages=advantages, returns=returns)

        # 3. Updates: the critic towards the returns, the policy along the advantages.
        @reads(*policy_reads(config))
        def actor_loss(output: ModelOutput, part: TrainBatch) -> TokenLoss:
            return policy_loss(output, part, config, self.kl.coef)

        @reads("values", "returns")
        def critic_loss(output: ModelOutput, part: TrainBatch) -> TokenLoss:
            assert output.values is not None and part.values is not None and part.returns is not None
            return value_loss(output.values, part.values, part.returns, part.loss_mask, config.loss.value_clip)

        means = MeanOf()
        for mini in mini_batches(masked(batch, taken, config), config, seed=self.steps):
            means.add(flow.critic.update(mini, critic_loss))
            if self.steps >= config.critic.warmup_steps:
                means.add(flow.actor.update(mini, actor_loss))

        # 4. The engine gets the new weights.
        flow.rollout.update_weights(flow.actor)
        metrics |= means.result()
        metrics |= {"actor/kl_to_reference": kl_mean, "actor/kl_coef": self.kl.coef}
        metrics["critic/explained_variance"] = explained_variance(values, returns, mask, batch.total)
        self.kl = self.kl.updated(kl_mean, len(taken))
        self.steps += 1
        return StepResult(metrics, rollouts, batch, taken)

    def state_dict(self) -> dict[str, Any]:
        return {"kl": self.kl.state_dict(), "steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.kl = self.kl.restored(state["kl"])
        self.steps = state["steps"]
