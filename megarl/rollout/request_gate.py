"""Bound concurrent requests to the policy, and hold them back while it is asleep or gets new weights."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from megarl.config import OnWeightSync
from megarl.engine.engine_protocol import NOT_RECORDED, Generation, Policy, RecordedPrefix, TokenCallback
from megarl.engine.external_client import SharedClient
from megarl.rollout.partial_rollouts import merge_turns
from megarl.types import Ids, Image, SamplingMask, as_token_ids

_RETRY_S = 0.1
"""Seconds between repeated requests to stop the policy."""
OVERCOMMIT = 2
"""Maximum ratio of running conversations to engine slots; the excess waits for tools."""


class RequestGate:
    """Counts running conversations, idle ones among them, and open requests.

    Attributes:
        num_slots: conversations for which the policy has room
        num_idle: running conversations that do not need the policy, because tools are at work
        is_admitting: whether conversations may start
    """

    def __init__(self, policy: Policy, num_slots: int) -> None:
        self.policy, self.num_slots = policy, num_slots
        self.free_slots = asyncio.Semaphore(num_slots)
        self.num_conversations = self.num_idle = self.num_requests = 0
        self.is_admitting = True
        self._changed = asyncio.Event()
        self.open = asyncio.Event()
        self.open.set()
        self._busy_seconds, self._counted_at = 0.0, time.monotonic()
        self._busy_interval: tuple[float, float] | None = None

    async def wait_for_room(self) -> None:
        """Wait for room for another conversation."""
        await self.wait_until(self._has_room)

    def _has_room(self) -> bool:
        has_free_slot = self.num_conversations - self.num_idle < self.num_slots
        is_below_limit = self.num_conversations < OVERCOMMIT * self.num_slots
        return has_free_slot and is_below_limit and self.is_admitting and self.open.is_set()

    async def wait_until(self, is_met: Callable[[], bool]) -> None:
        """Wait until a condition holds, which is checked after each `notify`."""
        while not is_met():
            self._changed.clear()
            await self._changed.wait()

    def open_slot(self) -> RequestSlot:
        self.num_conversations += 1
        return RequestSlot(self)

    async def pause(self, mode: OnWeightSync) -> None:
        """Free the policy for a weight sync or for sleep; nothing starts until `reopen`. Raises EngineLost.

        `mode` says what becomes of running requests: abort them and continue later ("retract"), keep them in an engine
        that pauses itself ("in_place"), or let their conversations end ("wait").
        """
        if mode == "wait":
            self.is_admitting = False
            await self.wait_until(lambda: not self.num_conversations)
            return
        self.open.clear()
        while self.num_requests and mode == "retract":
            await self.policy.stop()
            with suppress(TimeoutError):  # then repeat: a request may have been in flight
                async with asyncio.timeout(_RETRY_S):
                    await self.wait_until(lambda: not self.num_requests)

    def reopen(self) -> None:
        """Admit conversations and requests again, and continue aborted requests."""
        self.is_admitting = True
        self.open.set()
        self.notify()

    def measure_busy_seconds(self) -> float:
        """Return the seconds with open requests, summed over concurrent requests."""
        self.count_requests(0)
        return self._busy_seconds

    def pop_busy_interval(self) -> tuple[float, float] | None:
        """Return the start and end of request activity since the last call, or None if there was none."""
        self.count_requests(0)
        interval, self._busy_interval = self._busy_interval, None
        return interval

    def count_requests(self, increment: int) -> None:
        """Change the number of open requests by `increment`."""
        now = time.monotonic()
        if self.num_requests:
            self._busy_seconds += self.num_requests * (now - self._counted_at)
            self._busy_interval = (self._busy_interval or (self._counted_at, now))[0], now
        self.num_requests, self._counted_at = self.num_requests + increment, now
        self.notify()

    def notify(self) -> None:
        """Wake all waiters after a change."""
        self._changed.set()


class RequestSlot:
    """The policy as seen by one conversation, which waits for a free slot.

    A request aborted by a pause continues after it, if need be with new weights: its tokens are kept, and their keys
    and values are recomputed.
    """

    def __init__(self, gate: RequestGate) -> None:
        self._gate, self._is_idle = gate, False
        self._requests: dict[object, Generation | None] = {}
        """The tokens so far of each request that waits or runs; an agent may send several at once."""

    @property
    def interrupted(self) -> list[Generation]:
        """The tokens so far of requests that a pause has aborted and that are not done."""
        return [generation for generation in self._requests.values() if generation is not None]

    async def generate(
        self,
        ids: Ids | Sequence[int],
        params: dict[str, Any],
        recorded: RecordedPrefix = NOT_RECORDED,
        on_tokens: TokenCallback | None = None,
        *,
        images: Sequence[Image] = (),
    ) -> Generation:
        self._requests[request := object()] = None
        self._set_idle(is_idle=False)
        try:
            async with self._gate.free_slots:
                options: dict[str, Any] = {"images": images} if images else {}
                if isinstance(self._gate.policy, SharedClient):
                    options["conversation"] = self
                generation = await self._request(ids, params, recorded, on_tokens, options)
                while generation.finish_reason == "abort" and not self._gate.open.is_set():
                    new_ids, budget = generation.token_ids, params["max_new_tokens"] - len(generation.token_ids)
                    if len(new_ids) and int(new_ids[-1]) in params.get("stop_token_ids", ()):
                        # The response was complete before the abort.
                        return replace(generation, finish_reason="stop", abort_reason="")
                    if not budget:
                        return replace(generation, finish_reason="length", abort_reason="")
                    prefix = generation.extend_prefix(recorded)
                    context = np.concatenate([as_token_ids(ids), new_ids])
                    remaining = {**params, "max_new_tokens": budget}
                    self._requests[request] = generation if len(new_ids) else None
                    more = await self._request(context, remaining, prefix, on_tokens, options)
                    generation = merge_generations(generation, more)
                return generation
        finally:
            del self._requests[request]
            self._set_idle(is_idle=not self._requests)

    async def _request(
        self,
        ids: Ids | Sequence[int],
        params: dict[str, Any],
        recorded: RecordedPrefix,
        on_tokens: TokenCallback | None,
        options: dict[str, Any],
    ) -> Generation:
        gate = self._gate
        await gate.open.wait()
        gate.count_requests(1)
        try:
            return await gate.policy.generate(ids, params, recorded, on_tokens, **options)
        finally:
            gate.count_requests(-1)

    def mark_idle(self) -> None:
        """Mark the conversation as not needing the policy until its next request."""
        self._set_idle(is_idle=True)

    def release(self) -> None:
        self._gate.num_conversations -= 1
        self._set_idle(is_idle=False)

    def _set_idle(self, is_idle: bool) -> None:
        self._gate.num_idle += is_idle - self._is_idle
        self._is_idle = is_idle
        self._gate.notify()

    async def stop(self) -> None:
        await self._gate.policy.stop()


def merge_generations(first: Generation, second: Generation) -> Generation:
    """Join an aborted generation with its continuation, whose record replaces the first one's if it begins with it."""
    if not second.has_record:
        recorded = [first]
    elif first.has_record and second.record_start > first.record_start:
        recorded = [first, second]
    else:
        recorded = [second]
    turn = merge_turns(first.to_turn(), second.to_turn())
    routings = [part for part in (part.routing for part in recorded) if part is not None]
    indices = [part for part in (part.sparse_indices for part in recorded) if part is not None]
    masks = [part for part in (first.sampling_mask, second.sampling_mask) if part is not None]
    return replace(
        second,
        token_ids=turn.token_ids,
        logprobs=turn.logprobs,
        weight_version=turn.weight_version,
        versions=turn.versions,
        routing=torch.cat(routings) if routings else None,
        sparse_indices=torch.cat(indices) if indices else None,
        record_start=recorded[0].record_start,
        sampling_mask=SamplingMask.concat(masks) if masks else None,
        drafted=first.drafted + second.drafted,
        accepted=first.accepted + second.accepted,
        cached=turn.cached_tokens,
    )
