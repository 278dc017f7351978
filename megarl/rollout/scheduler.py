"""Schedule one engine's share of a generation: groups start while the engine has capacity.

`GroupRun` runs the conversations of one group. `AgentEpisode` is one episode of an agent, which is a client of the
policy in its own process, and collects what its session recorded.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from megarl.chat_format.chat_template import ChatTemplate
from megarl.engine.engine_protocol import EngineLost, Policy
from megarl.environments.protocol import SessionLost
from megarl.rollout.aborted import TooManyAborted, is_over_abort_limit
from megarl.rollout.cache_budget import CacheBudget
from megarl.rollout.conversation import (
    TIMEOUT_REASON,
    Conversation,
    Deadline,
    RolloutContext,
    build_sampling_params,
    derive_seed,
)
from megarl.rollout.engine_usage import EngineUsage
from megarl.rollout.group_queue import GroupQueue
from megarl.rollout.partial_rollouts import Group, PartialRollout, oldest_version
from megarl.rollout.request_gate import RequestGate, RequestSlot
from megarl.rollout.session_server.recording import AgentSession
from megarl.types import Prompt, RewardFailure, RewardResult, Rollout, as_token_ids
from megarl.types.reward_values import RewardError, parse_reward


class AgentEpisode:
    """One episode of an agent, with the interface of `Conversation`. Without its process it can only start over."""

    def __init__(
        self, partial: PartialRollout, policy: Policy, context: RolloutContext, params: dict[str, Any]
    ) -> None:
        self.state = partial
        self._policy, self._context, self._params = policy, context, params
        self._session: AgentSession | None = None

    @property
    def oldest_version(self) -> float:
        """Oldest version of the weights that sampled a token; infinity if there is none."""
        return float("inf") if self._session is None else self._session.tree.oldest_version

    async def run(self, deadline: Deadline) -> PartialRollout:
        """Run the agent until it returns.

        The result is the last branch of the episode; all others are in `earlier_branches`. It is `aborted` if the agent
        raises, its process dies, it never queries the policy, it is not done by `deadline`, or one of its requests
        failed.
        """
        partial, context = self.state, self._context
        assert context.get_session_server is not None, "agents are not available here"
        server = await context.get_session_server()
        session = self._session = server.open(partial.prompt, self._policy, self._params, deadline, partial.seed)
        value = None
        try:
            async with deadline.limit():
                value = await context.environments.run_agent(partial.prompt, session.base_url, session.key)
        except TimeoutError:
            session.fail(TIMEOUT_REASON)
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


_RETURNED_POLL_S = 0.5
"""Seconds between an idle engine's checks for groups that a lost engine returned."""


