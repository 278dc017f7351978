"""`WeightSender` with a fake engine that executes orders, refuses, hangs or dies."""

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
from megarl.engine.engine_protocol import EngineError, EngineLost
from megarl.engine.sglang.sglang_backend import SGLangBackend
from megarl.engine.sglang.sglang_engine import SGLangEngine
from megarl.engine.weight_sender import WeightSender
from megarl.parallel import device
from megarl.parallel.device import allocate_shared

Execute = Callable[[dict[str, Any]], dict[str, Any]]


class InProcessEngine(SGLangEngine):
    """Executes orders on a module in this process, in the thread that sends them."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model, self.requests, self.fail = model, 0, ""
        self.draft = torch.nn.Linear(2, 3, bias=False)
        self.seen_payloads: set[str] = set()
        self.index, self.name = 0, "engine 0"
        self.config = SimpleNamespace(rollout=SimpleNamespace(hang_timeout=0.5))  # type: ignore[assignment]

    def call_loader(self, payloads: list[str], draft: bool = False, is_session: bool = False) -> None:
        self.requests += 1
        if self.fail:
            raise EngineError(self.fail)
        for payload in payloads:
            assert payload not in self.seen_payloads, "a CUDA handle may be opened once"
            self.seen_payloads.add(payload)
            weight_loader.load(self.draft if draft else self.model, pickle.loads(base64.b64decode(payload)))

    def _describe_log_tail(self) -> str:
        return "(its log)"


def make_order(offset: int, row: int) -> dict[str, Any]:
    slices = [["weight", -1, row, row + 1, 0, 2, offset, -1]]
    return {"do": "write", "version": 1, "tensor_dtype": {"weight": "float32"}, "slices": slices}


def make_bucket(*values: float) -> torch.Tensor:
    return allocate_shared(4 * len(values)).copy_(torch.tensor(values, dtype=torch.float32).view(torch.uint8))


def make_sender(timeout: float = 20.0) -> tuple[WeightSender, InProcessEngine]:
    engine = InProcessEngine(torch.nn.Linear(2, 3, bias=False))
    return WeightSender(SGLangBackend(), engine, lambda payload: [payload], timeout), engine


def test_alternates_buffers_within_one_request() -> None:
    sender, engine = make_sender()
    buckets = [make_bucket(0, 0), make_bucket(0, 0)]
    sender.open(buckets)
    for row in range(3):
        buckets[row % 2].copy_(make_bucket(row, row + 0.5))
        sender(buckets[row % 2], make_order(0, row))
        assert sender.wait_pending() == {"wrong": []}
    sender.close()
    assert sender.errors == [] and engine.requests == 1
    assert engine.model.weight.tolist() == [[0, 0.5], [1, 1.5], [2, 2.5]]
    assert sender.send_order({"do": "describe"}) == {"tensors": {"weight": ["float32", [3, 2]]}, "odd": []}


class LazyDevice:
    """Runs each thread's queued work only on synchronization, as GPUs may."""

    def __init__(self) -> None:
        self.queued: dict[int, list[Callable[[], Any]]] = defaultdict(list)

    def defer(self, work: Callable[..., Any]) -> Callable[..., None]:
        return lambda *args: self.queued[threading.get_ident()].append(lambda: work(*args))

    def finish(self, tensor: torch.Tensor, whole: bool = False) -> None:
        queue = self.queued[threading.get_ident()]
        while queue:
            queue.pop(0)()


