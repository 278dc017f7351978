"""PPO and GRPO as written in `controllers/`, with a table of logits for all roles: the algorithm alone, in a second."""

from __future__ import annotations

import random
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from megarl.config import Config, from_dict
from megarl.controllers.base import Controller, MeanOf, mini_batches
from megarl.controllers.registry import make_controller
from megarl.types import ModelOutput, Prompt, Rollout, Rollouts, TokenLoss, TrainBatch, Turn

ACTIONS = 6


class TablePolicy:
    """Two-token answers; token k of the answer is drawn from softmax(table[k]). The best answer is (1, 4)."""

    def __init__(self) -> None:
        self.table = torch.zeros(2, ACTIONS, requires_grad=True)
        self.values_table = torch.zeros(2, requires_grad=True)
        self.optimizer = torch.optim.Adam([self.table], lr=0.1)
        self.value_optimizer = torch.optim.Adam([self.values_table], lr=0.1)
        self.pushed = 0

    def output(self, batch: TrainBatch) -> ModelOutput:
        which = (batch.positions - 1).clamp(0, 1)
        logprobs = self.table.log_softmax(-1)
        entropy = -(logprobs.exp() * logprobs).sum(-1)
        chosen = logprobs[which, batch.tokens.long().clamp(max=ACTIONS - 1)]
        return ModelOutput(logprobs=chosen, entropy=entropy[which], values=self.values_table[which])

    def forward(self, batch: TrainBatch) -> ModelOutput:
        output = self.output(batch)
        assert output.logprobs is not None and output.entropy is not None
        return ModelOutput(logprobs=output.logprobs.detach(), entropy=output.entropy.detach())

    def update(self, batch: TrainBatch, loss_fn: Any) -> dict[str, float]:
        return self._descend(batch, loss_fn, self.optimizer)

    def _descend(self, batch: TrainBatch, loss_fn: Any, optimizer: torch.optim.Optimizer) -> dict[str, float]:
        result: TokenLoss = loss_fn(self.output(batch), batch)
        assert batch.loss_weights is not None
        optimizer.zero_grad()
        (result.loss * batch.loss_weights).sum().backward()
        optimizer.step()
        return {name: float((value * batch.loss_weights).sum()) for name, value in result.metrics.items()}


class TableFlow:
    """Just enough of HybridFlow for a controller: every role is the table."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.policy = TablePolicy()
        self.first_table = self.policy.table.detach().clone()
        self.random = random.Random(0)
        self.calls: list[str] = []
        self.actor = self.policy
        self.rollout = self.reward = self.reference = self
        self.critic = self
        self.clock = self
        self.phase = lambda name: nullcontext()

    def generate(self, items: Any, samples: int) -> Rollouts:
        self.calls.append("generate")
        logprobs = self.policy.table.detach().log_softmax(-1)
        rollouts = []
        for group, prompt in enumerate(items):
            for _ in range(samples):
                answer = [self.random.choices(range(ACTIONS), logprobs[k].exp().tolist())[0] for k in range(2)]
                chosen = tuple(float(logprobs[k, token]) for k, token in enumerate(answer))
                turns = (Turn((9,)), Turn(tuple(answer), chosen, True, 0))
                rollouts.append(Rollout(prompt, turns, group=group))
        return Rollouts.of(rollouts)

    def score(self, rollouts: Rollouts) -> Rollouts:
        import dataclasses

        self.calls.append("score")
        right = [int((r.token_ids[1:] == [1, 4]).sum()) for r in rollouts.here]
        here = [dataclasses.replace(r, reward=count / 2) for r, count in zip(rollouts.here, right, strict=True)]
        return rollouts.with_(here)

    def sleep(self) -> None:
        self.calls.append("sleep")

    def update_weights(self, actor: Any) -> None:
        self.calls.append("push")

    def forward(self, batch: TrainBatch) -> ModelOutput:
        """Of the reference and of the critic."""
        which = (batch.positions - 1).clamp(0, 1)
        logprobs = self.first_table.log_softmax(-1)[which, batch.tokens.long().clamp(max=ACTIONS - 1)]
        values = self.policy.output(batch).values
        assert values is not None
        return ModelOutput(logprobs=logprobs, values=values.detach())

    def update(self, batch: TrainBatch, loss_fn: Any) -> dict[str, float]:
        return self.policy._descend(batch, loss_fn, self.policy.value_optimizer)


@pytest.mark.parametrize(("algorithm", "mean"), [("ppo", "token"), ("grpo", "sequence")])
@pytest.mark.parametrize("kl", [{"place": "reward"}, {"place": "loss"}, {"place": "none"}])
def test_controllers_learn_a_table(algorithm: str, kl: dict[str, Any], mean: str) -> None:
    tree = {"algorithm": algorithm, "kl": kl, "run": {"num_update": 2, "epochs": 2}}
    config = from_dict(tree | {"rollout": {"samples_per_prompt": 8}, "loss": {"mean": mean}})
    controller: Controller = make_controller(config)
    flow: Any = TableFlow(config)
    prompts = [Prompt(id=str(i), messages=()) for i in range(4)]
    means = []
    for _ in range(25):
        result = controller.step(flow, prompts)
        assert result.batch is not None
        means.append(float(result.batch.sequence_reward.mean()))
    assert means[0] < 0.4 and sum(means[-5:]) / 5 > 0.85, means
    assert flow.calls[:4] == ["generate", "score", "sleep", "push"]
    assert result.metrics["rollout/logprob_diff"] < 1e-6
    if kl["place"] != "none":
        assert result.metrics["actor/kl_to_reference"] > 0.05  # it has moved away from where it began
    restored = make_controller(config)
    restored.load_state_dict(controller.state_dict())
    assert restored.state_dict() == controller.state_dict()


@pytest.mark.parametrize("mean", ["token", "sequence"])
def test_mini_batches_cover_each_epoch_once(mean: str) -> None:
    config = from_dict({"run": {"num_update": 4, "epochs": 2}, "loss": {"mean": mean}})
    rollouts = [Rollout(Prompt(str(i), ()), (Turn((i,)), Turn((i, i), (0.0, 0.0), True)), group=i) for i in range(7)]
    batch = TrainBatch.from_rollouts(rollouts)
    parts = list(mini_batches(batch, config, seed=3))
    assert [part.num_sequences for part in parts] == [4, 3, 4, 3]
    for epoch in (parts[:2], parts[2:]):
        seen = sorted(int(group) for part in epoch for group in part.group)
        assert seen == list(range(7))
    for part in parts:
        assert part.loss_weights is not None
        assert float(part.loss_weights.sum()) == pytest.approx(1.0)
        assert bool((part.loss_weights[~part.loss_mask] == 0).all())
    assert [part.group.tolist() for part in parts] == [p.group.tolist() for p in mini_batches(batch, config, seed=3)]
    assert parts[0].group.tolist() != parts[2].group.tolist()


def test_mean_of_counts_each_metric_by_itself() -> None:
    means = MeanOf()
    means.add({"a": 1.0, "b": 4.0})
    means.add({"a": 3.0})
    assert means.result() == {"a": 2.0, "b": 4.0}


def test_the_schedule_of_the_policy_is_over_the_updates_that_it_takes() -> None:
    tree = {"run": {"num_rollout": 100, "num_update": 4}, "critic": {"warmup_steps": 20}}
    ppo, grpo = (make_controller(from_dict(tree | {"algorithm": name})) for name in ("ppo", "grpo"))
    assert (ppo.updates("actor"), ppo.updates("critic")) == (80 * 4, 100 * 4)
    assert grpo.updates("actor") == 100 * 4  # which has no critic to wait for
