"""One engine's share of a generation: groups are begun while it has room, and stopped when there are enough of them."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from megarl.rollout.client import Generation, Policy
from megarl.rollout.multi_turn import Halted, Surroundings, run_conversation, sample_seed, sampling_params
from megarl.rollout.partial import Partial
from megarl.rollout.queue import Tickets
from megarl.types import Ids, Prompt, Rollout, ids_of

_LOOK_S = 0.1
"""How often it is asked whether there are enough groups, and how often the policy is told again to stop."""
AHEAD = 2
"""Conversations that are under way at most over those that the engine has room for: tools are at work in the others."""

Group = tuple[Partial, ...]
"""All conversations of one prompt, by sample."""


@dataclass(frozen=True)
class Gathered:
    """rollouts: of groups that are complete, ordered by group, then by sample. partials: groups to go on with in a
    later step, on this engine. anew: conversations that were begun anew, for their first tokens were too old.

    slots: answers that the policy was asked for at once, at most. seconds: that it took. busy: how long it was asked
    for something, in seconds of one slot.
    """

    rollouts: list[Rollout]
    partials: list[Group]
    anew: int = 0
    slots: int = 0
    seconds: float = 0.0
    busy: float = 0.0


async def gather_rollouts(
    prompts: Sequence[Prompt],
    tickets: Tickets,
    policy: Policy,
    around: Surroundings,
    *,
    samples: int,
    greedy: bool,
    seed: int,
    first_group: int = 0,
    deadline: float | None = None,
    needed: int | None = None,
    carried: Sequence[Group] = (),
    version: int = 0,
) -> Gathered:
    """`samples` conversations of each prompt whose ticket this engine gets; ticket i is of prompt i, whose rollouts are
    of group `first_group + i`. A group is begun where the policy has room: it is asked for `config.concurrency` answers
    at once, or for an even share of all groups where that is less. While tools work there is room for others.

    needed: groups that are wanted of all engines. When so many are complete, all others are stopped as they are. Those
    that count are the first `needed` in the order in which the tickets were told of them, and their place in it takes
    the place of the prompt's number; what is complete after them is a partial, too, and counts at once in a later step.
    carried: partials to go on with, before a new group is begun; only where `needed` is given. version: of the policy's
    weights; a conversation with a token of weights more than `config.max_lag` versions older is begun anew.

    What is not done at `deadline`, in the event loop's time, is aborted, also if its turn has not come by then.
    """
    if carried and needed is None:
        raise ValueError("conversations are gone on with only where it is said how many groups are needed")

    around.halt.clear()
    start = time.monotonic()
    room = _Room(policy, max(1, min(around.config.concurrency, samples * tickets.share)), around.halt)
    left = deque(sorted(carried, key=lambda group: not _ended(group)))
    complete: dict[int, Group] = {}
    partials: list[Group] = []
    anew = 0

    async def next_group() -> tuple[int, Group] | None:
        nonlocal anew
        if left:
            group = left.popleft()
            old = [one.oldest is not None and version - one.oldest > around.config.max_lag for one in group]
            anew += sum(old)
            pairs = zip(group, old, strict=True)
            return 0, tuple(Partial.begin(one.prompt, one.seed) if is_old else one for one, is_old in pairs)
        number = await asyncio.to_thread(tickets.take)
        if number is None:
            return None
        prompt = prompts[number]
        if not len(prompt.token_ids):
            prompt = replace(prompt, token_ids=ids_of(around.chat.render(prompt)))
        seeds = [sample_seed(seed, first_group + number, sample) for sample in range(samples)]
        return number, tuple(Partial.begin(prompt, own) for own in seeds)

    async def converse(begun: Partial, seat: _Seat) -> Partial:
        params = sampling_params(around.config, around.chat, greedy, begun.seed)
        try:
            return await run_conversation(begun, seat, around, params, deadline)
        finally:
            seat.leave()

    async def work(number: int, begun: Group, seats: dict[int, _Seat]) -> None:
        async with asyncio.TaskGroup() as own:
            tasks = {sample: own.create_task(converse(begun[sample], seat)) for sample, seat in seats.items()}
        group = tuple(tasks[sample].result() if sample in tasks else one for sample, one in enumerate(begun))
        if not _ended(group):
            partials.append(group)
            return
        if needed is not None:
            number = await asyncio.to_thread(tickets.finish)
            if number + 1 >= needed:
                room.stop()
            if number >= needed:
                partials.append(group)
                return
        complete[number] = group

    try:
        async with asyncio.TaskGroup() as together:
            watching = None if needed is None else together.create_task(_stop_when_enough(tickets, needed, room))
            tasks = []
            while await room.is_there() and (found := await next_group()) is not None:
                number, begun = found
                seats = {sample: room.seat() for sample, one in enumerate(begun) if one.status is None}
                tasks.append(together.create_task(work(number, begun, seats)))
            if tasks:
                await asyncio.wait(tasks)
            if watching is not None:
                watching.cancel()
    except BaseExceptionGroup as failed:
        raise _first(failed) from None
    rollouts = [one.rollout(first_group + number) for number in sorted(complete) for one in complete[number]]
    return Gathered(rollouts, [*partials, *left], anew, room.size, time.monotonic() - start, room.busy)


def _ended(group: Group) -> bool:
    return all(one.status is not None for one in group)


def _first(error: BaseException) -> BaseException:
    """Of errors at the same time, in tasks of tasks."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


async def _stop_when_enough(tickets: Tickets, needed: int, room: _Room) -> None:
    """Stop all conversations when so many groups are complete, here or elsewhere, and see to it that they do."""
    while not room.halt.is_set():
        try:
            async with asyncio.timeout(_LOOK_S):
                await room.halt.wait()
        except TimeoutError:
            if await asyncio.to_thread(tickets.finished) >= needed:
                room.stop()
    while True:  # again, for a request may have been on its way
        if room.asking:
            await room.policy.stop()
        await asyncio.sleep(_LOOK_S)


class _Room:
    """For how many conversations the policy has room, which are under way, and which of these do not need it now."""

    def __init__(self, policy: Policy, size: int, halt: asyncio.Event) -> None:
        self.policy, self.size, self.halt = policy, size, halt
        self.free = asyncio.Semaphore(size)
        self.begun = self.away = self.asking = 0
        self.busy = 0.0
        self.changed = asyncio.Event()

    async def is_there(self) -> bool:
        """Wait until there is room for another conversation; False where all are to stop."""
        while not self.halt.is_set():
            if self.begun - self.away < self.size and self.begun < AHEAD * self.size:
                return True
            self.changed.clear()
            await self.changed.wait()
        return False

    def seat(self) -> _Seat:
        self.begun += 1
        return _Seat(self)

    def stop(self) -> None:
        self.halt.set()
        self.changed.set()


class _Seat:
    """The policy as one conversation has it, which waits for its turn."""

    def __init__(self, room: _Room) -> None:
        self._room, self._away = room, False

    async def generate(self, ids: Ids | Sequence[int], params: dict[str, Any], routed: int = 0) -> Generation:
        room = self._room
        self._go(away=False)
        async with room.free:
            if room.halt.is_set():
                raise Halted
            room.asking += 1
            asked = time.monotonic()
            try:
                return await room.policy.generate(ids, params, routed)
            finally:
                room.asking -= 1
                room.busy += time.monotonic() - asked
                self._go(away=True)

    def leave(self) -> None:
        self._go(away=False)
        self._room.begun -= 1

    def _go(self, away: bool) -> None:
        self._room.away += away - self._away
        self._away = away
        self._room.changed.set()

    async def stop(self) -> None:
        await self._room.policy.stop()
