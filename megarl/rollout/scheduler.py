"""Schedule one engine's share of a generation: start groups while the engine has capacity, stop when enough are
complete.

`run_agent` runs one episode of an agent, a client of the policy in its own process, and collects what its session
recorded.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megarl.chat_format.chat_template import Chat
from megarl.engine.engine_loss import EngineLost
from megarl.engine.generation import Policy
from megarl.environments.protocol import SessionLost
from megarl.rollout.aborted import TooManyAborted, too_many
from megarl.rollout.conversation import Surroundings, run_conversation, sample_seed, sampling_params
from megarl.rollout.group_queue import Tickets
from megarl.rollout.partial_rollouts import Partial
from megarl.rollout.request_gate import Room, Seat
from megarl.types import Failed, Prompt, Rollout, Verdict, ids_of
from megarl.types.reward_values import RewardError, reward_of


async def run_agent(
    begun: Partial, policy: Policy, around: Surroundings, params: dict[str, Any], deadline: float | None = None
) -> Partial:
    """Let an agent work on a prompt, until it returns; `before` are all branches of the episode but the last.

    params, deadline: as of `run_conversation`. It is `aborted` where the agent raises, its process dies, it asks the
    policy for nothing, is not done by `deadline`, or a request of it has failed.
    """
    loop = asyncio.get_running_loop()
    server = await around.agents()
    recording = server.open(begun.prompt, policy, params, deadline, begun.seed)
    limit = around.config.step_timeout if deadline is None else max(0.0, deadline - loop.time())
    value = None
    try:
        value = await around.sessions.run_agent(begun.prompt, recording.base_url, recording.key, limit)
    except SessionLost as error:
        recording.fail(str(error))
    finally:
        await server.close(recording)
    *before, last = recording.branches()
    if last.status == "aborted":
        return replace(last, before=tuple(before))
    return replace(last, before=tuple(before), verdict=_verdict(value, last))


def _verdict(value: Any, last: Partial) -> Verdict | None:
    """None where it has returned none: then others say what it was worth."""
    if value is None:
        return None
    try:
        return reward_of(value, sum(turn.is_action for turn in last.turns))
    except (RewardError, TypeError) as error:
        return Failed(f"the agent: {error}")


_LOOK_S = 0.1
"""How often it is asked whether there are enough groups, and how often the policy is told again to stop."""
_BACK_S = 0.5
"""How often an engine that has nothing more to begin looks for what another, which is lost, has given back."""

Group = tuple[Partial, ...]
"""All conversations of one prompt, by sample."""


@dataclass(frozen=True)
class Gathered:
    """rollouts: of groups that are complete, ordered by group, then by sample. partials: groups to go on with in a
    later step, on this engine. anew: conversations that were begun anew, for their first tokens were too old.

    slots: answers that the policy was asked for at once, at most. seconds: that it took. busy: how long it was asked
    for something, in seconds of one slot. ages: of a stream, the seconds since each of the groups was begun.

    lost: where the engine was lost, by what. gone: conversations that were under way there. again: those of lost
    engines that were begun anew on this one.
    """

    rollouts: list[Rollout]
    partials: list[Group]
    anew: int = 0
    slots: int = 0
    seconds: float = 0.0
    busy: float = 0.0
    ages: tuple[float, ...] = ()
    lost: EngineLost | None = None
    gone: int = 0
    again: int = 0

    def and_then(self, more: Gathered) -> Gathered:
        """With what the same engine, or the one in its place, has gathered since."""
        return Gathered(
            sorted([*self.rollouts, *more.rollouts], key=lambda one: one.group),
            [*self.partials, *more.partials],
            anew=self.anew + more.anew,
            slots=max(self.slots, more.slots),
            seconds=self.seconds + more.seconds,
            busy=self.busy + more.busy,
            ages=self.ages + more.ages,
            lost=more.lost,
            gone=self.gone + more.gone,
            again=self.again + more.again,
        )


@dataclass(frozen=True)
class Returned:
    """A group that an engine had begun when it was lost, without sessions. group: None where only its number was taken.
    gone: its conversations that were under way."""

    number: int
    group: Group | None
    gone: int = 0


async def nothing_to_watch() -> None:
    await asyncio.Event().wait()


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
    of: int | None = None,
    watch: Callable[[], Coroutine[Any, Any, None]] = nothing_to_watch,
    opened: Callable[[Room], None] = lambda room: None,
) -> Gathered:
    """`samples` conversations of each prompt whose ticket this engine gets; ticket i is of prompt i, whose rollouts are
    of group `first_group + i`. A group is begun where the policy has room: it is asked for `config.concurrency` answers
    at once, or for an even share of all groups where that is less. While tools work there is room for others.

    needed: groups that are wanted of all engines. When so many are complete, all others are stopped as they are. Those
    that count are the first `needed` in the order in which the tickets were told of them, and their place in it takes
    the place of the prompt's number; what is complete after them is a partial, too, and counts at once in a later step.
    carried: partials to go on with, before a new group is begun; only where `needed` is given. version: of the policy's
    weights; a conversation with a token of weights more than `config.max_lag` versions older is begun anew.

    of: rollouts of the generation, of all engines. When more than `config.max_aborted` of these are aborted while
    others are under way, TooManyAborted is raised; without it, and at the deadline, all are waited for.

    What is not done at `deadline`, in the event loop's time, is aborted, also if its turn has not come by then.

    watch: goes on meanwhile, and raises EngineLost where the engine is lost, as the policy may. What is complete then
    is returned; of all other groups the conversations that are done stay as they are, the rest are at their beginning
    again, and the tickets have them for whichever engine has room. Where enough are complete, they are partials.

    opened: is told of the room, for who replaces the policy's weights meanwhile closes it first.
    """
    if carried and needed is None:
        raise ValueError("conversations are gone on with only where it is said how many groups are needed")

    around.halt.clear()
    start = time.monotonic()
    room = Room(policy, max(1, min(around.config.concurrency, samples * tickets.share)), around.halt)
    opened(room)
    left = deque(sorted(carried, key=lambda group: not _ended(group)))
    complete: dict[int, Group] = {}
    partials: list[Group] = []
    begun: dict[int, tuple[int, list[Partial]]] = {}
    """Not complete yet, with their numbers, in the order in which they were begun."""
    anew = again = turn = 0
    counting = Whole()

    async def next_group() -> None:
        nonlocal anew, again, turn
        number: int | None = 0
        group: Group
        if left:
            group = left.popleft()
            old = [one.oldest is not None and version - one.oldest > around.config.max_lag for one in group]
            anew += sum(old)
            pairs = zip(group, old, strict=True)
            group = tuple(one.anew() if is_old else one for one, is_old in pairs)
        elif (back := await asyncio.to_thread(tickets.take_back)) is not None:
            again += back.gone
            number, group = back.number, back.group
        elif (number := await asyncio.to_thread(tickets.take)) is not None:
            group = begin_group(prompts[number], around.chat, seed, first_group + number, samples)
        else:
            return
        assert number is not None
        turn += 1
        begun[turn] = number, list(group)

    async def finish(number: int, group: Group) -> None:
        if needed is not None:
            number = await asyncio.to_thread(tickets.finish)
            if number + 1 >= needed:
                room.stop()
            if number >= needed:
                partials.append(group)
                return
        complete[number] = group

    failures: list[str] = []

    async def note_aborted(why: str) -> None:
        if of is None or (deadline is not None and asyncio.get_running_loop().time() >= deadline):
            return
        failures.append(why)
        count = await asyncio.to_thread(tickets.aborted, 1)
        if count < of and too_many(count, of, around.config):
            raise TooManyAborted(count, of, failures)

    async def work(turn: int, seats: dict[int, Seat]) -> None:
        number, group = begun[turn]
        await carry_on(group, seats, around, greedy, deadline, note_aborted)
        del begun[turn]
        if _ended(group):
            await counting.do(finish(number, tuple(group)))
        else:
            partials.append(tuple(group))

    lost: EngineLost | None = None
    try:
        async with asyncio.TaskGroup() as together:
            others = [together.create_task(watch())]
            if needed is not None:
                others.append(together.create_task(_stop_when_enough(tickets, needed, room)))
            tasks: set[asyncio.Task[None]] = set()
            while await room.is_there():
                known = turn
                await counting.do(next_group())
                if turn > known:
                    tasks.add(together.create_task(work(turn, take_seats(begun[turn][1], room))))
                elif not tasks:
                    break
                else:
                    await asyncio.wait(tasks, timeout=_BACK_S, return_when=asyncio.FIRST_COMPLETED)
                tasks = {task for task in tasks if not task.done()}
            if tasks:
                await asyncio.wait(tasks)
            for other in others:
                other.cancel()
    except BaseExceptionGroup as failed:
        lost = lost_in(failed)
        if lost is None:
            raise first_of(failed) from None
    gone = 0
    if lost is not None:
        await counting.end()
        enough = needed is not None and await asyncio.to_thread(tickets.finished) >= needed
        unfinished = [(number, at_their_beginning(group)) for number, group in begun.values()]
        gone = sum(one.status is None for _, group in unfinished for one in group)
        unfinished += [(0, at_their_beginning(group)) for group in left]
        left.clear()
        for number, group in unfinished:
            if enough:
                partials.append(group)
            else:
                back = Returned(number, group, sum(one.status is None for one in group))
                await asyncio.to_thread(tickets.give_back, back)
    rollouts = [one for number in sorted(complete) for one in rollouts_of(complete[number], first_group + number)]
    return Gathered(
        rollouts,
        [*partials, *left],
        anew,
        room.size,
        time.monotonic() - start,
        room.busy(),
        lost=lost,
        gone=gone,
        again=again,
    )


class Whole:
    """Counts on the tickets, each of which is done to its end also where whoever wants it is cancelled meanwhile."""

    def __init__(self) -> None:
        self._under_way: set[asyncio.Task[None]] = set()

    async def do(self, counting: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(counting)
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)
        await asyncio.shield(task)

    async def end(self) -> None:
        """Return when all are done."""
        await asyncio.gather(*self._under_way)


def begin_group(prompt: Prompt, chat: Chat, seed: int, group: int, samples: int) -> Group:
    """Of a prompt that is rendered or not, with the seeds of this group's samples."""
    if not len(prompt.token_ids):
        prompt = replace(prompt, token_ids=ids_of(chat.render(prompt)))
    return tuple(Partial.begin(prompt, sample_seed(seed, group, sample)) for sample in range(samples))


