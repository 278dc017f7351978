"""Group relative policy optimisation (arXiv:2402.03300): the group's mean is the baseline, there is no critic.

The paper's loss is a mean over sequences of each one's mean over its tokens (eq. 3): that is `loss.mean: sequence`. The
default is a mean over all tokens of the update, as in DAPO (arXiv:2503.14476, section 3.3).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from megarl.algorithms.advantages import group_advantages, spread_to_tokens
from megarl.algorithms.kl import AdaptiveKL, kl_estimate
from megarl.algorithms.rewards import sequence_sums
from megarl.algorithms.totals import token_mean
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


class GRPOController(PolicyController):
    compares_samples = True

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.kl = AdaptiveKL(config.kl.coef, config.kl.target, config.kl.horizon, limit=config.guards.kl)
        self.steps = 0

    @classmethod
    def roles(cls, config: Config) -> tuple[str, ...]:
        reference = ("reference",) if config.kl.place != "none" else ()
        return ("rollout", "actor", *reference, "reward")

    def step(self, flow: HybridFlow, items: Sequence[Prompt]) -> StepResult:
        config = self.config

        # 1. Experience.
        rollouts = flow.reward.score(flow.rollout.generate(items, config.rollout.samples_per_prompt))
        flow.rollout.sleep()
        taken = trained(rollouts, config)
        batch = TrainBatch.from_rollouts(taken)
        policy = flow.actor.forward(batch)
        reference = flow.reference.forward(batch) if config.kl.place != "none" else ModelOutput()
        batch = batch.with_(old_logprobs=drawn_by(batch, policy), ref_logprobs=reference.logprobs)
        assert policy.logprobs is not None
        metrics = sampling_metrics(batch, policy) | unreplayed_metrics(flow, batch, self.steps)

        # 2. Advantages: each sample against the others of its prompt. A KL in the reward counts as the sequence's sum.
        kl_mean = 0.0
        score = batch.sequence_reward
        if batch.ref_logprobs is not None:
            kl = kl_estimate(policy.logprobs, batch.ref_logprobs, config.kl.kind, batch.loss_mask)
            kl_mean = token_mean(kl, batch.loss_mask, batch.total)
            if config.kl.place == "reward":
                score = score - self.kl.coef * batch.everywhere(sequence_sums(kl, batch.cu_seqlens))
        advantages = group_advantages(score, batch.group, config.advantage.group_std)
        batch = batch.with_(advantages=spread_to_tokens(advantages[batch.own], batch.cu_seqlens, batch.loss_mask))

        # 3. Updates.
        @reads(*policy_reads(config))
        def actor_loss(output: ModelOutput, part: TrainBatch) -> TokenLoss:
            return policy_loss(output, part, config, self.kl.coef)

        means = MeanOf()
        for mini in mini_batches(masked(batch, taken, config), config, seed=self.steps):
            means.add(flow.actor.update(mini, actor_loss))

        # 4. The engine gets the new weights.
        flow.rollout.update_weights(flow.actor)
        metrics |= means.result()
        metrics |= {"actor/kl_to_reference": kl_mean, "actor/kl_coef": self.kl.coef}
        self.kl = self.kl.updated(kl_mean, len(taken))
        self.steps += 1
        return StepResult(metrics, rollouts, batch, taken)

    def state_dict(self) -> dict[str, Any]:
        return {"kl": self.kl.state_dict(), "steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.kl = self.kl.restored(state["kl"])
        self.steps = state["steps"]
