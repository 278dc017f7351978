"""The DPO controller, with tables of logits as policy and reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megarl.config import ConfigError, from_dict
from megarl.controllers.controller import load_requirements, make_controller
from megarl.data.datasets import Pair
from megarl.types import ModelOutput, Prompt, Rollout, Rollouts, TrainBatch, Turn
from megarl.workers.futures import Future, UpdateMetrics

pytestmark = pytest.mark.alone


class TableFlow:
    """A token's log-prob is that of its entry in a table of logits; `updates` has the tokens of each update."""

    def __init__(self) -> None:
        self.actor = self
        self.reference = TableReference()
        self.table = torch.zeros(10, requires_grad=True)
        self.optimizer = torch.optim.Adam([self.table], lr=0.1)
        self.updates: list[list[int]] = []

    @property
    def data(self) -> Any:
        return self

    def shard(self, conversations: list[Rollout], group_size: int = 1) -> Rollouts:
        assert group_size == 2
        return Rollouts.gather(conversations)

    def forward(self, batch: TrainBatch) -> Future[ModelOutput]:
        return Future.completed(ModelOutput(logprobs=self.table.detach().log_softmax(0)[batch.tokens.long()]))

    def update(self, batch: TrainBatch, loss_fn: Any) -> UpdateMetrics:
        assert batch.loss_weights is not None and batch.keeps_groups
        result = loss_fn(ModelOutput(logprobs=self.table.log_softmax(0)[batch.tokens.long()]), batch)
        self.optimizer.zero_grad()
        loss = (result.loss * batch.loss_weights).sum()
        loss.backward()
        self.optimizer.step()
        self.updates.append(batch.tokens[batch.cu_seqlens[1:] - 1].tolist())
        metrics = {name: float((values * batch.loss_weights).sum()) for name, values in result.metrics.items()}
        return UpdateMetrics({"actor/loss": float(loss.detach()), **metrics})


class TableReference:
    def __init__(self) -> None:
        self.calls = 0

    def forward(self, batch: TrainBatch) -> Future[ModelOutput]:
        self.calls += 1
        return Future.completed(ModelOutput(logprobs=torch.zeros(10).log_softmax(0)[batch.tokens.long()]))


def make_conversation(*answer: int) -> Rollout:
    return Rollout(Prompt("p", ()), (Turn((9,)), Turn(answer, (0.0,) * len(answer), True)), group=77)


PAIRS = [
    Pair(make_conversation(1, 5), make_conversation(2)),
    Pair(make_conversation(1), make_conversation(6, 2)),
    Pair(make_conversation(3), make_conversation(4)),
    Pair(make_conversation(3), make_conversation(2)),
]


@pytest.mark.parametrize("algorithm", ["dpo", "ipo", "simpo", "cpo", "orpo"])
def test_learns_the_preferences(algorithm: str) -> None:
    tree = {"algorithm": algorithm, "run": {"num_update": 4, "ppo_epochs": 2}, "data": {"eval": "x"}}
    config = from_dict(tree)
    has_reference = algorithm in ("dpo", "ipo")
    requirements = load_requirements(config)
    assert requirements.roles == (("actor", "reference") if has_reference else ("actor",))
    assert requirements.item == "pairs" and requirements.main_role == "actor" and not requirements.has_rollout
    controller, flow = make_controller(config), TableFlow()
    before = controller.evaluate(flow, PAIRS)  # type: ignore[arg-type]
    if has_reference:  # the policy is the reference
        loss = 0.6931472 if algorithm == "dpo" else 25.0
        assert before == pytest.approx(
            {"eval/loss": loss, "eval/accuracy": 0.0, "eval/margin": 0.0, "eval/nll": 2.3025851}, abs=1e-6
        )
    flow.reference.calls = 0
    for _ in range(20):
        result = controller.step(flow, PAIRS)  # type: ignore[arg-type]
    assert flow.reference.calls == 20 * has_reference  # once per step, before its four updates
    assert result.metrics["rewards/margin"] == pytest.approx(
        result.metrics["rewards/chosen"] - result.metrics["rewards/rejected"], abs=1e-5
    )
    # Two epochs of two updates: no pair is split, and each appears once per epoch.
    last_tokens = sorted([pair.chosen.token_ids[-1], pair.rejected.token_ids[-1]] for pair in PAIRS)
    for epoch in (flow.updates[:2], flow.updates[2:4]):
        assert [len(update) for update in epoch] == [4, 4]
        assert sorted(update[i : i + 2] for update in epoch for i in (0, 2)) == last_tokens
    after = controller.evaluate(flow, PAIRS)  # type: ignore[arg-type]
    assert after["eval/accuracy"] == 1.0 and after["eval/loss"] < before["eval/loss"]


def test_evaluation_does_not_depend_on_batch_size() -> None:
    flow: Any = TableFlow()
    flow.table = torch.arange(10.0, requires_grad=True)
    actual = [
        make_controller(from_dict({"algorithm": "dpo", "data": {"prompts_per_step": size}})).evaluate(flow, PAIRS)
        for size in (1, 3, 64)
    ]
    # Gains over the reference are the logits less a constant c per token: 1 + 5 - c - 2, 1 - 6 - 2 + c, -1, 1.
    constant = float(flow.table.detach().logsumexp(0)) - float(torch.zeros(10).logsumexp(0))
    margins = [4 - constant, -7 + constant, -1.0, 1.0]
    assert actual[0]["eval/margin"] == pytest.approx(0.1 * sum(margins) / 4, abs=1e-6)
    assert actual[0]["eval/accuracy"] == sum(margin > 0 for margin in margins) / 4
    assert actual[1] == pytest.approx(actual[0]) and actual[2] == pytest.approx(actual[0])


def test_bad_options_name_the_key() -> None:
    for options, message in (
        ({"loss": "kto"}, "options.loss"),
        ({"loss": "orpo"}, "options.loss=orpo compares"),
        ({"beta": 0}, "options.beta"),
        ({"label_smoothing": 0.5}, "options.label_smoothing"),
    ):
        with pytest.raises(ConfigError, match=message):
            load_requirements(from_dict({"algorithm": "dpo", "options": options}))
