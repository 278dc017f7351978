"""Bound concurrent requests to the policy, and hold them back while it is asleep or gets new weights.

With a `CacheBudget`, conversations whose prefixes do not fit in the engine's KV cache wait, too.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from megarl.config import OnWeightSync
from megarl.engine.engine_protocol import (
    NOT_RECORDED,
    EngineLoad,
    Generation,
    LoadSource,
    Policy,
    RecordedPrefix,
    TokenCallback,
)
from megarl.engine.external_client import SharedClient
from megarl.rollout.cache_budget import UNLIMITED, CacheBudget, PrefillCost
from megarl.rollout.engine_usage import EngineUsage
from megarl.rollout.partial_rollouts import merge_turns
from megarl.types import Ids, Image, SamplingMask, as_token_ids

_LOAD_S = 1.0
"""Seconds between reads of the engine's load."""
_FIRST_LOAD_S = 0.2
"""Seconds from the first conversation until the first read."""
_MIN_PREFIX = 128
"""Shortest prefix whose loss counts. A page of the engine's cache may have as many tokens."""
_RETRY_S = 0.1
"""Seconds between repeated requests to stop the policy."""
OVERCOMMIT = 2
"""Maximum ratio of running conversations to engine slots; the excess waits for tools."""


LoadListener = Callable[[EngineLoad, int], None]
"""(load of this process' engine, running conversations), called each time that the load is read."""

_load_listener: LoadListener | None = None


def set_load_listener(listener: LoadListener | None) -> None:
    global _load_listener
    _load_listener = listener