def at_their_beginning(group: Sequence[Partial]) -> Group:
    """Those that have ended as they are; whoever gets them has no session of another engine's."""
    return tuple(one if one.status is not None else one.anew() for one in group)


def take_seats(group: Sequence[Partial], room: Room) -> dict[int, Seat]:
    """One for each conversation that has not ended, by its sample."""
    return {sample: room.seat() for sample, one in enumerate(group) if one.status is None}


async def carry_on(
    group: list[Partial],
    seats: dict[int, Seat],
    around: Surroundings,
    greedy: bool,
    deadline: float | None,
    aborted: Callable[[str], Coroutine[Any, Any, None]] | None = None,
) -> None:
    """Have the group's conversations as far as they come, side by side; each is in its place in `group` then. aborted:
    is told why one is, when it is."""

    async def converse(sample: int, seat: Seat) -> None:
        one = group[sample]
        params = sampling_params(around.config, around.chat, greedy, one.seed)
        if one.session is None and around.chat.known.environments:
            seat.rest()  # a reset may take a while
        try:
            by_agent = around.chat.known.by_agent(one.prompt)
            done = await (run_agent if by_agent else run_conversation)(one, seat, around, params, deadline)
        finally:
            seat.leave()
        group[sample] = done
        if done.status not in (None, "aborted"):
            around.ended(done.rollout(0))  # an episode is scored by its last branch
        if done.status == "aborted" and aborted is not None:
            await aborted(done.failure)

    async with asyncio.TaskGroup() as own:
        for sample, seat in seats.items():
            own.create_task(converse(sample, seat))


def rollouts_of(group: Group, number: int) -> list[Rollout]:
    """By sample; the branches of an episode one after the other."""
    return [rollout for sample, one in enumerate(group) for rollout in one.rollouts(number, sample)]


def _ended(group: Sequence[Partial]) -> bool:
    return all(one.status is not None for one in group)


def first_of(error: BaseException) -> BaseException:
    """Of errors at the same time, in tasks of tasks."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def lost_in(error: BaseException) -> EngineLost | None:
    """Of errors at the same time, that of the engine, by which the others may be."""
    if isinstance(error, BaseExceptionGroup):
        return next((found for one in error.exceptions if (found := lost_in(one)) is not None), None)
    return error if isinstance(error, EngineLost) else None


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
