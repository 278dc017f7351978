"""One engine's share of a generation: groups are begun while it has room, and stopped when there are enough of them."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from megarl.rollout.chat import Chat
from megarl.rollout.client import Policy
from megarl.rollout.multi_turn import Surroundings, run_conversation, sample_seed, sampling_params
from megarl.rollout.partial import Partial
from megarl.rollout.queue import Tickets
from megarl.rollout.room import Room, Seat
from megarl.types import Prompt, Rollout, ids_of

_LOOK_S = 0.1
"""How often it is asked whether there are enough groups, and how often the policy is told again to stop."""

Group = tuple[Partial, ...]
"""All conversations of one prompt, by sample."""


@dataclass(frozen=True)
class Gathered:
    """rollouts: of groups that are complete, ordered by group, then by sample. partials: groups to go on with in a
    later step, on this engine. anew: conversations that were begun anew, for their first tokens were too old.

    slots: answers that the policy was asked for at once, at most. seconds: that it took. busy: how long it was asked
    for something, in seconds of one slot. ages: of a stream, the seconds since each of the groups was begun.
    """

    rollouts: list[Rollout]
    partials: list[Group]
    anew: int = 0
    slots: int = 0
    seconds: float = 0.0
    busy: float = 0.0
    ages: tuple[float, ...] = ()


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
    room = Room(policy, max(1, min(around.config.concurrency, samples * tickets.share)), around.halt)
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
            return 0, tuple(one.anew() if is_old else one for one, is_old in pairs)
        number = await asyncio.to_thread(tickets.take)
        if number is None:
            return None
        return number, begin_group(prompts[number], around.chat, seed, first_group + number, samples)

    async def work(number: int, begun: Group, seats: dict[int, Seat]) -> None:
        group = await carry_on(begun, seats, around, greedy, deadline)
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
                tasks.append(together.create_task(work(number, begun, take_seats(begun, room))))
            if tasks:
                await asyncio.wait(tasks)
            if watching is not None:
                watching.cancel()
    except BaseExceptionGroup as failed:
        raise first_of(failed) from None
    rollouts = [one.rollout(first_group + number) for number in sorted(complete) for one in complete[number]]
    return Gathered(rollouts, [*partials, *left], anew, room.size, time.monotonic() - start, room.busy())


def begin_group(prompt: Prompt, chat: Chat, seed: int, group: int, samples: int) -> Group:
    """Of a prompt that is rendered or not, with the seeds of this group's samples."""
    if not len(prompt.token_ids):
        prompt = replace(prompt, token_ids=ids_of(chat.render(prompt)))
    return tuple(Partial.begin(prompt, sample_seed(seed, group, sample)) for sample in range(samples))


def take_seats(group: Group, room: Room) -> dict[int, Seat]:
    """One for each conversation that has not ended, by its sample."""
    return {sample: room.seat() for sample, one in enumerate(group) if one.status is None}


async def carry_on(
    begun: Group, seats: dict[int, Seat], around: Surroundings, greedy: bool, deadline: float | None
) -> Group:
    """The group, when its conversations have come as far as they come, side by side."""

    async def converse(one: Partial, seat: Seat) -> Partial:
        params = sampling_params(around.config, around.chat, greedy, one.seed)
        if one.session is None and around.chat.known.environments:
            seat.rest()  # a reset may take a while
        try:
            done = await run_conversation(one, seat, around, params, deadline)
        finally:
            seat.leave()
        if done.status not in (None, "aborted"):
            around.ended(done.rollout(0))
        return done

    async with asyncio.TaskGroup() as own:
        tasks = {sample: own.create_task(converse(begun[sample], seat)) for sample, seat in seats.items()}
    return tuple(tasks[sample].result() if sample in tasks else one for sample, one in enumerate(begun))


def _ended(group: Group) -> bool:
    return all(one.status is not None for one in group)


def first_of(error: BaseException) -> BaseException:
    """Of errors at the same time, in tasks of tasks."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


async def _stop_when_enough(tickets: Tickets, needed: int, room: Room) -> None:
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
