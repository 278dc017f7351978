"""Schedule one engine's share of a generation.

Groups start while the engine has capacity, and all conversations stop once enough groups are complete. `run_agent` runs
one episode of an agent, which is a client of the policy in its own process, and collects what its session recorded.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megarl.chat_format.chat_template import ChatTemplate
from megarl.engine.engine_protocol import EngineLost, Policy
from megarl.environments.protocol import SessionLost
from megarl.rollout.aborted import TooManyAborted, is_over_abort_limit
from megarl.rollout.conversation import RolloutContext, build_sampling_params, derive_seed, run_conversation
from megarl.rollout.group_queue import GroupQueue
from megarl.rollout.partial_rollouts import Group, PartialRollout
from megarl.rollout.request_gate import RequestGate, RequestSlot
from megarl.types import Prompt, RewardFailure, RewardResult, Rollout, as_token_ids
from megarl.types.reward_values import RewardError, parse_reward


async def run_agent(
    partial: PartialRollout,
    policy: Policy,
    context: RolloutContext,
    params: dict[str, Any],
    deadline: float | None = None,
) -> PartialRollout:
    """Run an agent on a prompt until it returns.

    The result is the last branch of the episode; all others are in `earlier_branches`. It is `aborted` if the agent
    raises, its process dies, it never queries the policy, it is not done by `deadline`, or one of its requests failed.
    """
    loop = asyncio.get_running_loop()
    assert context.get_session_server is not None, "agents are not available here"
    server = await context.get_session_server()
    session = server.open(partial.prompt, policy, params, deadline, partial.seed)
    limit = context.config.step_timeout if deadline is None else max(0.0, deadline - loop.time())
    value = None
    try:
        value = await context.environments.run_agent(partial.prompt, session.base_url, session.key, limit)
    except SessionLost as error:
        session.fail(str(error))
    finally:
        await server.close(session)
    *earlier, last = session.collect_branches()
    reward: RewardResult | None = None  # left to the reward functions
    if value is not None and last.status != "aborted":
        try:
            reward = parse_reward(value, sum(turn.is_action for turn in last.turns))
        except (RewardError, TypeError) as error:
            reward = RewardFailure(f"the agent: {error}")
    return replace(last, earlier_branches=tuple(earlier), env_reward=reward)


_POLL_S = 0.1
"""Seconds between checks for enough complete groups, and between repeated requests to stop the policy."""
_RETURNED_POLL_S = 0.5
"""Seconds between an idle engine's checks for groups that a lost engine returned."""


