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

from megarl.config import OnWeightSync
from megarl.engine.engine_loss import EngineLost
from megarl.engine.generation import Policy
from megarl.rollout.conversation import RolloutContext
from megarl.rollout.group_queue import GroupQueue
from megarl.rollout.partial_rollouts import PartialRollout
from megarl.rollout.request_gate import RequestGate, RequestSlot
from megarl.rollout.scheduler import (
    GenerationResult,
    Group,
    ReturnedGroup,
    ShieldedTasks,
    find_engine_loss,
    find_first_error,
    make_group,
    open_slots,
    restart_unfinished,
    run_group,
    to_rollouts,
    wait_forever,
)
from megarl.types import Prompt

_POLL_S = 0.05
"""How often it is asked whether a step's groups are complete, on whichever engine."""
_RETURNED_POLL_S = 0.5
"""How often an engine that has room looks for what another, which is lost, has given back."""

OnBusyInterval = Callable[[float, float], None]
"""Told from when to when the engine had something to do, in time.monotonic's seconds."""


class GroupStream:
    """All of it is for one event loop, in which `run` goes on.

    tickets: without an end, shared by the engines. groups: that it has room for at once, with so many samples each;
    `config.concurrency` bounds it, too. seconds: that a conversation may take. lost: is told where the engine is lost.
    """

    def __init__(
        self,
        tickets: GroupQueue,
        policy: Policy,
        around: RolloutContext,
        *,
        samples: int,
        groups: int,
        seconds: float,
        at_work: OnBusyInterval = lambda began, ended: None,
        lost: Callable[[EngineLost], None] = lambda lost: None,
    ) -> None:
        self._queue, self._context = tickets, around
        self._samples, self._timeout, self._on_busy_interval, self._on_engine_lost = samples, seconds, at_work, lost
        self._gate = RequestGate(policy, max(1, min(around.config.concurrency, samples * groups)), around.halt)
        self._admitted: dict[int, tuple[Prompt, int, int]] = {}
        """By number: the prompt, the seed of its step, and which group of the step it is."""
        self._num_admitted = self._num_collected = 0
        self._pending_groups: dict[int, ReturnedGroup] = {}
        """What this engine is to begin when it is admitted, by number."""
        self._active_groups: dict[int, list[PartialRollout]] = {}
        self._complete_groups: dict[int, Group] = {}
        self._start_times: dict[int, float] = {}
        """When each of this engine's groups was begun, of those that no step has taken."""
        self._queue_updates = ShieldedTasks()
        self.is_lost = False
        """Whether its engine is, and `reconnect` has not been called since."""
        self._num_interrupted = self._num_restarted = 0
        self._changed = asyncio.Condition()
        self._collected_at, self._busy_seconds = time.monotonic(), 0.0

    async def admit(self, prompts: Sequence[Prompt], seed: int) -> None:
        """The groups of a further step may be begun; their seeds are those that the step's own would have."""
        for group, prompt in enumerate(prompts):
            self._admitted[self._num_admitted + group] = prompt, seed, group
        self._num_admitted += len(prompts)
        await self._notify()

    async def run(self, watch: Callable[[], Coroutine[Any, Any, None]] = wait_forever) -> None:
        """Begin what is admitted, until this is cancelled. Returns where the engine is lost, as the policy or `watch`
        say by EngineLost: what is complete stays, all else is given back, for whichever engine has room."""
        try:
            async with asyncio.TaskGroup() as talks:
                talks.create_task(watch())
                while await self._gate.wait_for_room():
                    await self._queue_updates.run(self._claim_group())
                    if (number := min(self._pending_groups, default=self._num_admitted)) >= self._num_admitted:
                        await self._wait_for_group()
                        continue
                    await self._gate.wait_for_room()  # a pause may have begun meanwhile
                    prompt, seed, group = self._admitted[number]
                    waiting = self._pending_groups.pop(number)
                    begun = waiting.group or make_group(prompt, self._context.chat, seed, group, self._samples)
                    self._num_restarted += waiting.num_interrupted
                    self._active_groups[number], self._start_times[number] = list(begun), time.monotonic()
                    talks.create_task(self._run_group(number, open_slots(begun, self._gate)))
        except BaseExceptionGroup as failed:
            lost = find_engine_loss(failed)
            if lost is None:
                raise find_first_error(failed) from None
            await self._handle_engine_loss(lost)

    async def reconnect(self, policy: Policy, around: RolloutContext) -> None:
        """The engine is there again, as another policy: `run` may be called anew."""
        self._context = replace(around, halt=self._context.halt)
        self._gate.policy, self.is_lost = policy, False
        await asyncio.to_thread(self._queue.count_lost_engines, -1)
        await self.resume()

    async def collect(self, count: int) -> GenerationResult | None:
        """Of the next `count` groups those that are this engine's, in order, when all of these are complete, here or
        elsewhere. Their rollouts are numbered within the step, from 0 on. None where no engine is left."""
        first, last = self._num_collected, self._num_collected + count
        while await asyncio.to_thread(self._queue.count_complete, first) < count:
            if self.is_lost and await asyncio.to_thread(self._queue.count_lost_engines) == self._queue.num_engines:
                return None
            await asyncio.sleep(_POLL_S)
        taken = sorted(number for number in self._complete_groups if number < last)
        rollouts = [
            one for number in taken for one in to_rollouts(self._complete_groups.pop(number), self._admitted[number][2])
        ]
        now = time.monotonic()
        ages = tuple(now - self._start_times.pop(number) for number in taken)
        for number in range(self._num_collected, last):
            del self._admitted[number]
        self._num_collected = last
        (before, self._collected_at), (was, self._busy_seconds) = (
            (self._collected_at, now),
            (self._busy_seconds, self._gate.measure_busy_seconds()),
        )
        (gone, self._num_interrupted), (again, self._num_restarted) = (
            (self._num_interrupted, 0),
            (self._num_restarted, 0),
        )
        slots, seconds = self._gate.num_slots, now - before
        busy = self._busy_seconds - was
        return GenerationResult(
            rollouts,
            [],
            num_slots=slots,
            seconds=seconds,
            busy_seconds=busy,
            group_ages=ages,
            num_interrupted=gone,
            num_restarted=again,
        )

    async def pause(self, how: OnWeightSync) -> None:
        """Have the policy free for other weights: nothing is begun until `resume`. What is under way is cut off, and
        gone on with then; or stays as it is, in an engine that pauses itself; or is waited for. An engine that is lost
        is free."""
        if how == "wait":
            self._gate.is_admitting = False
            await self._gate.drain()
        else:
            self._gate.close()
            if how == "retract":
                try:
                    await self._gate.abort_requests()
                except EngineLost as lost:
                    self._on_engine_lost(lost)
                    async with self._changed:
                        await self._changed.wait_for(lambda: self.is_lost)
        if (worked := self._gate.pop_busy_interval()) is not None:
            self._on_busy_interval(*worked)

    async def resume(self) -> None:
        self._gate.reopen()

    async def _claim_group(self) -> None:
        """Get a group to begin: one that a lost engine has given back, else one that nobody has begun."""
        back: ReturnedGroup | None = await asyncio.to_thread(self._queue.claim_returned)
        if back is not None:
            self._pending_groups[back.number] = back
        elif not self._pending_groups:
            number = await asyncio.to_thread(self._queue.claim)
            assert number is not None, "the tickets of a stream have no end"
            self._pending_groups[number] = ReturnedGroup(number, None)

    async def _run_group(self, number: int, seats: dict[int, RequestSlot]) -> None:
        deadline = asyncio.get_running_loop().time() + self._timeout
        group = self._active_groups[number]
        await run_group(group, seats, self._context, greedy=False, deadline=deadline)
        await self._queue_updates.run(self._finish(number))

    async def _finish(self, number: int) -> None:
        self._complete_groups[number] = tuple(self._active_groups.pop(number))
        await asyncio.to_thread(self._queue.mark_complete, number - self._admitted[number][2])

    async def _handle_engine_loss(self, lost: EngineLost) -> None:
        self._on_engine_lost(lost)
        await self._queue_updates.wait_all()
        for number, begun in self._active_groups.items():
            group = restart_unfinished(begun)
            gone = sum(one.status is None for one in group)
            self._num_interrupted += gone
            await asyncio.to_thread(self._queue.return_group, ReturnedGroup(number, group, gone))
            del self._start_times[number]
        for waiting in self._pending_groups.values():
            await asyncio.to_thread(self._queue.return_group, waiting)
        self._active_groups, self._pending_groups = {}, {}
        await asyncio.to_thread(self._queue.count_lost_engines, 1)
        self.is_lost = True
        await self._notify()

    async def _wait_for_group(self) -> None:
        """Wait for news, or for as long as it takes until something may have been given back."""
        try:
            async with asyncio.timeout(_RETURNED_POLL_S), self._changed:
                await self._changed.wait_for(
                    lambda: min(self._pending_groups, default=self._num_admitted) < self._num_admitted
                )
        except TimeoutError:
            pass

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()