@dataclass(frozen=True)
class GenerationResult:
    """The result of one engine's generation.

    Attributes:
        rollouts: rollouts of complete groups, ordered by group, then by sample
        num_stale: for a stream, conversations restarted because their first tokens were too stale
        num_slots: maximum number of concurrent requests to the policy
        busy_seconds: slot-seconds during which a request was running
        group_ages: for a stream, seconds since each group started
        prompts: for a stream, the original prompts by group number
        num_interrupted: conversations that were running on the engine when it was lost
        num_restarted: conversations of lost engines that were restarted on this one
        usage: observations of the engine
        budget: the gate's at the end
    """

    rollouts: list[Rollout]
    num_stale: int = 0
    num_slots: int = 0
    seconds: float = 0.0
    busy_seconds: float = 0.0
    group_ages: tuple[float, ...] = ()
    prompts: Mapping[int, Prompt] = field(default_factory=dict)
    engine_loss: EngineLost | None = None
    num_interrupted: int = 0
    num_restarted: int = 0
    usage: EngineUsage = EngineUsage()
    budget: CacheBudget | None = None

    def merge(self, later: GenerationResult) -> GenerationResult:
        """Combine with a later result of the same engine or of its replacement."""
        return GenerationResult(
            sorted([*self.rollouts, *later.rollouts], key=lambda rollout: rollout.group),
            num_stale=self.num_stale + later.num_stale,
            num_slots=max(self.num_slots, later.num_slots),
            seconds=self.seconds + later.seconds,
            busy_seconds=self.busy_seconds + later.busy_seconds,
            group_ages=self.group_ages + later.group_ages,
            engine_loss=later.engine_loss,
            num_interrupted=self.num_interrupted + later.num_interrupted,
            num_restarted=self.num_restarted + later.num_restarted,
            usage=self.usage.merge(later.usage),
            budget=later.budget,
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
    num_total: int | None = None,
    watch: Callable[[], Coroutine[Any, Any, None]] = wait_forever,
    on_gate_opened: Callable[[RequestGate], None] = lambda gate: None,
    budget: CacheBudget | None = None,
) -> GenerationResult:
    """Generate `samples` conversations for each prompt that this engine claims from the queue.

    Number i of the queue is prompt i, whose rollouts form group `first_group + i`. A group starts when the policy has
    room, which is `config.concurrency` concurrent requests, or an even share of all groups if that is less.
    Conversations that wait for tools make room for others.

    If the engine is lost, the result holds the groups complete by then. In every other group, finished conversations
    are kept and the rest are reset to their prompt; the group returns to the queue for any engine with room.

    Args:
        num_total: rollouts of the generation over all engines. If more than `config.max_aborted_frac` of these are
            aborted while others are running, `TooManyAborted` is raised. Without it, and after the deadline, all
            conversations are awaited.
        deadline: event-loop time at which unfinished conversations are aborted, including those that never started
        watch: runs concurrently and raises `EngineLost` when the engine is lost; the policy may raise it too
        on_gate_opened: receives the request gate, because a weight sync closes it first
        budget: that of the gate to begin with
    """
    start = time.monotonic()
    gate = RequestGate(policy, max(1, min(context.config.concurrency, samples * queue.groups_per_engine)), budget)
    on_gate_opened(gate)
    limit = Deadline(deadline)
    complete: dict[int, Group] = {}
    active: dict[int, GroupRun] = {}
    """Incomplete groups by number."""
    num_restarted = 0
    queue_updates = ShieldedTasks()

    async def claim_group() -> None:
        nonlocal num_restarted
        group: Group
        if (returned := await asyncio.to_thread(queue.claim_returned)) is not None:
            num_restarted += returned.num_interrupted
            number, group = returned.number, returned.group
        elif (number := await asyncio.to_thread(queue.claim)) is not None:
            group = make_group(prompts[number], context.chat, seed, first_group + number, samples)
        else:
            return
        active[number] = GroupRun(group, gate, context, greedy, limit, on_aborted)

    failures: list[str] = []

    async def on_aborted(reason: str) -> None:
        if num_total is None or limit.is_over:
            return
        failures.append(reason)
        count = await asyncio.to_thread(queue.count_aborted, 1)
        if count < num_total and is_over_abort_limit(count, num_total, context.config):
            raise TooManyAborted(count, num_total, failures)

    async def run_claimed_group(number: int) -> None:
        complete[number] = await active[number].run()
        del active[number]

    engine_loss: EngineLost | None = None
    try:
        async with asyncio.TaskGroup() as task_group:
            watchers = [task_group.create_task(watch()), task_group.create_task(gate.observe_load())]
            tasks: set[asyncio.Task[None]] = set()
            while True:
                await gate.wait_for_room()
                known = set(active)
                await queue_updates.run(claim_group())
                if claimed := active.keys() - known:
                    tasks |= {task_group.create_task(run_claimed_group(number)) for number in claimed}
                elif not tasks:
                    break
                else:
                    await asyncio.wait(tasks, timeout=_RETURNED_POLL_S, return_when=asyncio.FIRST_COMPLETED)
                tasks = {task for task in tasks if not task.done()}
            for watcher in watchers:
                watcher.cancel()
    except BaseExceptionGroup as errors:
        engine_loss = get_engine_loss(errors)
    num_interrupted = 0
    if engine_loss is not None:
        await queue_updates.wait_all()
        for number, run in active.items():
            returned = ReturnedGroup.restart(number, run.partials)
            num_interrupted += returned.num_interrupted
            await asyncio.to_thread(queue.return_group, returned)
    return GenerationResult(
        [rollout for number in sorted(complete) for rollout in to_rollouts(complete[number], first_group + number)],
        num_slots=gate.num_slots,
        seconds=time.monotonic() - start,
        busy_seconds=gate.measure_busy_seconds(),
        engine_loss=engine_loss,
        num_interrupted=num_interrupted,
        num_restarted=num_restarted,
        usage=gate.pop_usage(),
        budget=gate.budget,
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


class GroupRun:
    """The concurrent conversations of one group. Creating it takes their room at the gate.

    on_aborted: called with the reason as soon as a conversation is aborted.

    Attributes:
        partials: by sample, the finished conversation, or the one that `run` starts from
    """

    def __init__(
        self,
        group: Group,
        gate: RequestGate,
        context: RolloutContext,
        greedy: bool,
        deadline: Deadline,
        on_aborted: Callable[[str], Coroutine[Any, Any, None]] | None = None,
    ) -> None:
        self.partials, self.deadline = list(group), deadline
        self._gate, self._context, self._greedy, self._on_aborted = gate, context, greedy, on_aborted
        self._slots = {
            sample: gate.open_slot(partial.num_tokens) for sample, partial in enumerate(group) if partial.status is None
        }
        self._conversations: dict[int, Conversation | AgentEpisode] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._task_group = asyncio.TaskGroup()

    async def run(self) -> Group:
        """Run all conversations to their ends and return them."""
        try:
            async with self._task_group:
                for sample in self._slots:
                    self._start(sample)
        finally:
            for slot in self._slots.values():  # also those of tasks that were cancelled before they began
                slot.release()
        return tuple(self.partials)

    def snapshot(self) -> Group:
        """Return the conversations as they are now, without sessions; those of agents at their beginning."""
        partials = list(self.partials)
        for sample, conversation in self._conversations.items():
            if isinstance(conversation, Conversation):
                partials[sample] = conversation.with_tokens(self._slots[sample].interrupted)
        return tuple(replace(partial, session=None) for partial in partials)

    def restart_stale(self, oldest_allowed: int) -> int:
        """Restart running conversations with a token of weights before version `oldest_allowed`; return how many."""
        stale = [sample for sample in self._conversations if self._oldest_version(sample) < oldest_allowed]
        for sample in stale:
            self._tasks[sample].cancel()  # which closes its session
            self.partials[sample] = self.partials[sample].restart()
            self._slots[sample] = self._gate.open_slot(self.partials[sample].num_tokens)
            self._start(sample)
        return len(stale)

    def _oldest_version(self, sample: int) -> float:
        """Return the oldest version of the weights that sampled a token of a running conversation."""
        interrupted = [generation.to_turn() for generation in self._slots[sample].interrupted]
        return min(self._conversations[sample].oldest_version, oldest_version(interrupted))

    def _start(self, sample: int) -> None:
        self._tasks[sample] = self._task_group.create_task(self._converse(sample, self._slots[sample]))

    async def _converse(self, sample: int, slot: RequestSlot) -> None:
        partial, context = self.partials[sample], self._context
        params = build_sampling_params(context.config, context.chat, self._greedy, partial.seed)
        if context.chat.catalog.environments:
            slot.mark_idle()  # a reset may take a while
        is_run_by_agent = context.chat.catalog.is_run_by_agent(partial.prompt)
        conversation = (AgentEpisode if is_run_by_agent else Conversation)(partial, slot, context, params)
        self._conversations[sample] = conversation
        try:
            result = await conversation.run(self.deadline)
        finally:
            slot.release()
            if self._conversations.get(sample) is conversation:  # unless it has been restarted
                del self._conversations[sample]
        self.partials[sample] = result
        if result.status != "aborted":
            context.on_rollout_finished(result.to_rollout(0))  # an episode is scored by its last branch
        elif self._on_aborted is not None:
            await self._on_aborted(result.failure)


def to_rollouts(group: Group, number: int) -> list[Rollout]:
    """Return the group's rollouts by sample; the branches of an episode are consecutive."""
    return [rollout for sample, partial in enumerate(group) for rollout in partial.to_rollouts(number, sample)]


def get_engine_loss(errors: BaseExceptionGroup[BaseException]) -> EngineLost:
    """Return the first `EngineLost` among concurrent errors, which it may have caused. Without one, raise the first."""
    error: BaseException = errors.subgroup(EngineLost) or errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if not isinstance(error, EngineLost):
        raise error from None
    return error
