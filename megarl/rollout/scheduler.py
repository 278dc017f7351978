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

from megarl.chat_format.chat_template import ChatTemplate
from megarl.engine.engine_loss import EngineLost
from megarl.engine.generation import Policy
from megarl.environments.protocol import SessionLost
from megarl.rollout.aborted import TooManyAborted, is_over_abort_limit
from megarl.rollout.conversation import RolloutContext, build_sampling_params, derive_seed, run_conversation
from megarl.rollout.group_queue import GroupQueue
from megarl.rollout.partial_rollouts import PartialRollout
from megarl.rollout.request_gate import RequestGate, RequestSlot
from megarl.types import Prompt, RewardFailure, RewardResult, Rollout, as_token_ids
from megarl.types.reward_values import RewardError, parse_reward


async def run_agent(
    begun: PartialRollout, policy: Policy, around: RolloutContext, params: dict[str, Any], deadline: float | None = None
) -> PartialRollout:
    """Let an agent work on a prompt, until it returns; `before` are all branches of the episode but the last.

    params, deadline: as of `run_conversation`. It is `aborted` where the agent raises, its process dies, it asks the
    policy for nothing, is not done by `deadline`, or a request of it has failed.
    """
    loop = asyncio.get_running_loop()
    server = await around.get_session_server()
    recording = server.open(begun.prompt, policy, params, deadline, begun.seed)
    limit = around.config.step_timeout if deadline is None else max(0.0, deadline - loop.time())
    value = None
    try:
        value = await around.environments.run_agent(begun.prompt, recording.base_url, recording.key, limit)
    except SessionLost as error:
        recording.fail(str(error))
    finally:
        await server.close(recording)
    *before, last = recording.collect_branches()
    if last.status == "aborted":
        return replace(last, earlier_branches=tuple(before))
    return replace(last, earlier_branches=tuple(before), env_reward=_make_verdict(value, last))


def _make_verdict(value: Any, last: PartialRollout) -> RewardResult | None:
    """None where it has returned none: then others say what it was worth."""
    if value is None:
        return None
    try:
        return parse_reward(value, sum(turn.is_action for turn in last.turns))
    except (RewardError, TypeError) as error:
        return RewardFailure(f"the agent: {error}")


_POLL_S = 0.1
"""How often it is asked whether there are enough groups, and how often the policy is told again to stop."""
_RETURNED_POLL_S = 0.5
"""How often an engine that has nothing more to begin looks for what another, which is lost, has given back."""

Group = tuple[PartialRollout, ...]
"""All conversations of one prompt, by sample."""


@dataclass(frozen=True)
class GenerationResult:
    """rollouts: of groups that are complete, ordered by group, then by sample. partials: groups to go on with in a
    later step, on this engine. anew: conversations that were begun anew, for their first tokens were too old.

    slots: answers that the policy was asked for at once, at most. seconds: that it took. busy: how long it was asked
    for something, in seconds of one slot. ages: of a stream, the seconds since each of the groups was begun.

    lost: where the engine was lost, by what. gone: conversations that were under way there. again: those of lost
    engines that were begun anew on this one.
    """

    rollouts: list[Rollout]
    partials: list[Group]
    num_stale: int = 0
    num_slots: int = 0
    seconds: float = 0.0
    busy_seconds: float = 0.0
    group_ages: tuple[float, ...] = ()
    engine_loss: EngineLost | None = None
    num_interrupted: int = 0
    num_restarted: int = 0

    def merge(self, more: GenerationResult) -> GenerationResult:
        """With what the same engine, or the one in its place, has gathered since."""
        return GenerationResult(
            sorted([*self.rollouts, *more.rollouts], key=lambda one: one.group),
            [*self.partials, *more.partials],
            num_stale=self.num_stale + more.num_stale,
            num_slots=max(self.num_slots, more.num_slots),
            seconds=self.seconds + more.seconds,
            busy_seconds=self.busy_seconds + more.busy_seconds,
            group_ages=self.group_ages + more.group_ages,
            engine_loss=more.engine_loss,
            num_interrupted=self.num_interrupted + more.num_interrupted,
            num_restarted=self.num_restarted + more.num_restarted,
        )


