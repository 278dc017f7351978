"""Bound concurrent requests to the policy, and block them during a weight sync."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from megarl.engine.engine_protocol import Generation, Policy, StreamingPolicy, TokenCallback
from megarl.rollout.conversation import Halted
from megarl.types import Ids, SamplingMask, as_token_ids

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

    def __init__(self, policy: Policy, num_slots: int, halt: asyncio.Event) -> None:
        self.policy, self.num_slots, self.halt = policy, num_slots, halt
        self.free_slots = asyncio.Semaphore(num_slots)
        self.num_conversations = self.num_idle = self.num_requests = 0
        self.is_admitting = True
        self.changed = asyncio.Event()
        self.open = asyncio.Event()
        self.open.set()
        self._busy_seconds, self._counted_at = 0.0, time.monotonic()
        self._busy_interval: tuple[float, float] | None = None
        self._no_requests, self._no_conversations = asyncio.Event(), asyncio.Event()

    async def wait_for_room(self) -> bool:
        """Wait for room for another conversation; return False if all must stop."""
        while not self.halt.is_set():
            has_room = (
                self.num_conversations - self.num_idle < self.num_slots
                and self.num_conversations < OVERCOMMIT * self.num_slots
            )
            if has_room and self.is_admitting and self.open.is_set():
                return True
            self.changed.clear()
            await self.changed.wait()
        return False

    def open_slot(self) -> RequestSlot:
        self.num_conversations += 1
        return RequestSlot(self)

    def stop(self) -> None:
        self.halt.set()
        self.changed.set()

    def close(self) -> None:
        """Block new requests until `reopen`."""
        self.open.clear()

    def reopen(self) -> None:
        """Admit conversations and requests again, and continue aborted requests."""
        self.is_admitting = True
        self.open.set()
        self.changed.set()

    async def abort_requests(self) -> None:
        """Abort all requests and wait until the policy has returned their partial outputs. Close the gate first."""
        while self.num_requests:
            self._no_requests.clear()
            await self.policy.stop()
            await _wait_for_event(self._no_requests, _RETRY_S)  # then repeat: a request may have been in flight

    async def drain(self) -> None:
        """Wait until all conversations have ended; the caller must prevent new ones."""
        while self.num_conversations:
            self._no_conversations.clear()
            await self._no_conversations.wait()

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
        if not self.num_requests:
            self._no_requests.set()
        if not self.num_conversations:
            self._no_conversations.set()
        self.changed.set()


class RequestSlot:
    """The policy as seen by one conversation, which waits for a free slot.

    A request aborted by a weight sync continues with the new weights: its tokens are kept, and their keys and values
    are recomputed.
    """

    def __init__(self, gate: RequestGate) -> None:
        self._gate, self._is_idle, self._num_requests = gate, False, 0

    async def generate(self, ids: Ids | Sequence[int], params: dict[str, Any], routed: int = 0) -> Generation:
        return await self.stream(ids, params, routed)

    async def stream(
        self, ids: Ids | Sequence[int], params: dict[str, Any], routed: int = 0, on_tokens: TokenCallback | None = None
    ) -> Generation:
        self._num_requests += 1
        self._set_idle(is_idle=False)
        async with self._gate.free_slots:
            try:
                generation = await self._generate(ids, params, routed, on_tokens)
                while generation.finish_reason == "abort" and not self._gate.open.is_set():
                    generation = await self._continue(generation, ids, params, routed, on_tokens)
                return generation
            finally:
                self._num_requests -= 1
                self._set_idle(is_idle=not self._num_requests)  # an agent may send concurrent requests

    async def _generate(
        self, ids: Ids | Sequence[int], params: dict[str, Any], num_routed: int, on_tokens: TokenCallback | None
    ) -> Generation:
        gate = self._gate
        await gate.open.wait()
        if gate.halt.is_set():
            raise Halted
        gate.count_requests(1)
        try:
            if on_tokens is not None and isinstance(gate.policy, StreamingPolicy):
                return await gate.policy.stream(ids, params, num_routed, on_tokens)
            return await gate.policy.generate(ids, params, num_routed)
        finally:
            gate.count_requests(-1)

    async def _continue(
        self,
        generation: Generation,
        ids: Ids | Sequence[int],
        params: dict[str, Any],
        routed: int,
        on_tokens: TokenCallback | None,
    ) -> Generation:
        new_ids, budget = generation.token_ids, params["max_new_tokens"] - len(generation.token_ids)
        if len(new_ids) and int(new_ids[-1]) in params.get("stop_token_ids", ()):
            return replace(generation, finish_reason="stop", abort_reason="")  # it finished just before the abort
        if not budget:
            return replace(generation, finish_reason="length", abort_reason="")
        num_routed = routed + (0 if generation.routing is None else len(generation.routing))
        context = np.concatenate([as_token_ids(ids), new_ids])
        return merge_generations(
            generation, await self._generate(context, {**params, "max_new_tokens": budget}, num_routed, on_tokens)
        )

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
    """Join an aborted generation with its continuation.

    A token's routing comes from the request that ran it first, and `cached` from the request that wrote the first
    token.
    """
    spans = [span for span in (*_version_spans(first), *_version_spans(second)) if span[1]]
    versions: list[tuple[int, int]] = []
    for version, tokens in spans:
        previous_tokens = versions.pop()[1] if versions and versions[-1][0] == version else 0
        versions.append((version, previous_tokens + tokens))
    routings = [part for part in (first.routing, second.routing) if part is not None]
    masks = [part for part in (first.sampling_mask, second.sampling_mask) if part is not None]
    return replace(
        second,
        token_ids=np.concatenate([first.token_ids, second.token_ids]),
        logprobs=np.concatenate([first.logprobs, second.logprobs]),
        weight_version=versions[-1][0] if versions else second.weight_version,
        versions=tuple(versions) if len(versions) > 1 else (),
        routing=torch.cat(routings) if routings else None,
        sampling_mask=SamplingMask.concat(masks) if masks else None,
        drafted=first.drafted + second.drafted,
        accepted=first.accepted + second.accepted,
        cached=first.cached if len(first.token_ids) else second.cached,
    )


def _version_spans(generation: Generation) -> tuple[tuple[int, int], ...]:
    return generation.versions or ((generation.weight_version, len(generation.token_ids)),)


async def _wait_for_event(event: asyncio.Event, seconds: float) -> None:
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        pass
