"""Who may ask the policy for something now: so many at once, nobody while its weights are replaced."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from megarl.engine.generation import Generation, Policy, StreamingPolicy, TokenCallback
from megarl.rollout.conversation import Halted
from megarl.types import Ids, SamplingMask, as_token_ids

_RETRY_S = 0.1
"""How often the policy is told again to stop."""
OVERCOMMIT = 2
"""Conversations that are under way at most over those that the engine has room for: tools are at work in the others."""


class RequestGate:
    """For how many conversations the policy has room, which are under way, and which of these do not need it now.

    admits: whether conversations may be begun.
    """

    def __init__(self, policy: Policy, size: int, halt: asyncio.Event) -> None:
        self.policy, self.num_slots, self.halt = policy, size, halt
        self.free_slots = asyncio.Semaphore(size)
        self.num_conversations = self.num_idle = self.num_requests = 0
        self.is_admitting = True
        self.changed = asyncio.Event()
        self.open = asyncio.Event()
        self.open.set()
        self._busy_seconds, self._counted_at = 0.0, time.monotonic()
        self._busy_interval: tuple[float, float] | None = None
        self._no_requests, self._no_conversations = asyncio.Event(), asyncio.Event()

    async def wait_for_room(self) -> bool:
        """Wait until there is room for another conversation; False where all are to stop."""
        while not self.halt.is_set():
            free = (
                self.num_conversations - self.num_idle < self.num_slots
                and self.num_conversations < OVERCOMMIT * self.num_slots
            )
            if free and self.is_admitting and self.open.is_set():
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
        """Nothing more is asked of the policy until `reopen`."""
        self.open.clear()

    def reopen(self) -> None:
        """Conversations are begun again, and seats go on, with what was cut off, too."""
        self.is_admitting = True
        self.open.set()
        self.changed.set()

    async def abort_requests(self) -> None:
        """Return when the policy has answered all that it was asked, as far as it is written; close the room first."""
        while self.num_requests:
            self._no_requests.clear()
            await self.policy.stop()
            await _wait_for_event(self._no_requests, _RETRY_S)  # then again, for a request may have been on its way

    async def drain(self) -> None:
        """Return when all conversations are over; see to it that none is begun."""
        while self.num_conversations:
            self._no_conversations.clear()
            await self._no_conversations.wait()

    def measure_busy_seconds(self) -> float:
        """Seconds that the policy was asked for something, added up over what it was asked for at the same time."""
        self.count_requests(0)
        return self._busy_seconds

    def pop_busy_interval(self) -> tuple[float, float] | None:
        """From when to when it was asked for something since the last call; None for never."""
        self.count_requests(0)
        found, self._busy_interval = self._busy_interval, None
        return found

    def count_requests(self, more: int) -> None:
        """So many more ask."""
        now = time.monotonic()
        if self.num_requests:
            self._busy_seconds += self.num_requests * (now - self._counted_at)
            self._busy_interval = (self._busy_interval or (self._counted_at, now))[0], now
        self.num_requests, self._counted_at = self.num_requests + more, now
        self.notify()

    def notify(self) -> None:
        """Something has changed."""
        if not self.num_requests:
            self._no_requests.set()
        if not self.num_conversations:
            self._no_conversations.set()
        self.changed.set()


class RequestSlot:
    """The policy as one conversation has it, which waits for its turn. An answer that is cut off, since the weights are
    replaced, is gone on with by the new ones: with the tokens that it had, whose keys and values are computed anew."""

    def __init__(self, room: RequestGate) -> None:
        self._gate, self._is_idle, self._num_requests = room, False, 0

    async def generate(self, ids: Ids | Sequence[int], params: dict[str, Any], routed: int = 0) -> Generation:
        return await self.stream(ids, params, routed)

    async def stream(
        self, ids: Ids | Sequence[int], params: dict[str, Any], routed: int = 0, heard: TokenCallback | None = None
    ) -> Generation:
        self._num_requests += 1
        self._set_idle(away=False)
        async with self._gate.free_slots:
            try:
                said = await self._generate(ids, params, routed, heard)
                while said.finish_reason == "abort" and not self._gate.open.is_set():
                    said = await self._continue(said, ids, params, routed, heard)
                return said
            finally:
                self._num_requests -= 1
                self._set_idle(away=not self._num_requests)  # an agent may ask for several things at once

    async def _generate(
        self, ids: Ids | Sequence[int], params: dict[str, Any], routed: int, heard: TokenCallback | None
    ) -> Generation:
        room = self._gate
        await room.open.wait()
        if room.halt.is_set():
            raise Halted
        room.count_requests(1)
        try:
            if heard is not None and isinstance(room.policy, StreamingPolicy):
                return await room.policy.stream(ids, params, routed, heard)
            return await room.policy.generate(ids, params, routed)
        finally:
            room.count_requests(-1)

    async def _continue(
        self,
        said: Generation,
        ids: Ids | Sequence[int],
        params: dict[str, Any],
        routed: int,
        heard: TokenCallback | None,
    ) -> Generation:
        written, budget = said.token_ids, params["max_new_tokens"] - len(said.token_ids)
        if len(written) and int(written[-1]) in params.get("stop_token_ids", ()):
            return replace(said, finish_reason="stop", abort_reason="")  # it was done at that moment
        if not budget:
            return replace(said, finish_reason="length", abort_reason="")
        known = routed + (0 if said.routing is None else len(said.routing))
        context = np.concatenate([as_token_ids(ids), written])
        return merge_generations(
            said, await self._generate(context, {**params, "max_new_tokens": budget}, known, heard)
        )

    def mark_idle(self) -> None:
        """The conversation does not need the policy now, until it asks."""
        self._set_idle(away=True)

    def release(self) -> None:
        self._gate.num_conversations -= 1
        self._set_idle(away=False)

    def _set_idle(self, away: bool) -> None:
        self._gate.num_idle += away - self._is_idle
        self._is_idle = away
        self._gate.notify()

    async def stop(self) -> None:
        await self._gate.policy.stop()


def merge_generations(said: Generation, more: Generation) -> Generation:
    """An answer that was cut off, with what followed. A token's routing is of the request that ran it first; what was
    cached is of the one that wrote the first token."""
    runs = [run for run in (*_version_spans(said), *_version_spans(more)) if run[1]]
    versions: list[tuple[int, int]] = []
    for version, tokens in runs:
        before = versions.pop()[1] if versions and versions[-1][0] == version else 0
        versions.append((version, before + tokens))
    records = [part for part in (said.routing, more.routing) if part is not None]
    supports = [part for part in (said.sampling_mask, more.sampling_mask) if part is not None]
    return replace(
        more,
        token_ids=np.concatenate([said.token_ids, more.token_ids]),
        logprobs=np.concatenate([said.logprobs, more.logprobs]),
        weight_version=versions[-1][0] if versions else more.weight_version,
        versions=tuple(versions) if len(versions) > 1 else (),
        routing=torch.cat(records) if records else None,
        sampling_mask=SamplingMask.concat(supports) if supports else None,
        drafted=said.drafted + more.drafted,
        accepted=said.accepted + more.accepted,
        cached=said.cached if len(said.token_ids) else more.cached,
    )


def _version_spans(said: Generation) -> tuple[tuple[int, int], ...]:
    return said.versions or ((said.weight_version, len(said.token_ids)),)


async def _wait_for_event(event: asyncio.Event, seconds: float) -> None:
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        pass