@dataclass(frozen=True)
class ReturnedGroup:
    """A group that an engine had begun when it was lost, without sessions. group: None where only its number was taken.
    gone: its conversations that were under way."""

    number: int
    group: Group | None
    num_interrupted: int = 0


async def wait_forever() -> None:
    await asyncio.Event().wait()


async def gather_rollouts(
    prompts: Sequence[Prompt],
    tickets: GroupQueue,
    policy: Policy,
    around: RolloutContext,
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
    watch: Callable[[], Coroutine[Any, Any, None]] = wait_forever,
    opened: Callable[[RequestGate], None] = lambda room: None,
) -> GenerationResult:
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
    room = RequestGate(policy, max(1, min(around.config.concurrency, samples * tickets.groups_per_engine)), around.halt)
    opened(room)
    left = deque(sorted(carried, key=lambda group: not _is_finished(group)))
    complete: dict[int, Group] = {}
    partials: list[Group] = []
    begun: dict[int, tuple[int, list[PartialRollout]]] = {}
    """Not complete yet, with their numbers, in the order in which they were begun."""
    anew = again = turn = 0
    counting = ShieldedTasks()

    async def next_group() -> None:
        nonlocal anew, again, turn
        number: int | None = 0
        group: Group
        if left:
            group = left.popleft()
            old = [
                one.oldest_version is not None and version - one.oldest_version > around.config.max_lag for one in group
            ]
            anew += sum(old)
            pairs = zip(group, old, strict=True)
            group = tuple(one.restart() if is_old else one for one, is_old in pairs)
        elif (back := await asyncio.to_thread(tickets.claim_returned)) is not None:
            again += back.num_interrupted
            number, group = back.number, back.group
        elif (number := await asyncio.to_thread(tickets.claim)) is not None:
            group = make_group(prompts[number], around.chat, seed, first_group + number, samples)
        else:
            return
        assert number is not None
        turn += 1
        begun[turn] = number, list(group)

    async def finish(number: int, group: Group) -> None:
        if needed is not None:
            number = await asyncio.to_thread(tickets.mark_complete)
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
        count = await asyncio.to_thread(tickets.count_aborted, 1)
        if count < of and is_over_abort_limit(count, of, around.config):
            raise TooManyAborted(count, of, failures)

    async def work(turn: int, seats: dict[int, RequestSlot]) -> None:
        number, group = begun[turn]
        await run_group(group, seats, around, greedy, deadline, note_aborted)
        del begun[turn]
        if _is_finished(group):
            await counting.run(finish(number, tuple(group)))
        else:
            partials.append(tuple(group))

    lost: EngineLost | None = None
    try:
        async with asyncio.TaskGroup() as together:
            others = [together.create_task(watch())]
            if needed is not None:
                others.append(together.create_task(_stop_when_enough(tickets, needed, room)))
            tasks: set[asyncio.Task[None]] = set()
            while await room.wait_for_room():
                known = turn
                await counting.run(next_group())
                if turn > known:
                    tasks.add(together.create_task(work(turn, open_slots(begun[turn][1], room))))
                elif not tasks:
                    break
                else:
                    await asyncio.wait(tasks, timeout=_RETURNED_POLL_S, return_when=asyncio.FIRST_COMPLETED)
                tasks = {task for task in tasks if not task.done()}
            if tasks:
                await asyncio.wait(tasks)
            for other in others:
                other.cancel()
    except BaseExceptionGroup as failed:
        lost = find_engine_loss(failed)
        if lost is None:
            raise find_first_error(failed) from None
    gone = 0
    if lost is not None:
        await counting.wait_all()
        enough = needed is not None and await asyncio.to_thread(tickets.count_complete) >= needed
        unfinished = [(number, restart_unfinished(group)) for number, group in begun.values()]
        gone = sum(one.status is None for _, group in unfinished for one in group)
        unfinished += [(0, restart_unfinished(group)) for group in left]
        left.clear()
        for number, group in unfinished:
            if enough:
                partials.append(group)
            else:
                back = ReturnedGroup(number, group, sum(one.status is None for one in group))
                await asyncio.to_thread(tickets.return_group, back)
    rollouts = [one for number in sorted(complete) for one in to_rollouts(complete[number], first_group + number)]
    return GenerationResult(
        rollouts,
        [*partials, *left],
        anew,
        room.num_slots,
        time.monotonic() - start,
        room.measure_busy_seconds(),
        engine_loss=lost,
        num_interrupted=gone,
        num_restarted=again,
    )


