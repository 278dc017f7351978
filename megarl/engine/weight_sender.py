"""The trainer's end of a weight sync: pass filled buffers to the engine's rank on the same device while filling the
next.

`OrderBuffer` is the memory that a trainer rank shares with the engine rank; `weight_loader.py` is the other end.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotDone
from typing import Any

import torch

from megarl.engine import weight_loader
from megarl.engine.sglang_engine import Engine, EngineError, GatherPayloads, allocate, pack_payload
from megarl.engine.weight_channel import EngineTimeout, WeightChannel
from megarl.parallel import device

ANSWER_BYTES = 1 << 20
"""Bytes for an answer: the longest lists the tensors of a model, about 100 bytes each."""


class OrderBuffer:
    """Shared memory for the orders to one rank of an engine, and for its answers. Reusable, for one order at a time.

    Memory can be shared within a machine only, on GPUs within one device, where SGLang would make a copy of anything
    that lies elsewhere; so everything lies where the tensors of the engine's rank do.
    """

    def __init__(self) -> None:
        self._answer = allocate(ANSWER_BYTES)
        self._order = self._answer  # stays alive from one order to the next, for the engine may look that long

    def make_payload(self, order: dict[str, Any], *buckets: torch.Tensor) -> str:
        """For `Engine.call_loader`, once: each call of it needs a payload of its own.

        buckets: [n] uint8 each, of `engine.allocate`; one for an order to write, two for a session. Neither they nor
        this object may be used for another order, or dropped, before the answer.
        """
        weight_loader.clear_answer(self._answer)
        said = torch.frombuffer(bytearray(json.dumps(order).encode()), dtype=torch.uint8)
        self._order = allocate(len(said)).copy_(said)
        tensors = [("order", self._order), ("answer", self._answer)]
        return pack_payload(tensors + [(f"bucket{number or ''}", bucket) for number, bucket in enumerate(buckets)])

    def read_answer(self) -> dict[str, Any]:
        """What the engine's rank answered to the last order. Raises EngineError where it did not, or could not obey."""
        try:
            answer = weight_loader.read_answer(self._answer)
        except ValueError:
            raise EngineError("an engine's rank has not answered its order") from None
        if "error" in answer:
            raise EngineError(f"an engine's rank could not obey its order: {answer['error']}")
        return answer