@dataclass(frozen=True)
class GenerationResult:
    """The result of one engine's generation.

    Attributes:
        rollouts: rollouts of complete groups, ordered by group, then by sample
        partials: groups to continue in a later step, on this engine
        num_stale: conversations restarted because their first tokens were too stale
        num_slots: maximum number of concurrent requests to the policy
        busy_seconds: slot-seconds during which a request was running
        group_ages: for a stream, seconds since each group started
        num_interrupted: conversations that were running on the engine when it was lost
        num_restarted: conversations of lost engines that were restarted on this one
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

    def merge(self, later: GenerationResult) -> GenerationResult:
        """Combine with a later result of the same engine or of its replacement."""
        return GenerationResult(
            sorted([*self.rollouts, *later.rollouts], key=lambda rollout: rollout.group),
            [*self.partials, *later.partials],
            num_stale=self.num_stale + later.num_stale,
            num_slots=max(self.num_slots, later.num_slots),
            seconds=self.seconds + later.seconds,
            busy_seconds=self.busy_seconds + later.busy_seconds,
            group_ages=self.group_ages + later.group_ages,
            engine_loss=later.engine_loss,
            num_interrupted=self.num_interrupted + later.num_interrupted,
            num_restarted=self.num_restarted + later.num_restarted,
        )


@dataclass(frozen=True)
class ReturnedGroup:
    """A group that a lost engine had started, stripped of its sessions; None if it had only claimed the number.

    `num_interrupted` counts its conversations that were running.
    """

    number: int
    group: Group | None
    num_interrupted: int = 0

    @staticmethod
    def restart(number: int, group: Sequence[PartialRollout]) -> ReturnedGroup:
        """Keep finished conversations and restart the rest, so that no session of another engine remains."""
        restarted = tuple(partial if partial.status is not None else partial.restart() for partial in group)
        return ReturnedGroup(number, restarted, sum(partial.status is None for partial in group))


async def wait_forever() -> None:
    await asyncio.Event().wait()


async def gather_rollouts(
    prompts: Sequence[Prompt],
    queue: GroupQueue,
    policy: Policy,
    context: RolloutContext,
    *,
    samples: int,
    greedy: bool,
    seed: int,
    first_group: int = 0,
    deadline: float | None = None,
    num_needed_groups: int | None = None,
    partial_groups: Sequence[Group] = (),
    version: int = 0,
    num_total: int | None = None,
    watch: Callable[[], Coroutine[Any, Any, None]] = wait_forever,
    on_gate_opened: Callable[[RequestGate], None] = lambda gate: None,
) -> GenerationResult:
    """Generate `samples` conversations for each prompt that this engine claims from the queue.

    Number i of the queue is prompt i, whose rollouts form group `first_group + i`. A group starts when the policy has
    room, which is `config.concurrency` concurrent requests, or an even share of all groups if that is less.
    Conversations that wait for tools make room for others.

    If the engine is lost, the result holds the groups complete by then. In every other group, finished conversations
    are kept and the rest are reset to their prompt; the group returns to the queue for any engine with room, or to
    `partials` if enough groups are complete.

    Args:
        num_needed_groups: groups wanted over all engines. Once that many are complete, all other conversations stop
            where they are. These groups are numbered in order of completion. Groups completed later become partials,
            which count immediately in a later step.
        partial_groups: partials to continue before any new group starts; requires `num_needed_groups`
        version: version of the policy's weights. A conversation with a token from weights more than
            `config.max_staleness` versions older is restarted.
        num_total: rollouts of the generation over all engines. If more than `config.max_aborted_frac` of these are
            aborted while others are running, `TooManyAborted` is raised. Without it, and after the deadline, all
            conversations are awaited.
        deadline: event-loop time at which unfinished conversations are aborted, including those that never started
        watch: runs concurrently and raises `EngineLost` when the engine is lost; the policy may raise it too
        on_gate_opened: receives the request gate, because a weight sync closes it first
    """
    if partial_groups and num_needed_groups is None:
        raise ValueError("partial rollouts can be continued only if the number of groups needed is given")

    context.halt.clear()
    start = time.monotonic()
    gate = RequestGate(policy, max(1, min(context.config.concurrency, samples * queue.groups_per_engine)), context.halt)
    on_gate_opened(gate)
    remaining_partials = deque(sorted(partial_groups, key=lambda group: not _is_finished(group)))
    complete: dict[int, Group] = {}
    partials: list[Group] = []
    active: dict[int, tuple[int, list[PartialRollout]]] = {}
    """Incomplete groups and their numbers, in the order in which they started."""
    num_stale = num_restarted = turn = 0
    queue_updates = ShieldedTasks()

    async def next_group() -> None:
        nonlocal num_stale, num_restarted, turn
        number: int | None = 0
        group: Group
        if remaining_partials:
            group = remaining_partials.popleft()
            stale_flags = [
                partial.oldest_version is not None and version - partial.oldest_version > context.config.max_staleness
                for partial in group
            ]
            num_stale += sum(stale_flags)
            pairs = zip(group, stale_flags, strict=True)
            group = tuple(partial.restart() if is_stale else partial for partial, is_stale in pairs)
        elif (returned := await asyncio.to_thread(queue.claim_returned)) is not None:
            num_restarted += returned.num_interrupted
            number, group = returned.number, returned.group
        elif (number := await asyncio.to_thread(queue.claim)) is not None:
            group = make_group(prompts[number], context.chat, seed, first_group + number, samples)
        else:
            return
        assert number is not None
        turn += 1
        active[turn] = number, list(group)

    async def finish(number: int, group: Group) -> None:
        if num_needed_groups is not None:
            number = await asyncio.to_thread(queue.mark_complete)
            if number + 1 >= num_needed_groups:
                gate.stop()
            if number >= num_needed_groups:
                partials.append(group)
                return
        complete[number] = group

    failures: list[str] = []

    async def on_aborted(reason: str) -> None:
        if num_total is None or (deadline is not None and asyncio.get_running_loop().time() >= deadline):
            return
        failures.append(reason)
        count = await asyncio.to_thread(queue.count_aborted, 1)
        if count < num_total and is_over_abort_limit(count, num_total, context.config):
            raise TooManyAborted(count, num_total, failures)

    async def run_claimed_group(turn: int, slots: dict[int, RequestSlot]) -> None:
        number, group = active[turn]
        await run_group(group, slots, context, greedy, deadline, on_aborted)
        del active[turn]
        if _is_finished(group):
            await queue_updates.run(finish(number, tuple(group)))
        else:
            partials.append(tuple(group))

    engine_loss: EngineLost | None = None
    try:
        async with asyncio.TaskGroup() as task_group:
            watchers = [task_group.create_task(watch())]
            if num_needed_groups is not None:
                watchers.append(task_group.create_task(_stop_when_enough(queue, num_needed_groups, gate)))
            tasks: set[asyncio.Task[None]] = set()
            while await gate.wait_for_room():
                previous_turn = turn
                await queue_updates.run(next_group())
                if turn > previous_turn:
                    tasks.add(task_group.create_task(run_claimed_group(turn, open_slots(active[turn][1], gate))))
                elif not tasks:
                    break
                else:
                    await asyncio.wait(tasks, timeout=_RETURNED_POLL_S, return_when=asyncio.FIRST_COMPLETED)
                tasks = {task for task in tasks if not task.done()}
            if tasks:
                await asyncio.wait(tasks)
            for watcher in watchers:
                watcher.cancel()
    except BaseExceptionGroup as errors:
        engine_loss = get_engine_loss(errors)
    num_interrupted = 0
    if engine_loss is not None:
        await queue_updates.wait_all()
        num_complete = await asyncio.to_thread(queue.count_complete)
        has_enough = num_needed_groups is not None and num_complete >= num_needed_groups
        unfinished = [ReturnedGroup.restart(number, group) for number, group in active.values()]
        num_interrupted = sum(returned.num_interrupted for returned in unfinished)
        unfinished += [ReturnedGroup.restart(0, group) for group in remaining_partials]
        remaining_partials.clear()
        for returned in unfinished:
            if has_enough:
                assert returned.group is not None
                partials.append(returned.group)
            else:
                await asyncio.to_thread(queue.return_group, returned)
    return GenerationResult(
        [rollout for number in sorted(complete) for rollout in to_rollouts(complete[number], first_group + number)],
        [*partials, *remaining_partials],
        num_stale,
        gate.num_slots,
        time.monotonic() - start,
        gate.measure_busy_seconds(),
        engine_loss=engine_loss,
        num_interrupted=num_interrupted,
        num_restarted=num_restarted,
    )


class ShieldedTasks:
    """Queue updates that run to completion even if the caller is cancelled meanwhile."""

    def __init__(self) -> None:
        self._pending: set[asyncio.Task[None]] = set()

    async def run(self, update: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(update)
        self._pending.add(task)
        task.add_done_callback(self._pending.discard)
        await asyncio.shield(task)

    async def wait_all(self) -> None:
        """Wait until all updates are done."""
        await asyncio.gather(*self._pending)


def make_group(prompt: Prompt, chat: ChatTemplate, seed: int, group: int, samples: int) -> Group:
    """Start a group: render the prompt if needed and derive one seed per sample."""
    if not len(prompt.token_ids):
        has_images = bool(prompt.images)
        prompt = (
            chat.render_prompt(prompt)
            if has_images
            else replace(prompt, token_ids=as_token_ids(chat.encode_prompt(prompt)))
        )
    return tuple(PartialRollout.begin(prompt, derive_seed(seed, group, sample)) for sample in range(samples))


def open_slots(group: Sequence[PartialRollout], gate: RequestGate) -> dict[int, RequestSlot]:
    """Open a request slot for each unfinished conversation, keyed by sample."""
    return {sample: gate.open_slot() for sample, partial in enumerate(group) if partial.status is None}


async def run_group(
    group: list[PartialRollout],
    slots: dict[int, RequestSlot],
    context: RolloutContext,
    greedy: bool,
    deadline: float | None,
    on_aborted: Callable[[str], Coroutine[Any, Any, None]] | None = None,
) -> None:
    """Run the group's conversations concurrently and store each result at its index in `group`.

    `on_aborted` is called with the reason as soon as a conversation is aborted.
    """

    async def converse(sample: int, slot: RequestSlot) -> None:
        partial = group[sample]
        params = build_sampling_params(context.config, context.chat, greedy, partial.seed)
        if partial.session is None and context.chat.catalog.environments:
            slot.mark_idle()  # a reset may take a while
        try:
            is_agent = context.chat.catalog.is_run_by_agent(partial.prompt)
            result = await (run_agent if is_agent else run_conversation)(partial, slot, context, params, deadline)
        finally:
            slot.release()
        group[sample] = result
        if result.status not in (None, "aborted"):
            context.on_rollout_finished(result.to_rollout(0))  # an episode is scored by its last branch
        if result.status == "aborted" and on_aborted is not None:
            await on_aborted(result.failure)

    async with asyncio.TaskGroup() as task_group:
        for sample, slot in slots.items():
            task_group.create_task(converse(sample, slot))


def to_rollouts(group: Group, number: int) -> list[Rollout]:
    """Return the group's rollouts by sample; the branches of an episode are consecutive."""
    return [rollout for sample, partial in enumerate(group) for rollout in partial.to_rollouts(number, sample)]


def _is_finished(group: Sequence[PartialRollout]) -> bool:
    return all(partial.status is not None for partial in group)


def get_engine_loss(errors: BaseExceptionGroup[BaseException]) -> EngineLost:
    """Return the first `EngineLost` among concurrent errors, which it may have caused. Without one, raise the first."""
    error: BaseException = errors.subgroup(EngineLost) or errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if not isinstance(error, EngineLost):
        raise error from None
    return error


async def _stop_when_enough(queue: GroupQueue, num_needed_groups: int, gate: RequestGate) -> None:
    """Stop all conversations once `num_needed_groups` groups are complete on any engine, and abort open requests."""
    while not gate.halt.is_set():
        try:
            async with asyncio.timeout(_POLL_S):
                await gate.halt.wait()
        except TimeoutError:
            if await asyncio.to_thread(queue.count_complete) >= num_needed_groups:
                gate.stop()
    while True:  # repeat: a request may have been in flight
        if gate.num_requests:
            await gate.policy.stop()
        await asyncio.sleep(_POLL_S)