class ShieldedTasks:
    """Counts on the tickets, each of which is done to its end also where whoever wants it is cancelled meanwhile."""

    def __init__(self) -> None:
        self._pending: set[asyncio.Task[None]] = set()

    async def run(self, counting: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(counting)
        self._pending.add(task)
        task.add_done_callback(self._pending.discard)
        await asyncio.shield(task)

    async def wait_all(self) -> None:
        """Return when all are done."""
        await asyncio.gather(*self._pending)


def make_group(prompt: Prompt, chat: ChatTemplate, seed: int, group: int, samples: int) -> Group:
    """Of a prompt that is rendered or not, with the seeds of this group's samples."""
    if not len(prompt.token_ids):
        prompt = replace(prompt, token_ids=as_token_ids(chat.encode_prompt(prompt)))
    return tuple(PartialRollout.begin(prompt, derive_seed(seed, group, sample)) for sample in range(samples))


def restart_unfinished(group: Sequence[PartialRollout]) -> Group:
    """Those that have ended as they are; whoever gets them has no session of another engine's."""
    return tuple(one if one.status is not None else one.restart() for one in group)


def open_slots(group: Sequence[PartialRollout], room: RequestGate) -> dict[int, RequestSlot]:
    """One for each conversation that has not ended, by its sample."""
    return {sample: room.open_slot() for sample, one in enumerate(group) if one.status is None}


async def run_group(
    group: list[PartialRollout],
    seats: dict[int, RequestSlot],
    around: RolloutContext,
    greedy: bool,
    deadline: float | None,
    aborted: Callable[[str], Coroutine[Any, Any, None]] | None = None,
) -> None:
    """Have the group's conversations as far as they come, side by side; each is in its place in `group` then. aborted:
    is told why one is, when it is."""

    async def converse(sample: int, seat: RequestSlot) -> None:
        one = group[sample]
        params = build_sampling_params(around.config, around.chat, greedy, one.seed)
        if one.session is None and around.chat.catalog.environments:
            seat.mark_idle()  # a reset may take a while
        try:
            by_agent = around.chat.catalog.is_run_by_agent(one.prompt)
            done = await (run_agent if by_agent else run_conversation)(one, seat, around, params, deadline)
        finally:
            seat.release()
        group[sample] = done
        if done.status not in (None, "aborted"):
            around.on_rollout_finished(done.to_rollout(0))  # an episode is scored by its last branch
        if done.status == "aborted" and aborted is not None:
            await aborted(done.failure)

    async with asyncio.TaskGroup() as own:
        for sample, seat in seats.items():
            own.create_task(converse(sample, seat))


def to_rollouts(group: Group, number: int) -> list[Rollout]:
    """By sample; the branches of an episode one after the other."""
    return [rollout for sample, one in enumerate(group) for rollout in one.to_rollouts(number, sample)]


def _is_finished(group: Sequence[PartialRollout]) -> bool:
    return all(one.status is not None for one in group)


def find_first_error(error: BaseException) -> BaseException:
    """Of errors at the same time, in tasks of tasks."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def find_engine_loss(error: BaseException) -> EngineLost | None:
    """Of errors at the same time, that of the engine, by which the others may be."""
    if isinstance(error, BaseExceptionGroup):
        return next((found for one in error.exceptions if (found := find_engine_loss(one)) is not None), None)
    return error if isinstance(error, EngineLost) else None


async def _stop_when_enough(tickets: GroupQueue, needed: int, room: RequestGate) -> None:
    """Stop all conversations when so many groups are complete, here or elsewhere, and see to it that they do."""
    while not room.halt.is_set():
        try:
            async with asyncio.timeout(_POLL_S):
                await room.halt.wait()
        except TimeoutError:
            if await asyncio.to_thread(tickets.count_complete) >= needed:
                room.stop()
    while True:  # again, for a request may have been on its way
        if room.num_requests:
            await room.policy.stop()
        await asyncio.sleep(_POLL_S)