class RequestGate:
    """Counts running conversations, idle ones among them, and open requests.

    Attributes:
        num_slots: conversations for which the policy has room
        num_idle: running conversations that do not need the policy, because tools are at work
        is_admitting: whether conversations may start
        budget: bounds the tokens of conversations that may send requests; None for no bound
        usage: observations of the engine since the last `pop_usage`
    """

    def __init__(self, policy: Policy, num_slots: int, budget: CacheBudget | None = None) -> None:
        self.policy, self.num_slots = policy, num_slots
        self.budget, self.usage, self.load = budget, EngineUsage(), EngineLoad()
        self.prefill_cost = PrefillCost()
        self._slots: dict[RequestSlot, None] = {}
        """Running conversations, in the order in which they started."""
        self._fitting: set[RequestSlot] | None = None
        """Conversations within the budget; None until they are counted again."""
        self.free_slots = asyncio.Semaphore(num_slots)
        self.num_conversations = self.num_idle = self.num_requests = 0
        self.is_admitting = True
        self._changed = asyncio.Event()
        self.open = asyncio.Event()
        self.open.set()
        self._busy_seconds, self._counted_at = 0.0, time.monotonic()
        self._busy_interval: tuple[float, float] | None = None

    async def wait_for_room(self) -> None:
        """Wait for room for another conversation."""
        await self.wait_until(self._has_room)

    def _has_room(self) -> bool:
        has_free_slot = self.num_conversations - self.num_idle < self.num_slots
        is_below_limit = self.num_conversations < OVERCOMMIT * self.num_slots
        is_open = has_free_slot and is_below_limit and self.is_admitting and self.open.is_set()
        return is_open and (self.budget is None or sum(self._count_tokens().values()) < self.budget.tokens)

    async def wait_until(self, is_met: Callable[[], bool]) -> None:
        """Wait until a condition holds, which is checked after each `notify`."""
        while not is_met():
            self._changed.clear()
            await self._changed.wait()

    def open_slot(self, num_tokens: int = 0) -> RequestSlot:
        """Add a conversation. num_tokens: its length so far, if known."""
        self.num_conversations += 1
        slot = RequestSlot(self, num_tokens)
        self._slots[slot] = None
        self.recount_fitting()
        return slot

    def remove_slot(self, slot: RequestSlot) -> None:
        """Remove a conversation, unless it has been removed."""
        if slot in self._slots:
            self.num_conversations -= 1
            del self._slots[slot]
            self.recount_fitting()

    # --- the budget

    def is_fitting(self, slot: RequestSlot) -> bool:
        """Return whether a conversation is within the budget."""
        if self.budget is None or self.budget.tokens == UNLIMITED:
            return True
        if self._fitting is None:
            tokens = self._count_tokens()
            self._fitting = set(list(tokens)[: self.budget.count_fitting(list(tokens.values()))])
        return slot in self._fitting

    def _count_tokens(self) -> dict[RequestSlot, int]:
        """Return the lengths of conversations with a place in the budget, the oldest first."""
        return {slot: slot.num_tokens for slot in self._slots if not self.has_lost_place(slot)}

    def has_lost_place(self, slot: RequestSlot) -> bool:
        """Return whether a conversation has waited for tools for longer than its prefix is worth its place."""
        return slot.idle_since is not None and _now() - slot.idle_since > self.patience_s

    @property
    def patience_s(self) -> float:
        """Seconds for which a conversation that waits for tools keeps its place in the budget."""
        return self.prefill_cost.patience_s(self.load.capacity)

    def recount_fitting(self) -> None:
        """Count anew which conversations are within the budget, when that is next asked."""
        self._fitting = None

    def count_response(self, reusable: int, generation: Generation, had_place: bool = True) -> None:
        """Adapt the budget to a response.

        reusable: tokens of the prompt that the engine has computed before. had_place: whether the conversation has had
        a place in the budget since then; otherwise the loss of its prefix says nothing about the budget.
        """
        is_continued = reusable >= _MIN_PREFIX
        is_evicted = is_continued and generation.cached < reusable / 2
        self.usage = self.usage.add_response(is_continued, is_evicted, generation.retractions)
        if self.budget is not None:
            tokens = list(self._count_tokens().values())
            is_lost = (is_evicted and had_place) or generation.retractions > 0
            self.budget = self.budget.update(is_lost, tokens, self.load)
        self.recount_fitting()

    async def observe_load(self) -> None:
        """Read the engine's load while requests are open, until cancelled."""
        await self.wait_until(lambda: self.num_conversations > 0)
        await asyncio.sleep(_FIRST_LOAD_S)
        while isinstance(self.policy, LoadSource):
            if self.num_requests and (load := await self.policy.read_load()) is not None:
                self.load, self.prefill_cost = load, self.prefill_cost.update(load)
                if _load_listener is not None:
                    _load_listener(load, self.num_conversations)
                waiting = [slot for slot in self._slots if slot.idle_since is None and not self.is_fitting(slot)]
                self.usage = self.usage.add_load(load, len(waiting), self.budget.tokens if self.budget else UNLIMITED)
            self.recount_fitting()  # conversations lose their places as time passes
            self.notify()
            await asyncio.sleep(_LOAD_S)

    def pop_usage(self) -> EngineUsage:
        """Return the observations of the engine since the last call."""
        usage, self.usage = self.usage, EngineUsage()
        return usage

    async def pause(self, mode: OnWeightSync) -> None:
        """Free the policy for a weight sync or for sleep; nothing starts until `reopen`. Raises EngineLost.

        `mode` says what becomes of running requests: abort them and continue later ("retract"), keep them in an engine
        that pauses itself ("in_place"), or let their conversations end ("wait").
        """
        if mode == "wait":
            self.is_admitting = False
            await self.wait_until(lambda: not self.num_conversations)
            return
        self.open.clear()
        for slot in self._slots:
            slot.forget_prefix()
        while self.num_requests and mode == "retract":
            await self.policy.stop()
            with suppress(TimeoutError):  # then repeat: a request may have been in flight
                async with asyncio.timeout(_RETRY_S):
                    await self.wait_until(lambda: not self.num_requests)

    def reopen(self) -> None:
        """Admit conversations and requests again, and continue aborted requests."""
        self.is_admitting = True
        self.open.set()
        self.notify()

    def measure_busy_seconds(self) -> float:
        """Return the seconds with open requests, summed over concurrent requests."""
        self.count_requests(0)
        return self._busy_seconds

    def pop_busy_interval(self) -> tuple[float, float] | None:
        """Return the start and end of request activity since the last call, or None if there was none."""
        self.count_requests(0)
        interval, self._busy_interval = self._busy_interval, None
        return interval

    def count_requests(self, increment: int) -> None:
        """Change the number of open requests by `increment`."""
        now = time.monotonic()
        if self.num_requests:
            self._busy_seconds += self.num_requests * (now - self._counted_at)
            self._busy_interval = (self._busy_interval or (self._counted_at, now))[0], now
        self.num_requests, self._counted_at = self.num_requests + increment, now
        self.notify()

    def notify(self) -> None:
        """Wake all waiters after a change."""
        self._changed.set()


