"""Who may ask the policy for something now: so many at once, nobody while its weights are replaced."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from megarl.engine.generation import Generation, Heard, Policy, Streams
from megarl.rollout.conversation import Halted
from megarl.types import Ids, Support, ids_of

_AGAIN_S = 0.1
"""How often the policy is told again to stop."""
AHEAD = 2
"""Conversations that are under way at most over those that the engine has room for: tools are at work in the others."""


class Room:
    """For how many conversations the policy has room, which are under way, and which of these do not need it now.

    admits: whether conversations may be begun.
    """

    def __init__(self, policy: Policy, size: int, halt: asyncio.Event) -> None:
        self.policy, self.size, self.halt = policy, size, halt
        self.free = asyncio.Semaphore(size)
        self.begun = self.away = self.asking = 0
        self.admits = True
        self.changed = asyncio.Event()
        self.open = asyncio.Event()
        self.open.set()
        self._busy, self._counted = 0.0, time.monotonic()
        self._worked: tuple[float, float] | None = None
        self._none_asking, self._none_begun = asyncio.Event(), asyncio.Event()

    async def is_there(self) -> bool:
        """Wait until there is room for another conversation; False where all are to stop."""
        while not self.halt.is_set():
            free = self.begun - self.away < self.size and self.begun < AHEAD * self.size
            if free and self.admits and self.open.is_set():
                return True
            self.changed.clear()
            await self.changed.wait()
        return False

    def seat(self) -> Seat:
        self.begun += 1
        return Seat(self)

    def stop(self) -> None:
        self.halt.set()
        self.changed.set()

    def close(self) -> None:
        """Nothing more is asked of the policy until `reopen`."""
        self.open.clear()

    def reopen(self) -> None:
        """Conversations are begun again, and seats go on, with what was cut off, too."""
        self.admits = True
        self.open.set()
        self.changed.set()

    async def cut_off(self) -> None:
        """Return when the policy has answered all that it was asked, as far as it is written; close the room first."""
        while self.asking:
            self._none_asking.clear()
            await self.policy.stop()
            await _within(self._none_asking, _AGAIN_S)  # then again, for a request may have been on its way

    async def empty(self) -> None:
        """Return when all conversations are over; see to it that none is begun."""
        while self.begun:
            self._none_begun.clear()
            await self._none_begun.wait()

    def busy(self) -> float:
        """Seconds that the policy was asked for something, added up over what it was asked for at the same time."""
        self.count(0)
        return self._busy

    def worked(self) -> tuple[float, float] | None:
        """From when to when it was asked for something since the last call; None for never."""
        self.count(0)
        found, self._worked = self._worked, None
        return found

    def count(self, more: int) -> None:
        """So many more ask."""
        now = time.monotonic()
        if self.asking:
            self._busy += self.asking * (now - self._counted)
            self._worked = (self._worked or (self._counted, now))[0], now
        self.asking, self._counted = self.asking + more, now
        self.tell()

    def tell(self) -> None:
        """Something has changed."""
        if not self.asking:
            self._none_asking.set()
        if not self.begun:
            self._none_begun.set()
        self.changed.set()


class Seat:
    """The policy as one conversation has it, which waits for its turn. An answer that is cut off, since the weights are
    replaced, is gone on with by the new ones: with the tokens that it had, whose keys and values are computed anew."""

    def __init__(self, room: Room) -> None:
        self._room, self._away, self._asks = room, False, 0

    async def generate(self, ids: Ids | Sequence[int], params: dict[str, Any], routed: int = 0) -> Generation:
        return await self.stream(ids, params, routed)

    async def stream(
        self, ids: Ids | Sequence[int], params: dict[str, Any], routed: int = 0, heard: Heard | None = None
    ) -> Generation:
        self._asks += 1
        self._go(away=False)
        async with self._room.free:
            try:
                said = await self._ask(ids, params, routed, heard)
                while said.finish == "abort" and not self._room.open.is_set():
                    said = await self._go_on(said, ids, params, routed, heard)
                return said
            finally:
                self._asks -= 1
                self._go(away=not self._asks)  # an agent may ask for several things at once

    async def _ask(
        self, ids: Ids | Sequence[int], params: dict[str, Any], routed: int, heard: Heard | None
    ) -> Generation:
        room = self._room
        await room.open.wait()
        if room.halt.is_set():
            raise Halted
        room.count(1)
        try:
            if heard is not None and isinstance(room.policy, Streams):
                return await room.policy.stream(ids, params, routed, heard)
            return await room.policy.generate(ids, params, routed)
        finally:
            room.count(-1)

    async def _go_on(
        self, said: Generation, ids: Ids | Sequence[int], params: dict[str, Any], routed: int, heard: Heard | None
    ) -> Generation:
        written, budget = said.token_ids, params["max_new_tokens"] - len(said.token_ids)
        if len(written) and int(written[-1]) in params.get("stop_token_ids", ()):
            return replace(said, finish="stop", reason="")  # it was done at that moment
        if not budget:
            return replace(said, finish="length", reason="")
        known = routed + (0 if said.routing is None else len(said.routing))
        context = np.concatenate([ids_of(ids), written])
        return joined(said, await self._ask(context, {**params, "max_new_tokens": budget}, known, heard))

    def rest(self) -> None:
        """The conversation does not need the policy now, until it asks."""
        self._go(away=True)

    def leave(self) -> None:
        self._room.begun -= 1
        self._go(away=False)

    def _go(self, away: bool) -> None:
        self._room.away += away - self._away
        self._away = away
        self._room.tell()

    async def stop(self) -> None:
        await self._room.policy.stop()


def joined(said: Generation, more: Generation) -> Generation:
    """An answer that was cut off, with what followed. A token's routing is of the request that ran it first; what was
    cached is of the one that wrote the first token."""
    runs = [run for run in (*_runs(said), *_runs(more)) if run[1]]
    versions: list[tuple[int, int]] = []
    for version, tokens in runs:
        before = versions.pop()[1] if versions and versions[-1][0] == version else 0
        versions.append((version, before + tokens))
    records = [part for part in (said.routing, more.routing) if part is not None]
    supports = [part for part in (said.support, more.support) if part is not None]
    return replace(
        more,
        token_ids=np.concatenate([said.token_ids, more.token_ids]),
        logprobs=np.concatenate([said.logprobs, more.logprobs]),
        weight_version=versions[-1][0] if versions else more.weight_version,
        versions=tuple(versions) if len(versions) > 1 else (),
        routing=torch.cat(records) if records else None,
        support=Support.joined(supports) if supports else None,
        drafted=said.drafted + more.drafted,
        accepted=said.accepted + more.accepted,
        cached=said.cached if len(said.token_ids) else more.cached,
    )


def _runs(said: Generation) -> tuple[tuple[int, int], ...]:
    return said.versions or ((said.weight_version, len(said.token_ids)),)


async def _within(event: asyncio.Event, seconds: float) -> None:
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        pass
