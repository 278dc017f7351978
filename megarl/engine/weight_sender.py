"""Trainer side of a weight sync: pass filled buffers to the engine rank on the same device while filling the next.

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
from megarl.engine.engine_backends import EngineBackend
from megarl.engine.engine_protocol import Engine, EngineError, GatherPayloads
from megarl.engine.weight_loader import EngineTimeout, WeightChannel
from megarl.parallel import device

ANSWER_BYTES = 1 << 20
"""Bytes for an answer: the longest lists the tensors of a model, about 100 bytes each."""


class OrderBuffer:
    """Memory for orders to one engine rank, one at a time, and for its answers, shared on the engine rank's device.

    An engine would copy tensors from anywhere else. device_number: as for `device.allocate_shared`.
    """

    def __init__(self, backend: EngineBackend, device_number: int | None = None) -> None:
        self._backend, self._device_number = backend, device_number
        self._answer = device.allocate_order(ANSWER_BYTES, device_number)
        self._order = self._answer  # the last order must stay alive until the next: the engine may still read it

    def make_payload(self, order: dict[str, Any], *buckets: torch.Tensor) -> str:
        """Build a payload for one call of `Engine.call_loader`; each call needs a new payload.

        buckets: [n] uint8 each, from `device.allocate_shared`; one for an order to write, two for a session. Neither
        they nor this object may be reused or dropped before the answer.
        """
        weight_loader.clear_answer(self._answer)
        encoded = torch.frombuffer(bytearray(json.dumps(order).encode()), dtype=torch.uint8)
        self._order = device.allocate_order(len(encoded), self._device_number).copy_(encoded)
        tensors = [("order", self._order), ("answer", self._answer)]
        tensors += [(f"bucket{number or ''}", bucket) for number, bucket in enumerate(buckets)]
        return self._backend.pack_payload(tensors)

    def read_answer(self) -> dict[str, Any]:
        """Return the answer to the last order. Raises EngineError if there is none, or the order failed."""
        try:
            answer = weight_loader.read_answer(self._answer)
        except ValueError:
            raise EngineError("an engine rank did not answer a request") from None
        if "error" in answer:
            raise EngineError(f"an engine rank failed to execute a request: {answer['error']}")
        return answer


class WeightSender:
    """Sends the buffers of a weight sync to an engine.

    Between `open` and `close`, call it with a buffer, an order to write, and whether that is for the draft model; see
    `reshard.run.executor.SendToEngine`. In that time each rank talks only to the engine rank on the same device;
    everything else is collective over an engine's ranks.

    backend: kind of the engine. engine: on the lead rank, None on the others. timeout: seconds that the engine may take
    for an order. device_number: as for `OrderBuffer`.

    A failing engine raises nothing: its ranks go on taking part, since others wait for what they send. Afterwards
    `errors` lists what went wrong on this rank, and `failure` is the engine's error.
    """

    def __init__(
        self,
        backend: EngineBackend,
        engine: Engine | None,
        gather_payloads: GatherPayloads,
        timeout: float = 120.0,
        device_number: int | None = None,
    ) -> None:
        self.engine, self.gather_payloads, self.timeout = engine, gather_payloads, timeout
        self.errors: list[str] = []
        self.failure: EngineError | None = None
        self.mismatches: list[str] = []
        """Tensors that compare orders found to differ."""
        self._order_buffer = OrderBuffer(backend, device_number)
        self._buckets: list[torch.Tensor] = []
        self._channel: WeightChannel | None = None
        self._session_request: Future[None] | None = None
        self._is_answer_pending = False

    def open(self, buckets: Sequence[torch.Tensor], draft: bool = False) -> None:
        """Open the session of a weight sync: one request to the engine, which lasts until `close`.

        buckets: [n] uint8 each, the buffers that will be sent; they are shared here, and only here. draft: there are
        orders for the draft model.
        """
        if draft:
            self.send_order({"do": "join"}, draft)
        self._buckets = list(buckets)
        channel = WeightChannel(self.timeout)
        order = {"do": "session", "socket": channel.path}
        payloads = self.gather_payloads(self._order_buffer.make_payload(order, *self._buckets))
        is_connected = False
        if self.engine is not None:
            if not self.errors:
                self._session_request = _start_session(self.engine, payloads)
                is_connected = self._wait_connected(channel, self._session_request)
            self.gather_payloads("connected" if is_connected else "")
        elif self.gather_payloads("waits")[0]:  # the lead's engine rank has connected: the request has reached all
            is_connected = self._wait_connected(channel, None)
        if is_connected and not self.errors:
            self._channel = channel
        else:
            channel.close()

    def _wait_connected(self, channel: WeightChannel, request: Future[None] | None) -> bool:
        try:
            return channel.wait_connected(lambda: request is not None and request.done())
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
        """Wait for the order in flight on this rank, if any, and return the engine rank's answer. Not collective."""
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
            self.errors.append(f"the engine's weights differ from those sent: {', '.join(wrong[:3])} ({len(wrong)})")
        return answer

    def _record_error(self, error: EngineError) -> None:
        if isinstance(error, EngineTimeout) and self.engine is not None and self.failure is None:
            self.failure = self.engine.hang_error(self.timeout)
        self.errors.append(str(error))

    def close(self) -> None:
        """Close the session, if one is open; returns on all ranks when the engine is done with it."""
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
            self.errors.insert(0, str(self.failure))  # the cause of the other errors
        self.gather_payloads("")  # the buckets must outlive the last access by any engine rank
        self._buckets = []

    def close_channel(self) -> None:
        """Hang up on the engine rank. Neither collective nor blocking, so that an aborted weight sync can call it."""
        channel, self._channel, self._is_answer_pending = self._channel, None, False
        if channel is not None:
            channel.close()

    def send_order(self, order: dict[str, Any], draft: bool = False) -> dict[str, Any]:
        """Send an order without data as a separate request, and wait for the answer; empty after a failure."""
        payloads = self.gather_payloads(self._order_buffer.make_payload({**order, "draft": draft}))
        num_errors = len(self.errors)
        if self.engine is not None and not self.errors:
            try:
                self.engine.call_loader(payloads, draft)
            except EngineError as error:
                self.failure = error
                self.errors.append(str(error))
        self.gather_payloads("")  # waits for the lead rank
        if len(self.errors) == num_errors:
            try:
                return self._order_buffer.read_answer()
            except EngineError as error:
                self.errors.append(str(error))
        return {}


def _start_session(engine: Engine, payloads: list[str]) -> Future[None]:
    """Send the session's request in a daemon thread: the engine may hang, and process exit must not wait for it."""
    future: Future[None] = Future()

    def run() -> None:
        try:
            engine.call_loader(payloads, is_session=True)
            future.set_result(None)
        except BaseException as error:  # noqa: B036  re-raised by `Future.result`
            future.set_exception(error)

    threading.Thread(target=run, name="weight sync", daemon=True).start()
    return future
