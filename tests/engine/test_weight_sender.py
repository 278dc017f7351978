"""Handing over with a stand-in of the engine's server that obeys, refuses, hangs, dies, or forgets to answer."""

from __future__ import annotations

import base64
import gc
import pickle
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megarl.engine import weight_loader
from megarl.engine.engine_protocol import EngineLost
from megarl.engine.sglang_engine import Engine, EngineError, allocate
from megarl.engine.weight_sender import WeightSender
from megarl.parallel import device

Stray = Callable[[dict[str, Any]], dict[str, Any]]


class Obedient(Engine):
    """Does orders on a module in this process, each in the thread that gives it."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model, self.requests, self.fail = model, 0, ""
        self.draft = torch.nn.Linear(2, 3, bias=False)
        self.given: set[str] = set()
        self.index, self.config = 0, SimpleNamespace(rollout=SimpleNamespace(hang_timeout=0.5))  # type: ignore[assignment]

    def call_loader(self, payloads: list[str], draft: bool = False, is_session: bool = False) -> None:
        self.requests += 1
        if self.fail:
            raise EngineError(self.fail)
        for payload in payloads:
            assert payload not in self.given, "what CUDA shares may be opened once"
            self.given.add(payload)
            weight_loader.load(self.draft if draft else self.model, pickle.loads(base64.b64decode(payload)))

    def _describe_log_tail(self) -> str:
        return "(its log)"


def order(offset: int, row: int) -> dict[str, Any]:
    slices = [["weight", -1, row, row + 1, 0, 2, offset, -1]]
    return {"do": "write", "version": 1, "tensor_dtype": {"weight": "float32"}, "slices": slices}


def bucket(*values: float) -> torch.Tensor:
    return allocate(4 * len(values)).copy_(torch.tensor(values, dtype=torch.float32).view(torch.uint8))


def hand_off(patience: float = 20.0) -> tuple[WeightSender, Obedient]:
    engine = Obedient(torch.nn.Linear(2, 3, bias=False))
    return WeightSender(engine, lambda payload: [payload], patience), engine


def test_buffers_are_written_in_turn_by_one_request() -> None:
    hand_over, engine = hand_off()
    buckets = [bucket(0, 0), bucket(0, 0)]
    hand_over.open(buckets)
    for row in range(3):
        buckets[row % 2].copy_(bucket(row, row + 0.5))
        hand_over(buckets[row % 2], order(0, row))
        assert hand_over.wait_pending() == {"wrong": []}
    hand_over.close()
    assert hand_over.errors == [] and engine.requests == 1
    assert engine.model.weight.tolist() == [[0, 0.5], [1, 1.5], [2, 2.5]]
    assert hand_over.send_order({"do": "describe"}) == {"tensors": {"weight": ["float32", [3, 2]]}, "odd": []}


class LateDevice:
    """Does what is queued, by each thread for itself, only when that has to be finished, as GPUs may."""

    def __init__(self) -> None:
        self.queued: dict[int, list[Callable[[], Any]]] = defaultdict(list)

    def later(self, work: Callable[..., Any]) -> Callable[..., None]:
        return lambda *args: self.queued[threading.get_ident()].append(lambda: work(*args))

    def finish(self, tensor: torch.Tensor, full: bool = False) -> None:
        queue = self.queued[threading.get_ident()]
        while queue:
            queue.pop(0)()


def test_the_other_process_looks_when_the_device_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine finds in a buffer what was queued for it, and has written when it answers, so that the buffer may be
    filled anew."""
    late = LateDevice()
    monkeypatch.setattr(device, "synchronize", late.finish)
    monkeypatch.setattr(weight_loader, "unpack", late.later(weight_loader.unpack))
    hand_over, engine = hand_off()
    buckets = [bucket(0, 0), bucket(0, 0)]
    hand_over.open(buckets)
    for row in range(3):
        late.later(buckets[row % 2].copy_)(bucket(row, row + 0.5))
        hand_over(buckets[row % 2], order(0, row))
        hand_over.wait_pending()
        assert engine.model.weight[row].tolist() == [row, row + 0.5]
        buckets[row % 2].zero_()
    hand_over.close()
    assert hand_over.errors == [] and engine.model.weight.tolist() == [[0, 0.5], [1, 1.5], [2, 2.5]]


def test_what_is_shared_stays_until_the_engine_is_through_with_it() -> None:
    """CUDA gives memory to others as soon as its owner has none of it, whoever else has it open."""
    hand_over, engine = hand_off()
    mine = [bucket(1, 2), bucket(3, 4)]
    seen = [weakref.ref(item) for item in mine]
    hand_over.open(mine)
    hand_over(mine[0], order(0, 0))
    del mine
    gc.collect()
    assert all(item() is not None for item in seen)
    hand_over.close()
    gc.collect()
    assert not any(item() is not None for item in seen)
    assert engine.model.weight[0].tolist() == [1, 2]


