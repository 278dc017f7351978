"""Continuous generation during training: one engine's share of the groups of this step and of later ones.

Groups are numbered across all steps. They are admitted step by step, as far ahead as `rollout.max_staleness` lets them
start with the current weights. An engine starts the next group whenever it has room, and a step collects its groups
once they are complete.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from megarl.config import OnWeightSync, RolloutConfig
from megarl.engine.engine_protocol import EngineLost, Policy
from megarl.rollout.conversation import RolloutContext
from megarl.rollout.group_queue import GroupQueue
from megarl.rollout.partial_rollouts import PartialRollout
from megarl.rollout.request_gate import RequestGate, RequestSlot
from megarl.rollout.scheduler import (
    GenerationResult,
    Group,
    ReturnedGroup,
    ShieldedTasks,
    get_engine_loss,
    make_group,
    open_slots,
    run_group,
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


class GroupStream:
    """One engine's continuous generation. Use it only in the event loop that runs `run`.

    Args:
        queue: unlimited queue, shared by the engines
        max_groups: maximum number of concurrent groups, also bounded by `config.concurrency`
        timeout: seconds for the conversations of one group
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
        on_busy_interval: OnBusyInterval = lambda began, ended: None,
        on_engine_lost: Callable[[EngineLost], None] = lambda lost: None,
    ) -> None:
        self._queue, self._context = queue, context
        self._samples, self._timeout = samples, timeout
        self._on_busy_interval, self._on_engine_lost = on_busy_interval, on_engine_lost
        self._gate = RequestGate(policy, max(1, min(context.config.concurrency, samples * max_groups)), context.halt)
        self._admitted: dict[int, tuple[Prompt, int, int]] = {}
        """By group number: the prompt, the seed of its step, and the group's index within the step."""
        self._num_admitted = self._num_collected = 0
        self._pending_groups: dict[int, ReturnedGroup] = {}
        """Groups claimed by this engine that start once they are admitted, by number."""
        self._active_groups: dict[int, list[PartialRollout]] = {}
        self._complete_groups: dict[int, Group] = {}
        self._start_times: dict[int, float] = {}
        """Start time of each of this engine's groups that no step has collected."""
        self._queue_updates = ShieldedTasks()
        self.is_lost = False
        """True from the loss of the engine until `reconnect`."""
        self._num_interrupted = self._num_restarted = 0
        self._collected_at, self._busy_seconds = time.monotonic(), 0.0

    def set_config(self, config: RolloutConfig) -> None:
        """Use these settings for groups that start from now on. May be called in any thread."""
        self._context = replace(self._context, config=config)

    async def admit(self, prompts: Sequence[Prompt], seed: int) -> None:
        """Allow the groups of one more step to start, with the seeds that the step itself would use."""
        for group, prompt in enumerate(prompts):
            self._admitted[self._num_admitted + group] = prompt, seed, group
        self._num_admitted += len(prompts)
        self._gate.notify()

    async def run(self, watch: Callable[[], Coroutine[Any, Any, None]] = wait_forever) -> None:
        """Start admitted groups until cancelled.

        Returns if the engine is lost, which the policy or `watch` reports by raising EngineLost. Complete groups are
        kept; all others return to the queue for any engine with room.
        """
        try:
            async with asyncio.TaskGroup() as task_group:
                task_group.create_task(watch())
                while await self._gate.wait_for_room():
                    await self._queue_updates.run(self._claim_group())
                    if not self._has_admitted_group():
                        with suppress(TimeoutError):  # then check for returned groups again
                            await asyncio.wait_for(self._gate.wait_until(self._has_admitted_group), _RETURNED_POLL_S)
                        continue
                    await self._gate.wait_for_room()  # a pause may have started meanwhile
                    number = min(self._pending_groups)
                    prompt, seed, group = self._admitted[number]
                    pending = self._pending_groups.pop(number)
                    partials = pending.group or make_group(prompt, self._context.chat, seed, group, self._samples)
                    self._num_restarted += pending.num_interrupted
                    self._active_groups[number], self._start_times[number] = list(partials), time.monotonic()
                    task_group.create_task(self._run_group(number, open_slots(partials, self._gate)))
        except BaseExceptionGroup as errors:
            await self._handle_engine_loss(get_engine_loss(errors))

    async def reconnect(self, policy: Policy, context: RolloutContext) -> None:
        """Attach the restarted engine as a new policy; `run` may then be called again."""
        self._context = replace(context, halt=self._context.halt)
        self._gate.policy, self.is_lost = policy, False
        await asyncio.to_thread(self._queue.count_lost_engines, -1)
        await self.resume()

    async def collect(self, count: int) -> GenerationResult | None:
        """Wait until the next `count` groups are complete on all engines, and return this engine's share in order.

        Groups are numbered within the step, from 0. Returns None if all engines are lost.
        """
        first_number, end_number = self._num_collected, self._num_collected + count
        while await asyncio.to_thread(self._queue.count_complete, first_number) < count:
            if self.is_lost and await asyncio.to_thread(self._queue.count_lost_engines) == self._queue.num_engines:
                return None
            await asyncio.sleep(_POLL_S)
        numbers = sorted(number for number in self._complete_groups if number < end_number)
        rollouts = [
            rollout
            for number in numbers
            for rollout in to_rollouts(self._complete_groups.pop(number), self._admitted[number][2])
        ]
        now = time.monotonic()
        ages = tuple(now - self._start_times.pop(number) for number in numbers)
        for number in range(self._num_collected, end_number):
            del self._admitted[number]
        self._num_collected = end_number
        busy_seconds = self._gate.measure_busy_seconds()
        result = GenerationResult(
            rollouts,
            [],
            num_slots=self._gate.num_slots,
            seconds=now - self._collected_at,
            busy_seconds=busy_seconds - self._busy_seconds,
            group_ages=ages,
            num_interrupted=self._num_interrupted,
            num_restarted=self._num_restarted,
        )
        self._collected_at, self._busy_seconds = now, busy_seconds
        self._num_interrupted = self._num_restarted = 0
        return result

    async def pause(self, mode: OnWeightSync) -> None:
        """Free the policy for a weight sync until `resume`, see `RequestGate.pause`. A lost engine is free."""
        try:
            await self._gate.pause(mode)
        except EngineLost as lost:
            self._on_engine_lost(lost)
            await self._gate.wait_until(lambda: self.is_lost)
        if (busy_interval := self._gate.pop_busy_interval()) is not None:
            self._on_busy_interval(*busy_interval)

    async def resume(self) -> None:
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

    async def _run_group(self, number: int, slots: dict[int, RequestSlot]) -> None:
        deadline = asyncio.get_running_loop().time() + self._timeout
        group = self._active_groups[number]
        await run_group(group, slots, self._context, greedy=False, deadline=deadline)
        await self._queue_updates.run(self._finish(number))

    async def _finish(self, number: int) -> None:
        self._complete_groups[number] = tuple(self._active_groups.pop(number))
        await asyncio.to_thread(self._queue.mark_complete, number - self._admitted[number][2])

    async def _handle_engine_loss(self, error: EngineLost) -> None:
        self._on_engine_lost(error)
        await self._queue_updates.wait_all()
        unfinished = [ReturnedGroup.restart(number, group) for number, group in self._active_groups.items()]
        self._num_interrupted += sum(group.num_interrupted for group in unfinished)
        for group in (*unfinished, *self._pending_groups.values()):
            await asyncio.to_thread(self._queue.return_group, group)
        for number in self._active_groups:
            del self._start_times[number]
        self._active_groups, self._pending_groups = {}, {}
        await asyncio.to_thread(self._queue.count_lost_engines, 1)
        self.is_lost = True
        self._gate.notify()
