"""Generation that outlasts a step: one engine's share of the groups of this step and of later ones.

Groups are numbered across all steps. They are admitted as far ahead as `rollout.max_staleness` and
`rollout.oversample` allow. An engine starts the next group whenever it has room, and a step collects complete groups:
either the next ones in order, or those that are complete first. While the policy is paused, conversations wait with
their next request.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from megarl.config import OnWeightSync, RolloutConfig
from megarl.engine.engine_protocol import EngineLost, Policy
from megarl.rollout.cache_budget import CacheBudget
from megarl.rollout.conversation import Deadline, RolloutContext
from megarl.rollout.group_queue import GroupQueue
from megarl.rollout.partial_rollouts import Group
from megarl.rollout.request_gate import RequestGate
from megarl.rollout.scheduler import (
    GenerationResult,
    GroupRun,
    ReturnedGroup,
    ShieldedTasks,
    get_engine_loss,
    make_group,
    to_rollouts,
    wait_forever,
)
from megarl.types import Prompt

_POLL_S = 0.05
"""Seconds between checks whether a step's groups are complete on all engines."""
_RETURNED_POLL_S = 0.5
"""Seconds between checks, by an engine that has room, for groups that a lost engine returned."""

OnBusyInterval = Callable[[float, float], None]
"""Called with the start and end (`time.monotonic` seconds) of an interval in which the engine was busy."""


@dataclass(frozen=True)
class AdmittedPrompt:
    """A prompt that may start. `seed` and `index` determine the seeds of its samples."""

    prompt: Prompt
    seed: int
    index: int


@dataclass(frozen=True)
class _CompleteGroup:
    number: int
    group: Group


