"""Nested controllers, and a controller that generates twice per step."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.algorithms.advantages import spread_to_tokens
from megarl.config import Config, from_dict
from megarl.controllers.controller import StepResult
from megarl.controllers.grpo import GRPOController
from megarl.controllers.mini_batches import MetricMeans, split_mini_batches
from megarl.controllers.policy_gradient import policy_loss
from megarl.controllers.ppo import PPOController
from megarl.controllers.sft import SFTController
from megarl.types import ModelOutput, Prompt, Rollout, Rollouts, TokenLoss, TrainBatch, Turn

sys.path.insert(0, str(Path(__file__).parent))

from test_learning import TableFlow  # noqa: E402

pytestmark = pytest.mark.alone

LESSON = Rollout(Prompt("lesson", ()), (Turn((9,)), Turn((1, 4), (0.0, 0.0), True)))


class PPOWithLessons(PPOController):
    """PPO with an SFT step on as many demonstrations after each step."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.sft = SFTController(config)

    def load_items(self, flow: Any) -> Sequence[Prompt]:
        self.lessons = self.sft.load_items(flow)
        return super().load_items(flow)

    def num_updates(self, role: str) -> int:
        return super().num_updates(role) + (self.sft.num_updates(role) if role == "actor" else 0)

    def step(self, flow: Any, items: Sequence[Prompt]) -> StepResult:
        result = super().step(flow, items)
        first = self.steps * len(items)
        lessons = [self.lessons[(first + i) % len(self.lessons)] for i in range(len(items))]
        result.metrics.update(self.sft.step(flow, lessons).metrics)
        flow.rollout.update_weights(flow.actor)
        return result


class ReMax(GRPOController):
    """Use the greedy response's reward as the baseline (arXiv:2310.10505)."""

    is_group_relative = False

    @classmethod
    def roles(cls, config: Config) -> tuple[str, ...]:
        return ("rollout", "actor", "reward")

    def step(self, flow: Any, items: Sequence[Prompt]) -> StepResult:
        greedy = flow.reward.score(flow.rollout.generate(items, 1, greedy=True))
        rollouts = flow.reward.score(flow.rollout.generate(items, 1))
        flow.rollout.sleep()
        batch = TrainBatch.from_rollouts(rollouts)
        batch = batch.with_(old_logprobs=flow.actor.forward(batch).wait().logprobs)
        advantages = batch.sequence_reward - greedy.reward.float()[batch.group]
        batch = batch.with_(
            advantages=spread_to_tokens(advantages[batch.local_indices], batch.cu_seqlens, batch.loss_mask)
        )

        def loss(output: ModelOutput, part: TrainBatch) -> TokenLoss:
            return policy_loss(output, part, self.config, 0.0)

        means = MetricMeans()
        for mini in split_mini_batches(batch, self.config, seed=self.steps):
            means.add(flow.actor.update(mini, loss))
        flow.rollout.update_weights(flow.actor)
        self.steps += 1
        return StepResult(means.sync() | {"rollout/greedy": float(greedy.reward.mean())}, rollouts, batch)


class GreedyFlow(TableFlow):
    """A flow with greedy responses and demonstrations."""

    def generate(self, items: Any, samples: int, greedy: bool = False, held_out: bool = False) -> Rollouts:
        if not greedy:
            return super().generate(items, samples)
        best = tuple(int(row.argmax()) for row in self.policy.table.detach())
        turns = (Turn((9,)), Turn(best, (0.0, 0.0), True, 0))
        return Rollouts.gather([Rollout(prompt, turns, group=group) for group, prompt in enumerate(items)])

    @property
    def data(self) -> Any:
        return self

    def load_conversations(self, path: str) -> list[Rollout]:
        return [LESSON] * 3

    def load_prompts(self, path: str) -> list[Prompt]:
        return PROMPTS

    def shard(self, items: Sequence[Rollout]) -> Rollouts:
        return Rollouts.gather(items)


PROMPTS = [Prompt(id=str(i), messages=()) for i in range(4)]


def nll(flow: GreedyFlow) -> float:
    logprobs = flow.policy.table.detach().log_softmax(-1)
    return -float(logprobs[0, 1] + logprobs[1, 4]) / 2


def test_ppo_with_an_sft_step_after_each_step() -> None:
    config = from_dict({"kl": {"apply_to": "none"}, "run": {"num_rollout": 3, "num_update": 1}})
    controller = PPOWithLessons(config)
    assert PPOWithLessons.declare_requirements(config).roles == ("rollout", "actor", "critic", "reward")
    assert (controller.num_updates("actor"), controller.num_updates("critic")) == (6, 3)
    ppo_flow, flow = GreedyFlow(config), GreedyFlow(config)
    prompts = controller.load_items(flow)  # type: ignore[arg-type]
    ppo = PPOController(config)
    for _ in range(3):
        result = controller.step(flow, prompts)
        ppo.step(ppo_flow, prompts)  # type: ignore[arg-type]
    assert result.metrics["actor/nll"] > 0 and "actor/pg_loss" in result.metrics
    assert nll(flow) < nll(ppo_flow) - 0.05  # the demonstrations also have the best reward
    assert flow.calls == ["generate", "score", "sleep", "update_weights", "update_weights"] * 3
    restored = PPOWithLessons(config)
    restored.load_state_dict(controller.state_dict())
    assert restored.steps == 3


def test_remax_learns_with_a_greedy_baseline() -> None:
    config = from_dict({"kl": {"apply_to": "none"}, "run": {"num_update": 1}})
    requirements = ReMax.declare_requirements(config)
    assert requirements.has_rollout and not requirements.is_group_relative and requirements.is_off_policy
    flow, controller = GreedyFlow(config), ReMax(config)
    prompts = PROMPTS * 8
    first = controller.step(flow, prompts)
    assert first.batch is not None and first.rollouts is not None and first.batch.advantages is not None
    # All logits are 0 at first: the greedy response is (0, 0), with no token right.
    assert first.metrics["rollout/greedy"] == 0.0
    expected = first.rollouts.reward.float().repeat_interleave(2)
    assert torch.equal(first.batch.advantages[first.batch.loss_mask], expected)
    for _ in range(30):
        last = controller.step(flow, prompts)
    assert last.metrics["rollout/greedy"] == 1.0
