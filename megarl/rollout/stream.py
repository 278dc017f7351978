"""Generation that goes on while models are trained: an engine's share of the groups of this step and of later ones.

Groups have numbers, through all steps. They are admitted step by step, as far ahead as they may be begun by the weights
of now; an engine begins the next one whenever it has room, and a step takes its own when they are complete.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from megarl.config import OnPush
from megarl.rollout.client import Policy
from megarl.rollout.gathering import Gathered, Group, begin_group, carry_on, first_of, rollouts_of, take_seats
from megarl.rollout.multi_turn import Surroundings
from megarl.rollout.queue import Tickets
from megarl.rollout.room import Room, Seat
from megarl.types import Prompt

_LOOK_S = 0.05
"""How often it is asked whether the last group of a step has been begun, by whichever engine."""

AtWork = Callable[[float, float], None]
"""Told from when to when the engine had something to do, in time.monotonic's seconds."""


class Stream:
    """All of it is for one event loop, in which `run` goes on.

    tickets: without an end, shared by the engines. groups: that it has room for at once, with so many samples each;
    `config.concurrency` bounds it, too. seconds: that a conversation may take.
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
    ) -> None:
        self._tickets, self._around = tickets, around
        self._samples, self._seconds, self._at_work = samples, seconds, at_work
        self._room = Room(policy, max(1, min(around.config.concurrency, samples * groups)), around.halt)
        self._admitted: dict[int, tuple[Prompt, int, int]] = {}
        """By number: the prompt, the seed of its step, and which group of the step it is."""
        self._limit = self._handed = 0
        self._mine: dict[int, float] = {}
        """When each of this engine's groups was begun, of those that no step has taken; before that, when it got it."""
        self._asks = False
        """Whether it is being told which group is its next."""
        self._complete: dict[int, Group] = {}
        self._news = asyncio.Condition()
        self._looked, self._busy = time.monotonic(), 0.0

    async def admit(self, prompts: Sequence[Prompt], seed: int) -> None:
        """The groups of a further step may be begun; their seeds are those that the step's own would have."""
        for group, prompt in enumerate(prompts):
            self._admitted[self._limit + group] = prompt, seed, group
        self._limit += len(prompts)
        await self._tell()

    async def run(self) -> None:
        """Begin what is admitted, until this is cancelled. Raises RuntimeError where the engine fails."""
        try:
            async with asyncio.TaskGroup() as talks:
                while await self._room.is_there():
                    number = await self._next()
                    await self._room.is_there()  # a pause may have begun meanwhile
                    prompt, seed, group = self._admitted[number]
                    begun = begin_group(prompt, self._around.chat, seed, group, self._samples)
                    self._mine[number] = time.monotonic()
                    talks.create_task(self._work(number, begun, take_seats(begun, self._room)))
        except BaseExceptionGroup as failed:
            raise first_of(failed) from None

    async def take(self, count: int) -> Gathered:
        """Of the next `count` groups those that are this engine's, in order, when all of these are complete. Their
        rollouts are numbered within the step, from 0 on."""
        last = self._handed + count
        while await asyncio.to_thread(self._tickets.taken) < last:
            await asyncio.sleep(_LOOK_S)
        async with self._news:
            await self._news.wait_for(lambda: not self._asks and self._are_complete(last))
        taken = sorted(number for number in self._mine if number < last)
        rollouts = [
            one for number in taken for one in rollouts_of(self._complete.pop(number), self._admitted[number][2])
        ]
        now = time.monotonic()
        ages = tuple(now - self._mine.pop(number) for number in taken)
        for number in range(self._handed, last):
            del self._admitted[number]
        self._handed = last
        (before, self._looked), (was, self._busy) = (self._looked, now), (self._busy, self._room.busy())
        busy = self._busy - was
        return Gathered(rollouts, [], slots=self._room.size, seconds=now - before, busy=busy, ages=ages)

    async def pause(self, how: OnPush) -> None:
        """Have the policy free for other weights: nothing is begun until `resume`. What is under way is cut off, and
        gone on with then; or stays as it is, in an engine that pauses itself; or is waited for."""
        if how == "wait":
            self._room.admits = False
            await self._room.empty()
        else:
            self._room.close()
            if how == "retract":
                await self._room.cut_off()
        if (worked := self._room.worked()) is not None:
            self._at_work(*worked)

    async def resume(self) -> None:
        self._room.reopen()

    async def _next(self) -> int:
        """The number of the next group, which is this engine's, when it is admitted."""
        self._asks = True
        number = await asyncio.to_thread(self._tickets.take)
        assert number is not None, "the tickets of a stream have no end"
        self._mine[number], self._asks = time.monotonic(), False
        await self._tell()
        async with self._news:
            await self._news.wait_for(lambda: number < self._limit)
        return number

    async def _work(self, number: int, begun: Group, seats: dict[int, Seat]) -> None:
        deadline = asyncio.get_running_loop().time() + self._seconds
        self._complete[number] = await carry_on(begun, seats, self._around, greedy=False, deadline=deadline)
        await self._tell()

    def _are_complete(self, last: int) -> bool:
        return all(number in self._complete for number in self._mine if number < last)

    async def _tell(self) -> None:
        async with self._news:
            self._news.notify_all()
