"""The trainer's side of `loader.py`: what one of its ranks shares with the engine's rank beside it."""

from __future__ import annotations

import json
from typing import Any

import torch

from megarl.rollout import loader
from megarl.rollout.engine import EngineError, allocate, packed

ROOM = 1 << 20
"""Bytes for an answer: the longest lists the tensors of a model, about 100 bytes each."""


class Mailbox:
    """Shared memory for the orders to one rank of an engine, and for its answers. Reusable, for one order at a time.

    Memory can be shared within a machine only, on GPUs within one device, where SGLang would make a copy of anything
    that lies elsewhere; so everything lies where the tensors of the engine's rank do.
    """

    def __init__(self) -> None:
        self._answer = allocate(ROOM)
        self._order = self._answer  # stays alive from one order to the next, for the engine may look that long

    def payload(self, order: dict[str, Any], *buckets: torch.Tensor) -> str:
        """For `Engine.order`, once: each call of it needs a payload of its own.

        buckets: [n] uint8 each, of `engine.allocate`; one for an order to write, two for a session. Neither they nor
        this object may be used for another order, or dropped, before the answer.
        """
        loader.clear(self._answer)
        said = torch.frombuffer(bytearray(json.dumps(order).encode()), dtype=torch.uint8)
        self._order = allocate(len(said)).copy_(said)
        tensors = [("order", self._order), ("answer", self._answer)]
        return packed(tensors + [(f"bucket{number or ''}", bucket) for number, bucket in enumerate(buckets)])

    def answer(self) -> dict[str, Any]:
        """What the engine's rank answered to the last order. Raises EngineError where it did not, or could not obey."""
        try:
            answer = loader.read(self._answer)
        except ValueError:
            raise EngineError("an engine's rank has not answered its order") from None
        if "error" in answer:
            raise EngineError(f"an engine's rank could not obey its order: {answer['error']}")
        return answer
