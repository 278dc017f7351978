"""Generation that goes on while models are trained: an engine's share of the groups of this step and of later ones.

Groups have numbers, through all steps. They are admitted step by step, as far ahead as they may be begun by the weights
of now; an engine begins the next one whenever it has room, and a step takes its own when they are complete.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any

from megarl.config import OnPush
from megarl.engine.engine_loss import EngineLost
from megarl.engine.generation import Policy
from megarl.rollout.conversation import Surroundings
from megarl.rollout.group_queue import Tickets
from megarl.rollout.partial_rollouts import Partial
from megarl.rollout.request_gate import Room, Seat
from megarl.rollout.scheduler import (
    Gathered,
    Group,
    Returned,
    Whole,
    at_their_beginning,
    begin_group,
    carry_on,
    first_of,
    lost_in,
    nothing_to_watch,
    rollouts_of,
    take_seats,
)
from megarl.types import Prompt

_LOOK_S = 0.05
"""How often it is asked whether a step's groups are complete, on whichever engine."""
_BACK_S = 0.5
"""How often an engine that has room looks for what another, which is lost, has given back."""

AtWork = Callable[[float, float], None]
"""Told from when to when the engine had something to do, in time.monotonic's seconds."""


class Stream:
    """All of it is for one event loop, in which `run` goes on.

    tickets: without an end, shared by the engines. groups: that it has room for at once, with so many samples each;
    `config.concurrency` bounds it, too. seconds: that a conversation may take. lost: is told where the engine is lost.
    """

    def __init__(
        self,
        tickets: Tickets,
        policy: Policy,
        around: Surroundings,
        *,
        samples: int,
        groups: int,
        seconds: float,
        at_work: AtWork = lambda began, ended: None,
        lost: Callable[[EngineLost], None] = lambda lost: None,
    ) -> None:
        self._tickets, self._around = tickets, around
        self._samples, self._seconds, self._at_work, self._tell_lost = samples, seconds, at_work, lost
        self._room = Room(policy, max(1, min(around.config.concurrency, samples * groups)), around.halt)
        self._admitted: dict[int, tuple[Prompt, int, int]] = {}
        """By number: the prompt, the seed of its step, and which group of the step it is."""
        self._limit = self._handed = 0
        self._waiting: dict[int, Returned] = {}
        """What this engine is to begin when it is admitted, by number."""
        self._begun: dict[int, list[Partial]] = {}
        self._complete: dict[int, Group] = {}
        self._mine: dict[int, float] = {}
        """When each of this engine's groups was begun, of those that no step has taken."""
        self._counting = Whole()
        self.is_lost = False
        """Whether its engine is, and `renew` has not been called since."""
        self._gone = self._again = 0
        self._news = asyncio.Condition()
        self._looked, self._busy = time.monotonic(), 0.0

    async def admit(self, prompts: Sequence[Prompt], seed: int) -> None:
        """The groups of a further step may be begun; their seeds are those that the step's own would have."""
        for group, prompt in enumerate(prompts):
            self._admitted[self._limit + group] = prompt, seed, group
        self._limit += len(prompts)
        await self._tell()

    async def run(self, watch: Callable[[], Coroutine[Any, Any, None]] = nothing_to_watch) -> None:
        """Begin what is admitted, until this is cancelled. Returns where the engine is lost, as the policy or `watch`
        say by EngineLost: what is complete stays, all else is given back, for whichever engine has room."""
        try:
            async with asyncio.TaskGroup() as talks:
                talks.create_task(watch())
                while await self._room.is_there():
                    await self._counting.do(self._look_for_more())
                    if (number := min(self._waiting, default=self._limit)) >= self._limit:
                        await self._hear()
                        continue
                    await self._room.is_there()  # a pause may have begun meanwhile
                    prompt, seed, group = self._admitted[number]
                    waiting = self._waiting.pop(number)
                    begun = waiting.group or begin_group(prompt, self._around.chat, seed, group, self._samples)
                    self._again += waiting.gone
                    self._begun[number], self._mine[number] = list(begun), time.monotonic()
                    talks.create_task(self._work(number, take_seats(begun, self._room)))
        except BaseExceptionGroup as failed:
            lost = lost_in(failed)
            if lost is None:
                raise first_of(failed) from None
            await self._lose(lost)

    async def renew(self, policy: Policy, around: Surroundings) -> None:
        """The engine is there again, as another policy: `run` may be called anew."""
        self._around = replace(around, halt=self._around.halt)
        self._room.policy, self.is_lost = policy, False
        await asyncio.to_thread(self._tickets.lost, -1)
        await self.resume()

    async def take(self, count: int) -> Gathered | None:
        """Of the next `count` groups those that are this engine's, in order, when all of these are complete, here or
        elsewhere. Their rollouts are numbered within the step, from 0 on. None where no engine is left."""
        first, last = self._handed, self._handed + count
        while await asyncio.to_thread(self._tickets.finished, first) < count:
            if self.is_lost and await asyncio.to_thread(self._tickets.lost) == self._tickets.engines:
                return None
            await asyncio.sleep(_LOOK_S)
        taken = sorted(number for number in self._complete if number < last)
        rollouts = [
            one for number in taken for one in rollouts_of(self._complete.pop(number), self._admitted[number][2])
        ]
        now = time.monotonic()
        ages = tuple(now - self._mine.pop(number) for number in taken)
        for number in range(self._handed, last):
            del self._admitted[number]
        self._handed = last
        (before, self._looked), (was, self._busy) = (self._looked, now), (self._busy, self._room.busy())
        (gone, self._gone), (again, self._again) = (self._gone, 0), (self._again, 0)
        slots, seconds = self._room.size, now - before
        busy = self._busy - was
        return Gathered(rollouts, [], slots=slots, seconds=seconds, busy=busy, ages=ages, gone=gone, again=again)

    async def pause(self, how: OnPush) -> None:
        """Have the policy free for other weights: nothing is begun until `resume`. What is under way is cut off, and
        gone on with then; or stays as it is, in an engine that pauses itself; or is waited for. An engine that is lost
        is free."""
        if how == "wait":
            self._room.admits = False
            await self._room.empty()
        else:
            self._room.close()
            if how == "retract":
                try:
                    await self._room.cut_off()
                except EngineLost as lost:
                    self._tell_lost(lost)
                    async with self._news:
                        await self._news.wait_for(lambda: self.is_lost)
        if (worked := self._room.worked()) is not None:
            self._at_work(*worked)

    async def resume(self) -> None:
        self._room.reopen()

    async def _look_for_more(self) -> None:
        """Get a group to begin: one that a lost engine has given back, else one that nobody has begun."""
        back: Returned | None = await asyncio.to_thread(self._tickets.take_back)
        if back is not None:
            self._waiting[back.number] = back
        elif not self._waiting:
            number = await asyncio.to_thread(self._tickets.take)
            assert number is not None, "the tickets of a stream have no end"
            self._waiting[number] = Returned(number, None)

    async def _work(self, number: int, seats: dict[int, Seat]) -> None:
        deadline = asyncio.get_running_loop().time() + self._seconds
        group = self._begun[number]
        await carry_on(group, seats, self._around, greedy=False, deadline=deadline)
        await self._counting.do(self._finish(number))

    async def _finish(self, number: int) -> None:
        self._complete[number] = tuple(self._begun.pop(number))
        await asyncio.to_thread(self._tickets.finish, number - self._admitted[number][2])

    async def _lose(self, lost: EngineLost) -> None:
        self._tell_lost(lost)
        await self._counting.end()
        for number, begun in self._begun.items():
            group = at_their_beginning(begun)
            gone = sum(one.status is None for one in group)
            self._gone += gone
            await asyncio.to_thread(self._tickets.give_back, Returned(number, group, gone))
            del self._mine[number]
        for waiting in self._waiting.values():
            await asyncio.to_thread(self._tickets.give_back, waiting)
        self._begun, self._waiting = {}, {}
        await asyncio.to_thread(self._tickets.lost, 1)
        self.is_lost = True
        await self._tell()

    async def _hear(self) -> None:
        """Wait for news, or for as long as it takes until something may have been given back."""
        try:
            async with asyncio.timeout(_BACK_S), self._news:
                await self._news.wait_for(lambda: min(self._waiting, default=self._limit) < self._limit)
        except TimeoutError:
            pass

    async def _tell(self) -> None:
        async with self._news:
            self._news.notify_all()
