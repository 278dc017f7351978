"""Group relative policy optimisation (arXiv:2402.03300): the group's mean is the baseline; there is no critic.

The paper's loss is a mean over sequences of each sequence's token mean (eq. 3): set `loss.agg_mode:
seq-mean-token-mean`. The default is a mean over all tokens of the update, as in DAPO (arXiv:2503.14476, section 3.3).
Like the paper, the recipe puts the KL into the loss. A KL in the reward is subtracted before rewards are compared, in
groups whose rewards differ.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from megarl.algorithms.advantages import (
    penalised_rewards,
    rewards_to_go,
    sequence_advantages,
    spread_to_tokens,
    token_rewards,
    whiten,
)
from megarl.algorithms.token_stats import sequence_sums
from megarl.config import Config, ConfigError
from megarl.controllers.controller import Flow, StepResult
from megarl.controllers.mini_batches import MetricMeans, needs_old_logprobs
from megarl.controllers.policy_gradient import Experience as Experience
from megarl.controllers.policy_gradient import PolicyUpdateController, policy_loss, policy_loss_columns
from megarl.types import ModelOutput, Prompt, Rollouts, TokenLoss, TrainBatch, reads
from megarl.types.requirements import Requirements


class GRPOController(PolicyUpdateController):
    is_group_relative = True

    @classmethod
    def roles(cls, config: Config) -> tuple[str, ...]:
        reference = ("reference",) if config.kl.apply_to != "none" else ()
        return ("rollout", "actor", *reference, "reward")

    @classmethod
    def read_options(cls, config: Config) -> Any:
        if config.advantage.estimator == "gdpo" and config.kl.apply_to == "reward":
            raise ConfigError(
                "kl.apply_to=reward with advantage.estimator=gdpo, which divides each part of the reward by its own "
                "deviation: a KL would lose kl.coef; set kl.apply_to to loss or none"
            )
        return super().read_options(config)

    @classmethod
    def declare_requirements(cls, config: Config) -> Requirements:
        """Return the requirements. REINFORCE++ compares each sample with the whole batch, so it is not
        group-relative."""
        requirements = super().declare_requirements(config)
        return replace(
            requirements,
            is_group_relative=requirements.is_group_relative and config.advantage.estimator != "reinforce_pp",
        )

    def step(self, flow: Flow, items: Sequence[Prompt]) -> StepResult:
        config = self.config

        # 1. Experience: scored rollouts; log-probs of policy and reference.
        experience = self.collect_experience(flow, items)
        batch, policy, metrics = self.run_models(flow, experience)

        # 2. Advantages of each action token.
        kl, kl_mean = self.token_kl(batch, policy)
        penalty = self.kl.coef * kl if kl is not None and config.kl.apply_to == "reward" else None
        rollouts = experience.trained_rollouts
        parts = weight_parts(rollouts, flow.reward.weights) if config.advantage.estimator == "gdpo" else ()
        advantages = self.compute_advantages(batch, rollouts, penalty, experience.baseline, parts)
        batch, metrics = self.mask_again(flow, experience, batch.with_(advantages=advantages), metrics)

        # 3. Updates, then the weight sync.
        @reads(*policy_loss_columns(config, batch))
        def actor_loss(output: ModelOutput, part: TrainBatch) -> TokenLoss:
            return policy_loss(output, part, config, self.kl.coef)

        means = MetricMeans()
        for mini in self.mini_batches(experience, batch):
            means.add(flow.actor.update(mini, actor_loss))
        flow.rollout.update_weights(flow.actor)
        metrics |= means.sync()
        if kl_mean is None:  # the loss reports the same estimate, for the policy before its only update
            kl_mean = metrics.get("actor/kl_loss")
        return self.finish_step(experience, batch, metrics, kl_mean)

    def compute_advantages(
        self,
        batch: TrainBatch,
        rollouts: Rollouts,
        penalty: torch.Tensor | None,
        baseline: torch.Tensor | None,
        parts: Sequence[tuple[float, torch.Tensor]] = (),
    ) -> torch.Tensor:
        """Return [T] advantages. penalty: [T] KL penalty to take off the reward; baseline: [N], see `Experience`;
        parts: of the reward, for GDPO, see `weight_parts`."""
        config, episodes, cu, mask = self.config.advantage, batch.episodes, batch.cu_episodes, batch.loss_mask
        reward = episodes.take_last(batch.sequence_reward)
        if baseline is None and config.estimator != "reinforce_pp":
            # One value per episode: its reward relative to its group's. A KL in the reward counts as its sum.
            group, actions = episodes.take_last(batch.group), episodes.sum_branches(rollouts.actions)
            if penalty is not None:
                sums = episodes.sum_branches(batch.all_gather(sequence_sums(penalty, batch.cu_seqlens)))
                reward = penalised_rewards(reward, sums, group)
            episode_parts = [(weight, episodes.take_last(values)) for weight, values in parts]
            per_episode = sequence_advantages(
                config.estimator, reward, group, actions, config.norm_by_std, parts=episode_parts
            )
            return spread_to_tokens(episodes.expand(per_episode)[batch.local_indices], batch.cu_seqlens, mask)
        # One value per token: the outcome, minus the KL from this token on.
        outcome = batch.local_episodes.take_last(batch.sequence_reward[batch.local_indices])
        rewards = token_rewards(outcome, cu, mask, penalty, 1.0)
        if baseline is None:
            return whiten(rewards_to_go(rewards, mask, cu, config.gamma), mask, batch.all_reduce)
        local_baseline = baseline[batch.local_indices].to(rewards.dtype)
        return rewards_to_go(rewards, mask, cu) - spread_to_tokens(local_baseline, batch.cu_seqlens, mask)

    def needs_policy_logprobs(self) -> bool:
        """Return whether to compute the policy's log-probs before the updates. A single update computes them itself, so
        only a KL in the reward, a loss that needs them, or the comparison with the engine every
        `rollout.verify_weights_every` steps asks for them."""
        config = self.config
        is_needed = config.kl.apply_to == "reward" or needs_old_logprobs(config)
        return is_needed or self.steps % config.rollout.verify_weights_every == 0


def weight_parts(rollouts: Rollouts, weights: Mapping[str, float]) -> list[tuple[float, torch.Tensor]]:
    """Return the weight and the [N] values of each part of the reward. A sub-part, `part/name`, is only recorded, and
    not a term of the reward. weights: by part; 1 where it is missing."""
    parts = rollouts.reward_parts or {"reward": rollouts.reward}  # a reward of a fork may have no parts
    terms = [name for name in parts if "/" not in name or name.partition("/")[0] not in parts]
    return [(weights.get(name, 1.0), parts[name]) for name in terms]
