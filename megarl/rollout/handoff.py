"""From a rank of the trainer to the engine's rank beside it: buffers handed over while the next ones are filled."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from megarl.rollout.engine import Collect, Engine, EngineError
from megarl.rollout.mailbox import Mailbox


class HandOff:
    """Call it with a buffer, an order to write, and whether that is for the draft model; see
    `reshard.executor.HandOver`. Collective over an engine's ranks.

    engine: on the lead rank, None on the others. Nothing is raised for an engine that fails: its ranks go on taking
    part, since others wait for what they send, and `errors` says in the end what went wrong here, `failure` what the
    engine failed by.
    """

    def __init__(self, engine: Engine | None, collect: Collect) -> None:
        self.engine, self.collect = engine, collect
        self.errors: list[str] = []
        self.failure: EngineError | None = None
        self.differ: list[str] = []
        """What an order to compare found."""
        self._boxes = [Mailbox(), Mailbox()]
        self._thread = ThreadPoolExecutor(1, "handoff")
        self._running: tuple[Mailbox, Future[None] | None] | None = None

    def __call__(self, buffer: torch.Tensor | None, order: dict[str, Any], draft: bool = False) -> None:
        payloads = self.collect(self._boxes[0].payload(order, buffer))
        self.settle()
        future = None
        if self.engine is not None and not self.errors:
            future = self._thread.submit(self.engine.order, payloads, draft)
        self._running = self._boxes[0], future
        self._boxes.reverse()

    def settle(self) -> dict[str, Any]:
        """Wait for the order under way, if any; what the engine's rank answered."""
        if self._running is None:
            return {}
        (box, future), self._running = self._running, None
        failed = len(self.errors)
        if future is not None:
            try:
                future.result()
            except EngineError as error:
                self.failure = error
                self.errors.append(str(error))
        self.collect("")  # returns on all ranks when the lead rank has come here
        answer: dict[str, Any] = {}
        if len(self.errors) == failed:
            try:
                answer = box.answer()
            except EngineError as error:
                self.errors.append(str(error))
        self.differ += answer.get("differ", [])
        if wrong := answer.get("wrong"):
            self.errors.append(f"the engine holds other weights than were sent: {', '.join(wrong[:3])} ({len(wrong)})")
        return answer

    def ask(self, order: dict[str, Any], draft: bool = False) -> dict[str, Any]:
        """Give an order without data and wait for the answer; empty where something has failed."""
        self(None, order, draft)
        return self.settle()