def test_the_draft_model_takes_part_and_no_session_later_than_its_own() -> None:
    hand_over, engine = hand_off()
    buckets = [bucket(1, 2), bucket(3, 4)]
    hand_over.open(buckets, draft=True)
    hand_over(buckets[0], order(0, 0), False)
    hand_over(buckets[1], order(0, 2), True)
    hand_over.close()
    assert hand_over.errors == []
    assert engine.model.weight[0].tolist() == [1, 2] and engine.draft.weight[2].tolist() == [3, 4]
    hand_over.open(buckets)
    hand_over(buckets[0], order(0, 0), True)
    hand_over.close()
    assert "no draft model has joined" in hand_over.errors[0]


def test_what_the_engine_cannot_do_is_noted_and_it_gets_no_more_orders() -> None:
    hand_over, engine = hand_off()
    buckets = [bucket(9, 9), bucket(9, 9)]
    hand_over.open(buckets)
    hand_over(buckets[0], order(0, 7))
    for row in range(2):
        hand_over(buckets[1], order(0, row))
    assert hand_over.wait_pending() == {}
    hand_over.close()
    assert "rows 7:8" in hand_over.errors[0] and len(hand_over.errors) == 1
    assert 9 not in engine.model.weight


@pytest.mark.parametrize("draft", [False, True])
def test_an_engine_that_refuses_is_noted(draft: bool) -> None:
    hand_over, engine = hand_off()
    engine.fail = "engine 0 does not respond"
    buckets = [bucket(0, 0), bucket(0, 0)]
    hand_over.open(buckets, draft)
    hand_over(buckets[0], order(0, 0))
    hand_over.close()
    assert hand_over.send_order({"do": "describe"}) == {}
    assert hand_over.errors[0] == str(hand_over.failure) == "engine 0 does not respond"


def test_other_bits_than_were_sent_are_noted_by_name() -> None:
    hand_over, _ = hand_off()
    buckets = [bucket(1, 2, 0, 0), bucket(0, 0)]
    wrong = order(0, 0)
    wrong["slices"][0][-1] = 8  # a hash of 0 is not that of these values
    hand_over.open(buckets)
    hand_over(buckets[0], wrong)
    hand_over.close()
    assert hand_over.errors == ["the engine's weights differ from those sent: weight (1)"]


def test_an_engine_that_dies_in_the_middle_is_noted_at_once_and_what_became_of_it_comes_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its process is gone, and with it the line; then its server says so by HTTP."""
    hand_over, engine = hand_off()

    def dies(path: str, obey: Stray) -> int:
        with weight_loader.socket.socket(weight_loader.socket.AF_UNIX) as line:
            line.connect(path)
            weight_loader._receive_json(line)
        engine.fail = "dead"
        return 0

    def order_(payloads: list[str], draft: bool = False, is_session: bool = False) -> None:
        Obedient.call_loader(engine, payloads, draft, is_session)
        if engine.fail:
            raise EngineLost("died", "engine 0 does not respond")

    monkeypatch.setattr(weight_loader, "serve_orders", dies)
    monkeypatch.setattr(engine, "call_loader", order_)
    buckets = [bucket(0, 0), bucket(0, 0)]
    hand_over.open(buckets)
    hand_over(buckets[0], order(0, 0))
    assert hand_over.wait_pending() == {}
    hand_over(buckets[1], order(0, 1))  # its rank goes on taking part
    hand_over.close()
    assert isinstance(hand_over.failure, EngineLost) and hand_over.failure.fault == "died"
    assert hand_over.errors == ["engine 0 does not respond", "an engine rank exited during a weight sync"]


@pytest.mark.parametrize("connects", [False, True])
def test_an_engine_that_hangs_is_lost(monkeypatch: pytest.MonkeyPatch, connects: bool) -> None:
    hand_over, _ = hand_off(patience=0.5)
    go_on = threading.Event()

    def hangs(path: str, obey: Stray) -> int:
        with weight_loader.socket.socket(weight_loader.socket.AF_UNIX) as line:
            if connects:
                line.connect(path)
            go_on.wait(60)
        return 0

    monkeypatch.setattr(weight_loader, "serve_orders", hangs)
    buckets = [bucket(0, 0), bucket(0, 0)]
    hand_over.open(buckets)
    hand_over(buckets[0], order(0, 0))
    hand_over.close()  # does not wait for the request
    go_on.set()
    assert isinstance(hand_over.failure, EngineLost) and hand_over.failure.fault == "hangs"
    assert "sent no heartbeat" in hand_over.errors[0]


def test_a_rank_that_leaves_has_the_engine_wait_no_longer() -> None:
    """As in a push that breaks off among the trainer's ranks."""
    hand_over, _ = hand_off()
    hand_over.open([bucket(0, 0), bucket(0, 0)])
    request = hand_over._session_request
    assert request is not None and not request.done()
    hand_over.close_channel()
    assert request.result(20) is None


def test_a_rank_that_does_not_lead_comes_after_the_one_that_does() -> None:
    """It waits for nobody where the lead's rank of the engine has not come."""
    events: list[str] = []

    def collect(payload: str) -> list[str]:
        events.append(payload)
        return ["", payload]  # the lead's rank has nobody

    beside = WeightSender(None, collect, timeout=20.0)
    beside.open([bucket(0, 0), bucket(0, 0)])
    beside(bucket(0, 0), order(0, 0))
    beside.close()
    assert beside.errors == [] and len(events) == 3