class WeightSender:
    """Call it, between `open` and `close`, with a buffer, an order to write, and whether that is for the draft model;
    see `reshard.run.executor.SendToEngine`. Each rank speaks with the engine's rank beside it then, and with nobody else;
    all else is collective over an engine's ranks.

    engine: on the lead rank, None on the others. patience: seconds that the engine may take for an order. Nothing is
    raised for an engine that fails: its ranks go on taking part, since others wait for what they send, and `errors`
    says in the end what went wrong here, `failure` what the engine failed by.
    """

    def __init__(self, engine: Engine | None, collect: GatherPayloads, patience: float = 120.0) -> None:
        self.engine, self.collect, self.timeout = engine, collect, patience
        self.errors: list[str] = []
        self.failure: EngineError | None = None
        self.mismatches: list[str] = []
        """What an order to compare found."""
        self._order_buffer = OrderBuffer()
        self._buckets: list[torch.Tensor] = []
        self._channel: WeightChannel | None = None
        self._session_request: Future[None] | None = None
        self._is_answer_pending = False  # for the answer to an order

    def open(self, buckets: Sequence[torch.Tensor], draft: bool = False) -> None:
        """Open the session of a push: one request to the engine, which lasts until `close`. buckets: [n] uint8 each,
        what will be handed over; they are shared here, and only here. draft: whether there are orders for the draft
        model."""
        if draft:
            self.send_order({"do": "join"}, draft)
        self._buckets = list(buckets)
        line = WeightChannel(self.timeout)
        opening = {"do": "session", "socket": line.path}
        payloads = self.collect(self._order_buffer.make_payload(opening, *self._buckets))
        came = False
        if self.engine is not None:
            if not self.errors:
                self._session_request = _start_session(self.engine, payloads)
                came = self._wait_connected(line, self._session_request)
            self.collect("came" if came else "")
        elif self.collect("")[0]:  # the lead's rank has come, so the request has reached them all
            came = self._wait_connected(line, None)
        if came and not self.errors:
            self._channel = line
        else:
            line.close()

    def _wait_connected(self, line: WeightChannel, request: Future[None] | None) -> bool:
        try:
            return line.wait_connected(lambda: request is not None and request.done())
        except EngineError as error:
            self._record_error(error)
            return False

    def __call__(self, buffer: torch.Tensor, order: dict[str, Any], draft: bool = False) -> None:
        self.wait_pending()
        if self._channel is None or self.errors:
            return
        (number,) = (number for number, bucket in enumerate(self._buckets) if bucket is buffer)
        device.synchronize(buffer)
        try:
            self._channel.send({**order, "bucket": number, "draft": draft})
            self._is_answer_pending = True
        except EngineError as error:
            self._record_error(error)

    def wait_pending(self) -> dict[str, Any]:
        """Wait for the order under way here, if any; what the engine's rank answered. Not collective."""
        if not self._is_answer_pending:
            return {}
        self._is_answer_pending = False
        assert self._channel is not None
        try:
            answer = self._channel.receive()
        except EngineError as error:
            self._record_error(error)
            return {}
        self.mismatches += answer.get("differ", [])
        if wrong := answer.get("wrong"):
            self.errors.append(f"the engine holds other weights than were sent: {', '.join(wrong[:3])} ({len(wrong)})")
        return answer

    def _record_error(self, error: EngineError) -> None:
        if isinstance(error, EngineTimeout) and self.engine is not None and self.failure is None:
            self.failure = self.engine.hang_error(self.timeout)
        self.errors.append(str(error))

    def close(self) -> None:
        """End the session, if one was opened; returns on all ranks when the engine is through with it."""
        self.wait_pending()
        if not self._buckets:
            return
        self.close_channel()
        request, self._session_request = self._session_request, None
        if request is not None and self.failure is None and self.engine is not None:
            try:
                request.result(self.timeout)
            except EngineError as error:
                self.failure = error
            except NotDone:
                self.failure = self.engine.hang_error(self.timeout)
        if self.failure is not None and str(self.failure) not in self.errors:
            self.errors.insert(0, str(self.failure))  # what the others say follows from it
        self.collect("")  # the buckets must be there as long as any of the engine's ranks looks at them
        self._buckets = []

    def close_channel(self) -> None:
        """Have the engine's rank beside this one wait for no more orders. Neither collective nor waiting: for a push
        that breaks off, too."""
        line, self._channel, self._is_answer_pending = self._channel, None, False
        if line is not None:
            line.close()

    def send_order(self, order: dict[str, Any], draft: bool = False) -> dict[str, Any]:
        """Give an order without data by a request of its own and wait for the answer; empty where something has
        failed."""
        payloads = self.collect(self._order_buffer.make_payload(order))
        failed = len(self.errors)
        if self.engine is not None and not self.errors:
            try:
                self.engine.call_loader(payloads, draft)
            except EngineError as error:
                self.failure = error
                self.errors.append(str(error))
        self.collect("")  # returns on all ranks when the lead rank has come here
        if len(self.errors) > failed:
            return {}
        try:
            return self._order_buffer.read_answer()
        except EngineError as error:
            self.errors.append(str(error))
        return {}


def _start_session(engine: Engine, payloads: list[str]) -> Future[None]:
    """The request of a session. Its thread is nobody's to wait for when a process ends: the engine may hang."""
    future: Future[None] = Future()

    def run() -> None:
        try:
            engine.call_loader(payloads, lasting=True)
        except BaseException as error:  # noqa: B036  told to whoever waits
            future.set_exception(error)
        else:
            future.set_result(None)

    threading.Thread(target=run, name="push", daemon=True).start()
    return future
