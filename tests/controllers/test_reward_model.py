"""The reward-model controller, with a table of scores as the model."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megarl.config import from_dict
from megarl.controllers.controller import make_controller
from megarl.controllers.reward_model import shard_pairs
from megarl.data.datasets import Pair
from megarl.types import ModelOutput, Prompt, Rollout, Rollouts, TrainBatch, Turn
from megarl.workers.futures import Future, UpdateMetrics

pytestmark = pytest.mark.alone


class TableFlow:
    """A conversation's score is its last token's entry; `updates` has the last tokens of each update."""

    def __init__(self) -> None:
        self.reward_model = self
        self.table = torch.zeros(10, requires_grad=True)
        self.optimizer = torch.optim.Adam([self.table], lr=0.1)
        self.updates: list[list[int]] = []

    @property
    def data(self) -> Any:
        return self

    def shard(self, conversations: list[Rollout], group_size: int = 1) -> Rollouts:
        return Rollouts.gather(conversations)

    def forward(self, batch: TrainBatch) -> Future[ModelOutput]:
        return Future.completed(ModelOutput(scores=self.table.detach()[batch.tokens.long()]))

    def update(self, batch: TrainBatch, loss_fn: Any) -> UpdateMetrics:
        assert batch.loss_weights is not None
        result = loss_fn(ModelOutput(scores=self.table[batch.tokens.long()]), batch)
        self.optimizer.zero_grad()
        (result.loss * batch.loss_weights).sum().backward()
        self.optimizer.step()
        self.updates.append(batch.tokens[batch.cu_seqlens[1:] - 1].tolist())
        return UpdateMetrics(
            {name: float((values * batch.loss_weights).sum()) for name, values in result.metrics.items()}
        )


def make_conversation(*answer: int) -> Rollout:
    return Rollout(Prompt("p", ()), (Turn((9,)), Turn(answer, (0.0,) * len(answer), True)), group=77)


PAIRS = [
    Pair(make_conversation(1, 5), make_conversation(2)),
    Pair(make_conversation(1), make_conversation(6, 2)),
    Pair(make_conversation(3), make_conversation(4)),
    Pair(make_conversation(3), make_conversation(2)),
]


def test_pairs_are_packed_chosen_first() -> None:
    flow: Any = TableFlow()
    _, batch = shard_pairs(flow, PAIRS[:2])
    assert batch.tokens.tolist() == [9, 1, 5, 9, 2, 9, 1, 9, 6, 2]
    assert batch.group.tolist() == [0, 0, 1, 1]
    assert batch.loss_weights is not None and batch.loss_weights.tolist() == [0, 0, 0.5, 0, 0, 0, 0.5, 0, 0, 0]


def test_learns_the_preferences() -> None:
    config = from_dict({"algorithm": "reward_model", "run": {"num_update": 4, "ppo_epochs": 2}, "data": {"eval": "x"}})
    controller = make_controller(config)
    assert controller.roles(config) == ("reward_model",)
    flow: Any = TableFlow()
    first = controller.evaluate(flow, PAIRS)
    assert first == pytest.approx({"eval/loss": 0.6931472, "eval/accuracy": 0.0, "eval/margin": 0.0})
    for _ in range(10):
        result = controller.step(flow, PAIRS)
    assert result.metrics["reward_model/accuracy"] == 1.0 and result.rollouts is None
    # Two epochs of two updates: no pair is split, and each appears once per epoch.
    last_tokens = sorted([pair.chosen.token_ids[-1], pair.rejected.token_ids[-1]] for pair in PAIRS)
    for epoch in (flow.updates[:2], flow.updates[2:4]):
        assert [len(update) for update in epoch] == [4, 4]
        trained_pairs = [update[i : i + 2] for update in epoch for i in (0, 2)]
        assert sorted(trained_pairs) == last_tokens
    last = controller.evaluate(flow, PAIRS)
    table = flow.table.detach()
    margins = [
        float(table[a] - table[b])
        for a, b in ([pair.chosen.token_ids[-1], pair.rejected.token_ids[-1]] for pair in PAIRS)
    ]
    assert last["eval/margin"] == pytest.approx(sum(margins) / 4) and last["eval/accuracy"] == 1.0


def test_evaluation_does_not_depend_on_batch_size() -> None:
    flow: Any = TableFlow()
    flow.table = torch.arange(10.0, requires_grad=True)
    actual = [
        make_controller(from_dict({"algorithm": "reward_model", "data": {"prompts_per_step": batch_size}})).evaluate(
            flow, PAIRS
        )
        for batch_size in (1, 3, 64)
    ]
    # Margins 5 - 2, 1 - 2, 3 - 4, 3 - 2.
    assert actual[0]["eval/margin"] == pytest.approx(0.5) and actual[0]["eval/accuracy"] == 0.5
    assert actual[1] == pytest.approx(actual[0]) and actual[2] == pytest.approx(actual[0])