class GroupStream:
    """One engine's continuous generation. Use it only in the event loop that runs `run`.

    Args:
        queue: unlimited queue, shared by the engines
        max_groups: maximum number of concurrent groups, also bounded by `config.concurrency`
        timeout: seconds for the conversations of one group, without those in which the policy is asleep
        version: version of the weights
        is_ordered: whether a step collects the next groups by their numbers, rather than the first complete ones
        partial_groups: by number, groups of an earlier run that this engine continues; all engines together have the
            numbers below the queue's first
        budget: that of the gate to begin with
    """

    def __init__(
        self,
        queue: GroupQueue,
        policy: Policy,
        context: RolloutContext,
        *,
        samples: int,
        max_groups: int,
        timeout: float,
        version: int = 0,
        is_ordered: bool = True,
        partial_groups: Mapping[int, Group] | None = None,
        on_busy_interval: OnBusyInterval = lambda began, ended: None,
        on_engine_lost: Callable[[EngineLost], None] = lambda lost: None,
        budget: CacheBudget | None = None,
    ) -> None:
        self._queue, self._context = queue, context
        self._samples, self._timeout, self._is_ordered = samples, timeout, is_ordered
        self._on_busy_interval, self._on_engine_lost = on_busy_interval, on_engine_lost
        self._gate = RequestGate(policy, max(1, min(context.config.concurrency, samples * max_groups)), budget)
        self._version = version
        self._admitted: dict[int, AdmittedPrompt] = {}
        """Prompts that this engine may start, by number, ascending."""
        self._num_admitted = queue.first
        self._num_collected = self._num_complete = 0
        """Places of complete groups that steps have collected, and that are known to be taken; since the last weight
        sync if groups are not ordered."""
        self._pending_groups: dict[int, ReturnedGroup] = {}
        """Groups claimed by this engine that start once they are admitted, by number."""
        self._active_groups: dict[int, GroupRun] = {}
        self._complete_groups: dict[int, _CompleteGroup] = {}
        """Complete groups that no step has collected, by place."""
        self._collected_places: list[int] = []
        """Places of the groups that the last step has collected from this engine."""
        self._start_times: dict[int, float] = {}
        """Start time of each of this engine's groups that no step has collected."""
        self._queue_updates, self._places_lock = ShieldedTasks(), asyncio.Lock()
        self._may_claim = asyncio.Event()
        self._may_claim.set()
        self.is_lost = False
        """True from the loss of the engine until `reconnect`."""
        self._num_interrupted = self._num_restarted = self._num_stale = 0
        self._collected_at, self._busy_seconds = time.monotonic(), 0.0
        self._asleep_since: float | None = None
        for number, group in (partial_groups or {}).items():
            restarted = self._restart_stale(group)
            self._pending_groups[number] = ReturnedGroup(number, restarted or group)

    def set_config(self, config: RolloutConfig) -> None:
        """Use these settings for groups that start from now on. May be called in any thread."""
        self._context = replace(self._context, config=config)

    async def admit(self, prompts: Sequence[AdmittedPrompt]) -> None:
        """Allow further groups to start."""
        self._admitted |= dict(enumerate(prompts, self._num_admitted))
        self._num_admitted += len(prompts)
        self._gate.notify()
        if self.is_lost:
            await self._return_pending()

    async def run(self, watch: Callable[[], Coroutine[Any, Any, None]] = wait_forever) -> None:
        """Start admitted groups until cancelled.

        Returns if the engine is lost, which the policy or `watch` reports by raising EngineLost. Complete groups are
        kept; all others return to the queue for any engine with room.
        """
        try:
            async with asyncio.TaskGroup() as task_group:
                task_group.create_task(watch())
                task_group.create_task(self._gate.observe_load())
                while True:
                    await self._gate.wait_for_room()
                    await self._may_claim.wait()
                    await self._queue_updates.run(self._claim_group())
                    if not self._has_admitted_group():
                        with suppress(TimeoutError):  # then check for returned groups again
                            async with asyncio.timeout(_RETURNED_POLL_S):
                                await self._gate.wait_until(self._has_admitted_group)
                        continue
                    await self._gate.wait_for_room()  # a pause may have started meanwhile
                    number = min(self._pending_groups)
                    pending = self._pending_groups.pop(number)
                    self._num_restarted += pending.num_interrupted
                    self._start_times.setdefault(number, time.monotonic())
                    deadline = Deadline(asyncio.get_running_loop().time() + self._timeout)
                    group = self._make_group(pending)
                    run = self._active_groups[number] = GroupRun(group, self._gate, self._context, False, deadline)
                    task_group.create_task(self._run_group(number, run))
        except BaseExceptionGroup as errors:
            await self._handle_engine_loss(get_engine_loss(errors))

    async def reconnect(self, policy: Policy, context: RolloutContext) -> None:
        """Attach the restarted engine as a new policy; `run` may then be called again."""
        self._context = context
        self._gate.policy, self.is_lost = policy, False
        await asyncio.to_thread(self._queue.count_lost_engines, -1)
        await self.resume()

    async def collect(self, count: int, first_group: int = 0) -> GenerationResult | None:
        """Wait until the next `count` groups are complete on all engines, and return this engine's share in order.

        The result's groups are numbered from `first_group`. Returns None if all engines are lost.
        """
        first, end = self._num_collected, self._num_collected + count
        for place in self._collected_places:  # all engines know them by now
            await asyncio.to_thread(self._queue.unmark, self._version, place)
        self._collected_places = []
        while not await asyncio.to_thread(self._has_complete, end):
            if self.is_lost and await asyncio.to_thread(self._queue.count_lost_engines) == self._queue.num_engines:
                return None
            await asyncio.sleep(_POLL_S)
        places = self._collected_places = sorted(place for place in self._complete_groups if place < end)
        complete = {first_group + place - first: self._complete_groups.pop(place) for place in places}
        now = time.monotonic()
        self._num_collected = end
        busy_seconds = self._gate.measure_busy_seconds()
        result = GenerationResult(
            [rollout for number, item in complete.items() for rollout in to_rollouts(item.group, number)],
            num_stale=self._num_stale,
            num_slots=self._gate.num_slots,
            seconds=now - self._collected_at,
            busy_seconds=busy_seconds - self._busy_seconds,
            group_ages=tuple(now - self._start_times.pop(item.number) for item in complete.values()),
            prompts={
                number: item.group[0].original_prompt or item.group[0].prompt for number, item in complete.items()
            },
            num_interrupted=self._num_interrupted,
            num_restarted=self._num_restarted,
            usage=self._gate.pop_usage(),
            budget=self._gate.budget,
        )
        self._collected_at, self._busy_seconds = now, busy_seconds
        self._num_interrupted = self._num_restarted = self._num_stale = 0
        return result

    def _has_complete(self, end: int) -> bool:
        """Return whether all places before `end` are taken by complete groups of any engine."""
        while self._num_complete < end and self._queue.is_complete(self._version, self._num_complete):
            self._num_complete += 1
        return self._num_complete >= end

    async def set_version(self, version: int) -> None:
        """Set the version of the weights, which the engines have or get before `resume`.

        Conversations with a token of weights more than `config.max_staleness` versions older restart. Call it on all
        engines while they are paused: places of complete groups start again.
        """
        if version == self._version:
            return
        async with self._places_lock:
            for place in (*self._collected_places, *self._complete_groups):
                await asyncio.to_thread(self._queue.unmark, self._version, place)
            self._collected_places = []
            self._version = version
            if not self._is_ordered:
                self._num_collected = 0
            self._num_complete = self._num_collected
            complete, self._complete_groups = self._complete_groups, {}
            for place in sorted(complete):
                await self._place(complete[place].number, complete[place].group)
        self._num_stale += sum(run.restart_stale(self._oldest_allowed) for run in self._active_groups.values())

    async def snapshot(self) -> list[Group]:
        """Return the groups that this engine has claimed and no step has collected, as they are now.

        Hold back claims on all engines around it, or groups would be lost or repeated.
        """
        await self._queue_updates.wait_all()
        while (returned := await asyncio.to_thread(self._queue.claim_returned)) is not None:
            self._pending_groups[returned.number] = returned
        groups = {item.number: item.group for item in self._complete_groups.values()}
        groups |= {number: run.snapshot() for number, run in self._active_groups.items()}
        groups |= {
            number: self._make_group(pending)
            for number, pending in self._pending_groups.items()
            if number < self._num_admitted
        }
        return [groups[number] for number in sorted(groups)]

    async def hold_claims(self, is_held: bool) -> None:
        """Stop claiming groups, or go on."""
        if is_held:
            self._may_claim.clear()
        else:
            self._may_claim.set()

    async def pause(self, mode: OnWeightSync, sleeps: bool = False) -> None:
        """Free the policy until `resume`, see `RequestGate.pause`. A lost engine is free.

        sleeps: the policy cannot be used meanwhile, so no time-out and no idle slot counts.
        """
        try:
            await self._gate.pause(mode)
        except EngineLost as lost:
            self._on_engine_lost(lost)
            await self._gate.wait_until(lambda: self.is_lost)
        if sleeps:  # only now: until then the policy is busy, and with `wait` time-outs bound how long
            self._asleep_since = time.monotonic()
            for run in self._active_groups.values():
                run.deadline.suspend()
        if (busy_interval := self._gate.pop_busy_interval()) is not None:
            self._on_busy_interval(*busy_interval)

    async def resume(self) -> None:
        if self._asleep_since is not None:
            self._collected_at += time.monotonic() - self._asleep_since
            self._asleep_since = None
            for run in self._active_groups.values():
                run.deadline.resume()
        self._gate.reopen()

    def _has_admitted_group(self) -> bool:
        return min(self._pending_groups, default=self._num_admitted) < self._num_admitted

    async def _claim_group(self) -> None:
        """Claim a group to start: one that a lost engine returned, otherwise a new one."""
        returned: ReturnedGroup | None = await asyncio.to_thread(self._queue.claim_returned)
        if returned is not None:
            self._pending_groups[returned.number] = returned
        elif not self._pending_groups:
            number = await asyncio.to_thread(self._queue.claim)
            assert number is not None, "a stream's queue is unbounded"
            self._pending_groups[number] = ReturnedGroup(number, None)
            while (first := next(iter(self._admitted), number)) < number:
                del self._admitted[first]  # another engine has claimed it

    def _make_group(self, pending: ReturnedGroup) -> Group:
        if pending.group is not None:
            return pending.group
        admitted = self._admitted[pending.number]
        return make_group(admitted.prompt, self._context.chat, admitted.seed, admitted.index, self._samples)

    async def _run_group(self, number: int, run: GroupRun) -> None:
        group = await run.run()
        del self._active_groups[number]
        await self._queue_updates.run(self._finish(number, group))

    async def _finish(self, number: int, group: Group) -> None:
        async with self._places_lock:
            await self._place(number, group)

    async def _place(self, number: int, group: Group) -> None:
        """Give the group its place among the complete ones, unless some of it has to be sampled again."""
        if restarted := self._restart_stale(group):
            self._pending_groups[number] = ReturnedGroup(number, restarted)
            self._gate.notify()
            return
        version = self._version
        place = number if self._is_ordered else await asyncio.to_thread(self._queue.next_place, version)
        self._complete_groups[place] = _CompleteGroup(number, group)
        await asyncio.to_thread(self._queue.mark_complete, version, place)

    @property
    def _oldest_allowed(self) -> int:
        return self._version - self._context.config.max_staleness

    def _restart_stale(self, group: Group) -> Group | None:
        """Return the group with the conversations restarted that have become too stale; None if there are none."""
        stale = [partial.oldest_version < self._oldest_allowed for partial in group]
        self._num_stale += sum(stale)
        pairs = zip(group, stale, strict=True)
        return tuple(partial.restart() if is_stale else partial for partial, is_stale in pairs) if any(stale) else None

    async def _handle_engine_loss(self, error: EngineLost) -> None:
        self._on_engine_lost(error)
        await self._queue_updates.wait_all()
        unfinished = [ReturnedGroup.restart(number, run.partials) for number, run in self._active_groups.items()]
        self._num_interrupted += sum(group.num_interrupted for group in unfinished)
        self._active_groups = {}
        self._pending_groups |= {group.number: group for group in unfinished}
        await self._return_pending()
        await asyncio.to_thread(self._queue.count_lost_engines, 1)
        self.is_lost = True
        self._gate.notify()

    async def _return_pending(self) -> None:
        """Return the groups that wait for this engine to the queue, once they are admitted."""
        for number in [number for number in self._pending_groups if number < self._num_admitted]:
            pending = self._pending_groups.pop(number)
            self._start_times.pop(number, None)
            await asyncio.to_thread(self._queue.return_group, replace(pending, group=self._make_group(pending)))