def test_synchronizes_the_device_before_and_after_each_write(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine reads a buffer only after the queued copies into it, and answers only after its own writes, so the
    buffer may be refilled."""
    lazy = LazyDevice()
    monkeypatch.setattr(device, "synchronize", lazy.finish)
    monkeypatch.setattr(weight_loader, "unpack", lazy.defer(weight_loader.unpack))
    sender, engine = make_sender()
    buckets = [make_bucket(0, 0), make_bucket(0, 0)]
    sender.open(buckets)
    for row in range(3):
        lazy.defer(buckets[row % 2].copy_)(make_bucket(row, row + 0.5))
        sender(buckets[row % 2], make_order(0, row))
        sender.wait_pending()
        assert engine.model.weight[row].tolist() == [row, row + 0.5]
        buckets[row % 2].zero_()
    sender.close()
    assert sender.errors == [] and engine.model.weight.tolist() == [[0, 0.5], [1, 1.5], [2, 2.5]]


def test_keeps_shared_buckets_alive_until_close() -> None:
    """CUDA reuses memory once its owner frees it, even if another process has it open."""
    sender, engine = make_sender()
    buckets = [make_bucket(1, 2), make_bucket(3, 4)]
    references = [weakref.ref(item) for item in buckets]
    sender.open(buckets)
    sender(buckets[0], make_order(0, 0))
    del buckets
    gc.collect()
    assert all(item() is not None for item in references)
    sender.close()
    gc.collect()
    assert not any(item() is not None for item in references)
    assert engine.model.weight[0].tolist() == [1, 2]


def test_draft_model_takes_part_only_in_its_own_session() -> None:
    sender, engine = make_sender()
    buckets = [make_bucket(1, 2), make_bucket(3, 4)]
    sender.open(buckets, draft=True)
    sender(buckets[0], make_order(0, 0), False)
    sender(buckets[1], make_order(0, 2), True)
    sender.close()
    assert sender.errors == []
    assert engine.model.weight[0].tolist() == [1, 2] and engine.draft.weight[2].tolist() == [3, 4]
    sender.open(buckets)
    sender(buckets[0], make_order(0, 0), True)
    sender.close()
    assert "no draft model has joined" in sender.errors[0]


def test_failed_order_is_recorded_and_ends_the_session() -> None:
    sender, engine = make_sender()
    buckets = [make_bucket(9, 9), make_bucket(9, 9)]
    sender.open(buckets)
    sender(buckets[0], make_order(0, 7))
    for row in range(2):
        sender(buckets[1], make_order(0, row))
    assert sender.wait_pending() == {}
    sender.close()
    assert "rows 7:8" in sender.errors[0] and len(sender.errors) == 1
    assert 9 not in engine.model.weight


@pytest.mark.parametrize("draft", [False, True])
def test_unreachable_engine_is_recorded(draft: bool) -> None:
    sender, engine = make_sender()
    engine.fail = "engine 0 does not respond"
    buckets = [make_bucket(0, 0), make_bucket(0, 0)]
    sender.open(buckets, draft)
    sender(buckets[0], make_order(0, 0))
    sender.close()
    assert sender.send_order({"do": "describe"}) == {}
    assert sender.errors[0] == str(sender.failure) == "engine 0 does not respond"


def test_hash_mismatch_is_recorded_by_name() -> None:
    sender, _ = make_sender()
    buckets = [make_bucket(1, 2, 0, 0), make_bucket(0, 0)]
    wrong = make_order(0, 0)
    wrong["slices"][0][-1] = 8  # 0 is not the hash of these values
    sender.open(buckets)
    sender(buckets[0], wrong)
    sender.close()
    assert sender.errors == ["the engine's weights differ from those sent: weight (1)"]


def test_engine_death_during_a_session_is_recorded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The connection breaks first, then the server reports the death by HTTP. The HTTP error is listed first."""
    sender, engine = make_sender()

    def serve_and_die(path: str, execute: Execute) -> int:
        with weight_loader.socket.socket(weight_loader.socket.AF_UNIX) as connection:
            connection.connect(path)
            weight_loader._receive_json(connection)
        engine.fail = "dead"
        return 0

    def call_loader(payloads: list[str], draft: bool = False, is_session: bool = False) -> None:
        InProcessEngine.call_loader(engine, payloads, draft, is_session)
        if engine.fail:
            raise EngineLost("died", "engine 0 does not respond")

    monkeypatch.setattr(weight_loader, "serve_orders", serve_and_die)
    monkeypatch.setattr(engine, "call_loader", call_loader)
    buckets = [make_bucket(0, 0), make_bucket(0, 0)]
    sender.open(buckets)
    sender(buckets[0], make_order(0, 0))
    assert sender.wait_pending() == {}
    sender(buckets[1], make_order(0, 1))  # its rank keeps taking part
    sender.close()
    assert isinstance(sender.failure, EngineLost) and sender.failure.fault == "died"
    assert sender.errors == ["engine 0 does not respond", "an engine rank exited during a weight sync"]


@pytest.mark.parametrize("connects", [False, True])
def test_hanging_engine_is_lost(monkeypatch: pytest.MonkeyPatch, connects: bool) -> None:
    sender, _ = make_sender(timeout=0.5)
    released = threading.Event()

    def serve_and_hang(path: str, execute: Execute) -> int:
        with weight_loader.socket.socket(weight_loader.socket.AF_UNIX) as connection:
            if connects:
                connection.connect(path)
            released.wait(60)
        return 0

    monkeypatch.setattr(weight_loader, "serve_orders", serve_and_hang)
    buckets = [make_bucket(0, 0), make_bucket(0, 0)]
    sender.open(buckets)
    sender(buckets[0], make_order(0, 0))
    sender.close()  # without waiting for the request
    released.set()
    assert isinstance(sender.failure, EngineLost) and sender.failure.fault == "hangs"
    assert "sent no heartbeat" in sender.errors[0]


def test_closing_the_channel_ends_the_engines_wait() -> None:
    """As in a weight sync that fails on a trainer rank."""
    sender, _ = make_sender()
    sender.open([make_bucket(0, 0), make_bucket(0, 0)])
    request = sender._session_request
    assert request is not None and not request.done()
    sender.close_channel()
    assert request.result(20) is None


def test_follower_rank_does_not_wait_for_an_absent_engine() -> None:
    """It does not wait if the leading rank's engine never connected."""
    collected: list[str] = []

    def collect(payload: str) -> list[str]:
        collected.append(payload)
        return ["", payload]  # the leading rank has no engine

    follower = WeightSender(SGLangBackend(), None, collect, timeout=20.0)
    follower.open([make_bucket(0, 0), make_bucket(0, 0)])
    follower(make_bucket(0, 0), make_order(0, 0))
    follower.close()
    assert follower.errors == [] and len(collected) == 3