class RequestSlot:
    """The policy as seen by one conversation, which waits for a free slot and for its place in the budget.

    A request aborted by a pause continues after it, if need be with new weights: its tokens are kept, and their keys
    and values are recomputed.

    Attributes:
        num_tokens: length of the conversation, as far as known
        idle_since: time of the event loop since which it does not need the policy; None if it does
    """

    def __init__(self, gate: RequestGate, num_tokens: int = 0) -> None:
        self._gate, self._is_idle = gate, False
        self.num_tokens = num_tokens
        self.idle_since: float | None = None
        self._prefix: tuple[Ids, int] | None = None
        """Tokens that the engine has computed, and the version of its weights; None if it may have dropped them."""
        self._requests: dict[object, Generation | None] = {}
        """The tokens so far of each request that waits or runs; an agent may send several at once."""

    @property
    def interrupted(self) -> list[Generation]:
        """The tokens so far of requests that a pause has aborted and that are not done."""
        return [generation for generation in self._requests.values() if generation is not None]

    async def generate(
        self,
        ids: Ids | Sequence[int],
        params: dict[str, Any],
        recorded: RecordedPrefix = NOT_RECORDED,
        on_tokens: TokenCallback | None = None,
        *,
        images: Sequence[Image] = (),
    ) -> Generation:
        self._requests[request := object()] = None
        had_place = not self._gate.has_lost_place(self)
        self._set_idle(is_idle=False)
        try:
            if not self._gate.is_fitting(self):
                had_place = False
                await self._gate.wait_until(lambda: self._gate.is_fitting(self))
            async with self._gate.free_slots:
                await self._gate.open.wait()
                known, self._prefix = self._prefix, None
                options: dict[str, Any] = {"images": images} if images else {}
                if isinstance(self._gate.policy, SharedClient):
                    options["conversation"] = self
                generation = await self._request(ids, params, recorded, on_tokens, options)
                while generation.finish_reason == "abort" and not self._gate.open.is_set():
                    new_ids, budget = generation.token_ids, params["max_new_tokens"] - len(generation.token_ids)
                    if len(new_ids) and int(new_ids[-1]) in params.get("stop_token_ids", ()):
                        # The response was complete before the abort.
                        return replace(generation, finish_reason="stop", abort_reason="")
                    if not budget:
                        return replace(generation, finish_reason="length", abort_reason="")
                    prefix = generation.extend_prefix(recorded)
                    context = np.concatenate([as_token_ids(ids), new_ids])
                    remaining = {**params, "max_new_tokens": budget}
                    self._requests[request] = generation if len(new_ids) else None
                    more = await self._request(context, remaining, prefix, on_tokens, options)
                    generation = merge_generations(generation, more)
                self._count_response(as_token_ids(ids), generation, known, had_place)
                return generation
        finally:
            del self._requests[request]
            self._set_idle(is_idle=not self._requests)

    def _count_response(self, ids: Ids, generation: Generation, known: tuple[Ids, int] | None, had_place: bool) -> None:
        """Adapt the budget. known: tokens that the engine had computed before the request, and by which weights."""
        reusable = 0
        if known is not None and known[1] == generation.weight_version and generation.cached >= 0:
            reusable = count_common_prefix(known[0], ids)
        tokens = np.concatenate([ids, as_token_ids(generation.token_ids)])
        self.num_tokens, self._prefix = len(tokens), (tokens, generation.weight_version)
        self._gate.count_response(reusable, generation, had_place)

    def forget_prefix(self) -> None:
        """Do not expect the conversation's beginning in the engine's prefix cache."""
        self._prefix = None

    async def _request(
        self,
        ids: Ids | Sequence[int],
        params: dict[str, Any],
        recorded: RecordedPrefix,
        on_tokens: TokenCallback | None,
        options: dict[str, Any],
    ) -> Generation:
        gate = self._gate
        await gate.open.wait()
        gate.count_requests(1)
        try:
            return await gate.policy.generate(ids, params, recorded, on_tokens, **options)
        finally:
            gate.count_requests(-1)

    def mark_idle(self) -> None:
        """Mark the conversation as not needing the policy until its next request."""
        self._set_idle(is_idle=True)

    def release(self) -> None:
        self._gate.remove_slot(self)
        self._set_idle(is_idle=False)

    def _set_idle(self, is_idle: bool) -> None:
        self._gate.num_idle += is_idle - self._is_idle
        if is_idle != self._is_idle:
            self.idle_since = _now() if is_idle else None
            self._gate.recount_fitting()
        self._is_idle = is_idle
        self._gate.notify()

    async def stop(self) -> None:
        await self._gate.policy.stop()


def _now() -> float:
    return asyncio.get_running_loop().time()


def count_common_prefix(first: Ids, second: Ids) -> int:
    """Return the number of leading tokens that two sequences have in common."""
    size = min(len(first), len(second))
    different = np.flatnonzero(first[:size] != second[:size])
    return int(different[0]) if len(different) else size


def merge_generations(first: Generation, second: Generation) -> Generation:
    """Join an aborted generation with its continuation, whose record replaces the first one's if it begins with it."""
    if not second.has_record:
        recorded = [first]
    elif first.has_record and second.record_start > first.record_start:
        recorded = [first, second]
    else:
        recorded = [second]
    turn = merge_turns(first.to_turn(), second.to_turn())
    routings = [part for part in (part.routing for part in recorded) if part is not None]
    indices = [part for part in (part.sparse_indices for part in recorded) if part is not None]
    masks = [part for part in (first.sampling_mask, second.sampling_mask) if part is not None]
    return replace(
        second,
        token_ids=turn.token_ids,
        logprobs=turn.logprobs,
        weight_version=turn.weight_version,
        versions=turn.versions,
        routing=torch.cat(routings) if routings else None,
        sparse_indices=torch.cat(indices) if indices else None,
        record_start=recorded[0].record_start,
        sampling_mask=SamplingMask.concat(masks) if masks else None,
        drafted=first.drafted + second.drafted,
        accepted=first.accepted + second.accepted,
        cached=turn.cached_tokens,
        retractions=first.retractions + second.retractions,
    )
