"""On-policy distillation: the policy samples, and a teacher scores each of its tokens.

This minimises the reverse KL, from the policy to the teacher, in the states that the policy itself visits; a student
trained on its teacher's texts never sees these (arXiv:2306.13649). It is a policy gradient whose per-token cost is the
KL estimate k1, without discounting, so that each token answers for itself alone (Thinking Machines Lab, "On-Policy
Distillation", 2025):

    A_t = log pi_teacher(a_t | s_t) - log pi(a_t | s_t)

Its expected gradient in a state is that of -KL(pi(. | s_t) || pi_teacher(. | s_t)). As in PPO, the ratio of the loss is
to the behavior policy, and clipped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from megarl.algorithms.advantages import group_advantages, spread_to_tokens
from megarl.algorithms.token_stats import token_mean
from megarl.config import Config, ConfigError, Weight
from megarl.config.strict import PositiveFloat
from megarl.controllers.controller import Flow, StepResult
from megarl.controllers.mini_batches import MetricMeans
from megarl.controllers.policy_gradient import PolicyUpdateController, policy_loss, policy_loss_columns
from megarl.types import ModelOutput, Prompt, TokenLoss, TrainBatch, reads
from megarl.types.requirements import Requirements


@dataclass(frozen=True)
class DistillOptions:
    reward_coef: Weight = 0.0
    """Weight of the reward's advantage, group-relative as in GRPO, added to the teacher's advantage on all tokens of a
    sample; 0 learns from the teacher alone."""
    center_advantages: bool = False
    """Subtract the mean of the teacher's advantages over all tokens of the batch. This mean is minus the KL, so without
    centering all sampled tokens are discouraged, those that the teacher agrees with only somewhat less: right in
    expectation, but noisier."""
    advantage_clip: PositiveFloat | None = None
    """Clip the teacher's advantage of a token to [-advantage_clip, advantage_clip], in nats; null disables
    clipping."""
    synonyms = {"centre": "center_advantages", "bound": "advantage_clip"}


class DistillController(PolicyUpdateController):
    """Distills from the role `teacher`, which needs the policy's tokenizer: `roles: {teacher: {model: FOLDER}}`."""

    Options = DistillOptions

    @classmethod
    def read_options(cls, config: Config) -> Any:
        if config.kl.apply_to != "none":
            raise ConfigError(
                f"kl.apply_to={config.kl.apply_to} with algorithm={config.algorithm}: distillation penalizes the "
                "KL to the teacher; set it to none"
            )
        return super().read_options(config)

    @classmethod
    def roles(cls, config: Config) -> tuple[str, ...]:
        settings = config.reward
        has_reward = (
            settings.functions or settings.model or "reward" in config.roles or cls.read_options(config).reward_coef
        )
        return ("rollout", "actor", "teacher", *(("reward",) if has_reward else ()))

    @classmethod
    def declare_requirements(cls, config: Config) -> Requirements:
        return replace(super().declare_requirements(config), is_group_relative=cls.read_options(config).reward_coef > 0)

    def load_eval_items(self, flow: Flow) -> Sequence[Prompt]:
        """Return the held-out prompts; empty without a reward to rate answers."""
        return super().load_eval_items(flow) if "reward" in self.roles(self.config) else ()

    def step(self, flow: Flow, items: Sequence[Prompt]) -> StepResult:
        config = self.config

        # 1. Experience: rollouts, and log-probs of policy and teacher.
        experience = self.collect_experience(flow, items)
        batch, policy, metrics = self.run_models(flow, experience)
        assert policy.logprobs is not None and batch.ref_logprobs is not None

        # 2. Advantages: the teacher's preference for each token, plus the reward's where it has a weight.
        advantages = torch.where(batch.loss_mask, batch.ref_logprobs - policy.logprobs, 0.0)
        metrics["distill/reverse_kl"] = -token_mean(advantages, batch.loss_mask, batch.all_reduce)
        if (clip := self.options.advantage_clip) is not None:
            advantages = advantages.clamp(-clip, clip)
        if self.options.center_advantages:
            mean = token_mean(advantages, batch.loss_mask, batch.all_reduce)
            advantages = torch.where(batch.loss_mask, advantages - mean, 0.0)
        if weight := self.options.reward_coef:
            episodes = batch.episodes
            reward, group = episodes.take_last(batch.sequence_reward), episodes.take_last(batch.group)
            per_episode = episodes.expand(group_advantages(reward, group, config.advantage.norm_by_std))
            advantages = advantages + weight * spread_to_tokens(
                per_episode[batch.local_indices], batch.cu_seqlens, batch.loss_mask
            )
        batch, metrics = self.mask_again(flow, experience, batch.with_(advantages=advantages), metrics)

        # 3. Updates, then the weight sync.
        @reads(*policy_loss_columns(config))
        def actor_loss(output: ModelOutput, part: TrainBatch) -> TokenLoss:
            return policy_loss(output, part, config, 0.0)

        means = MetricMeans()
        for mini in self.mini_batches(experience, batch):
            means.add(flow.actor.update(mini, actor_loss))
        flow.rollout.update_weights(flow.actor)
        return self.finish_step(experience, batch, metrics | means.sync(), kl_mean=None)
