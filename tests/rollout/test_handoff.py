"""Handing over with a stand-in of the engine's server that obeys, refuses, or forgets to answer."""

from __future__ import annotations

import base64
import pickle
from typing import Any

import torch

from megarl.rollout import loader
from megarl.rollout.engine import Engine, EngineError
from megarl.rollout.handoff import HandOff


class Obedient(Engine):
    """Does orders on a module in this process."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model, self.orders, self.fail = model, 0, ""

    def order(self, payloads: list[str], draft: bool = False) -> None:
        self.orders += 1
        if self.fail:
            raise EngineError(self.fail)
        for payload in payloads:
            loader.load(self.model, pickle.loads(base64.b64decode(payload)))


def order(offset: int, row: int) -> dict[str, Any]:
    slices = [["weight", -1, row, row + 1, 0, 2, offset, -1]]
    return {"do": "write", "version": 1, "tensor_dtype": {"weight": "float32"}, "slices": slices}


def bucket(*values: float) -> torch.Tensor:
    return torch.tensor(values).view(torch.uint8).clone()


def hand_off() -> tuple[HandOff, Obedient]:
    engine = Obedient(torch.nn.Linear(2, 3, bias=False))
    return HandOff(engine, lambda payload: [payload]), engine


def test_buffers_are_written_in_turn() -> None:
    hand_over, engine = hand_off()
    for row in range(3):
        hand_over(bucket(row, row + 0.5), order(0, row))
    hand_over.settle()
    assert hand_over.errors == []
    assert engine.model.weight.tolist() == [[0, 0.5], [1, 1.5], [2, 2.5]]
    assert hand_over.ask({"do": "describe"}) == {"tensors": {"weight": ["float32", [3, 2]]}, "odd": []}


def test_what_the_engine_cannot_do_is_noted_and_it_gets_no_more_orders() -> None:
    hand_over, engine = hand_off()
    hand_over(bucket(0, 0), order(0, 7))
    for row in range(2):
        hand_over(bucket(9, 9), order(0, row))
    assert hand_over.settle() == {}
    assert "rows 7:8" in hand_over.errors[0]
    assert engine.orders <= 2  # one may have been under way


def test_an_engine_that_refuses_is_noted() -> None:
    hand_over, engine = hand_off()
    engine.fail = "engine 0 does not answer"
    assert hand_over.ask({"do": "describe"}) == {}
    assert hand_over.errors == ["engine 0 does not answer"]


def test_other_bits_than_were_sent_are_noted_by_name() -> None:
    hand_over, _ = hand_off()
    data = torch.cat([bucket(1, 2), torch.zeros(8, dtype=torch.uint8)])
    wrong = order(0, 0)
    wrong["slices"][0][-1] = 8  # a hash of 0 is not that of these values
    hand_over(data, wrong)
    hand_over.settle()
    assert hand_over.errors == ["the engine holds other weights than were sent: weight (1)"]
