"""`RequestGate`: responses that a weight sync stops, resumes and merges."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from scripted import END, ScriptedPolicy

from megarl.engine.engine_protocol import NOT_RECORDED, EngineLoad, Generation, RecordedPrefix
from megarl.rollout import request_gate
from megarl.rollout.cache_budget import UNLIMITED, CacheBudget, PrefillCost
from megarl.rollout.engine_usage import EngineUsage
from megarl.rollout.request_gate import RequestGate, RequestSlot, merge_generations
from megarl.types import SamplingMask, as_token_ids


def make_part(tokens: Sequence[int], version: int, finish: Any = "abort", first: int = 0, **kwargs: Any) -> Generation:
    logprobs = np.array([-token / 10 for token in tokens], np.float32)
    routing = torch.arange(first, first + len(tokens)).view(-1, 1, 1)
    return Generation(as_token_ids(tokens), logprobs, finish, version, routing=routing, record_start=first, **kwargs)


def test_merges_two_parts_into_one_generation() -> None:
    first_part = make_part([1, 2], 3, drafted=4, accepted=1, cached=3)
    merged = merge_generations(first_part, make_part([5], 4, "stop", first=2, drafted=2, accepted=2, cached=9))
    assert merged.token_ids.tolist() == [1, 2, 5] and merged.finish_reason == "stop"
    assert np.array_equal(merged.logprobs, np.array([-0.1, -0.2, -0.5], np.float32))
    assert merged.versions == ((3, 2), (4, 1)) and merged.weight_version == 4
    assert merged.routing is not None and merged.routing.flatten().tolist() == [0, 1, 2]
    assert (merged.drafted, merged.accepted) == (6, 3)
    assert merged.cached == 3 and merge_generations(make_part([], 3, cached=3), make_part([5], 3, cached=9)).cached == 9


def test_merges_sampling_masks() -> None:
    sets = SamplingMask.from_rows([[1], [2, 3]]), SamplingMask.from_rows([[5, 6]])
    merged = merge_generations(
        make_part([1, 2], 3, sampling_mask=sets[0]), make_part([5], 4, "stop", sampling_mask=sets[1])
    )
    assert merged.sampling_mask is not None
    assert (merged.sampling_mask.counts.tolist(), merged.sampling_mask.ids.tolist()) == ([1, 2, 2], [1, 2, 3, 5, 6])
    assert merge_generations(make_part([1], 3), make_part([2], 3)).sampling_mask is None


def test_version_spans_of_merged_parts() -> None:
    assert merge_generations(make_part([1], 3), make_part([2], 3)).versions == ()
    empty = make_part([], 9)
    assert (
        merge_generations(empty, make_part([2], 3)).weight_version == 3
        and merge_generations(make_part([1], 3), empty).weight_version == 3
    )
    assert merge_generations(merge_generations(make_part([1], 1), make_part([2], 2)), make_part([3], 2)).versions == (
        (1, 1),
        (2, 2),
    )


class StoppedPolicy(ScriptedPolicy):
    """A policy whose first response waits for `stop`."""

    def __init__(self, first: Generation, *later_parts: Generation) -> None:
        super().__init__(*later_parts)
        self.first, self.stopped = first, asyncio.Event()

    async def generate(
        self,
        context: Sequence[int],
        params: dict[str, Any],
        recorded: RecordedPrefix = NOT_RECORDED,
        on_tokens: Any = None,
    ) -> Generation:
        if not self.stopped.is_set():
            self.requests.append((list(context), params))
            await self.stopped.wait()
            return self.first
        self.requests.append((list(context), {**params, "recorded": recorded}))
        return self.lines[0]  # type: ignore[return-value]

    async def stop(self) -> None:
        self.stopped.set()


def generate_through_sync(
    first: Generation, *later_parts: Generation
) -> tuple[Generation, list[tuple[list[int], dict[str, Any]]]]:
    async def run() -> tuple[Generation, Any]:
        policy = StoppedPolicy(first, *later_parts)
        gate = RequestGate(policy, 1)
        request = asyncio.create_task(
            gate.open_slot().generate([7, 8], {"max_new_tokens": 3, "stop_token_ids": [END]}, RecordedPrefix(1, 0))
        )
        while not gate.num_requests:
            await asyncio.sleep(0.001)
        await gate.pause("retract")
        assert gate.num_requests == 0
        before = len(policy.requests)
        await asyncio.sleep(0.01)
        assert len(policy.requests) == before == 1  # the closed gate sends no request
        gate.reopen()
        return await request, policy.requests

    return asyncio.run(run())


def test_resumes_with_the_remaining_token_budget() -> None:
    merged, requests = generate_through_sync(make_part([11, 12], 0, first=1), make_part([5], 1, "length", first=3))
    assert merged.token_ids.tolist() == [11, 12, 5] and merged.versions == ((0, 2), (1, 1))
    assert requests[1] == (
        [7, 8, 11, 12],
        {"max_new_tokens": 1, "stop_token_ids": [END], "recorded": RecordedPrefix(3, 0)},
    )


def test_record_of_newer_weights_replaces_that_of_older_ones() -> None:
    """Version 1 reads the two tokens of the prompt and the three of version 0 again, and records all of them."""
    reread = replace(make_part([5], 1, "length"), routing=torch.arange(10, 14).view(-1, 1, 1))
    merged, _ = generate_through_sync(make_part([11, 12], 0, first=1), reread)
    assert merged.record_start == 0 and merged.routing is not None
    assert merged.routing.flatten().tolist() == [10, 11, 12, 13]
    assert merged.extend_prefix(RecordedPrefix(1, 0)) == RecordedPrefix(4, 1)
    unrecorded = replace(make_part([], 2), routing=None)
    assert merge_generations(merged, unrecorded).extend_prefix(NOT_RECORDED) == RecordedPrefix(4, 1)
    assert unrecorded.extend_prefix(RecordedPrefix(1, 0)) == RecordedPrefix(1, 0)


def test_prefix_is_recorded_again_by_other_weights() -> None:
    assert RecordedPrefix(5, 3).next_start(3) == 5
    assert RecordedPrefix(5, 3).next_start(4) == 0 == NOT_RECORDED.next_start(4) == NOT_RECORDED.next_start(None)


def test_does_not_resume_a_finished_response() -> None:
    merged, requests = generate_through_sync(make_part([11, END], 0))
    assert merged.finish_reason == "stop" and merged.token_ids.tolist() == [11, END] and len(requests) == 1
    merged, requests = generate_through_sync(make_part([11, 12, 13], 0))
    assert merged.finish_reason == "length" and len(requests) == 1


def test_idle_conversation_makes_room_for_another() -> None:
    async def run() -> list[bool]:
        gate = RequestGate(ScriptedPolicy("3"), 1)
        slot = gate.open_slot()
        waiting = asyncio.create_task(gate.wait_for_room())
        await asyncio.sleep(0.01)
        result = [waiting.done()]
        slot.mark_idle()
        await asyncio.sleep(0.01)
        result.append(waiting.done())
        gate.open_slot()
        assert gate.num_conversations == 2 and gate.num_idle == 1
        waiting = asyncio.create_task(gate.wait_for_room())
        await asyncio.sleep(0.01)
        result.append(waiting.done())  # at most two conversations per slot
        slot.release()
        assert gate.num_idle == 0
        waiting.cancel()
        return result

    assert asyncio.run(run()) == [False, True, False]


class CachedPolicy(ScriptedPolicy):
    """A policy with a load, that finds `cached` tokens of each prompt in its cache."""

    def __init__(self, cached: int = 0, retractions: int = 0) -> None:
        super().__init__("3")
        self.cached, self.retractions = cached, retractions

    async def generate(self, *args: Any, **kwargs: Any) -> Generation:
        generation = await super().generate(*args, **kwargs)
        return replace(generation, cached=self.cached, retractions=self.retractions)

    async def read_load(self) -> EngineLoad:
        return LOAD


LOAD = EngineLoad(num_running=3, cache_usage=0.5, capacity=1000)
PROMPT_IDS = as_token_ids(range(300))


async def take_turns(slot: RequestSlot, turns: int) -> None:
    ids = PROMPT_IDS
    for _ in range(turns):
        ids = np.concatenate([ids, as_token_ids((await slot.generate(ids, {"max_new_tokens": 4})).token_ids)])


@pytest.mark.parametrize(("cached", "retractions", "is_lowered"), [(0, 0, True), (290, 0, False), (290, 1, True)])
def test_lost_prefixes_and_retractions_lower_the_budget(cached: int, retractions: int, is_lowered: bool) -> None:
    async def run() -> RequestGate:
        gate = RequestGate(CachedPolicy(cached, retractions), 4, CacheBudget())
        gate.load, gate.prefill_cost = LOAD, PrefillCost(1.0)
        await take_turns(gate.open_slot(len(PROMPT_IDS)), 9)
        return gate

    gate = asyncio.run(run())
    assert gate.budget is not None and (gate.budget.tokens < UNLIMITED) == is_lowered
    usage = gate.pop_usage()
    assert (usage.num_continued, usage.num_evicted) == (8, 0 if cached else 8)
    assert usage.num_retractions == 9 * retractions and gate.pop_usage() == EngineUsage()


def test_a_prefix_is_not_expected_after_a_pause() -> None:
    async def run() -> EngineUsage:
        gate = RequestGate(CachedPolicy(), 4)
        slot = gate.open_slot()
        await take_turns(slot, 1)
        await gate.pause("retract")
        gate.reopen()
        await take_turns(slot, 1)
        return gate.pop_usage()

    assert asyncio.run(run()).num_continued == 0


def test_youngest_conversation_waits_until_the_oldest_has_ended() -> None:
    async def run() -> None:
        policy = CachedPolicy(cached=300)
        gate = RequestGate(policy, 4, CacheBudget(700.0))
        gate.load, gate.prefill_cost = LOAD, PrefillCost(1.0)
        slots = [gate.open_slot(300) for _ in range(3)]
        assert [gate.is_fitting(slot) for slot in slots] == [True, True, False]
        waiting = asyncio.create_task(take_turns(slots[2], 1))
        await take_turns(slots[0], 2)
        assert not waiting.done() and len(policy.requests) == 2
        slots[0].release()
        await waiting
        assert len(policy.requests) == 3

    asyncio.run(run())


def test_conversation_that_waits_long_for_a_tool_loses_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_gate, "_LOAD_S", 0.01)

    async def run() -> None:
        policy = CachedPolicy(cached=300)
        gate = RequestGate(policy, 4, CacheBudget(500.0))
        observer = asyncio.create_task(gate.observe_load())
        gate.load, gate.prefill_cost = LOAD, PrefillCost(1e-4)  # the patience is 25 ms
        first, second = gate.open_slot(300), gate.open_slot(300)
        first.mark_idle()
        assert not gate.is_fitting(second)
        async with asyncio.timeout(10.0):
            await take_turns(second, 2)
        assert gate.has_lost_place(first)
        observer.cancel()

    asyncio.run(run())


def test_observes_the_load_while_requests_are_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_gate, "_LOAD_S", 0.001)
    monkeypatch.setattr(request_gate, "_FIRST_LOAD_S", 0.001)

    async def run() -> EngineUsage:
        gate = RequestGate(CachedPolicy(), 4)
        observer = asyncio.create_task(gate.observe_load())
        while not gate.usage.num_reads:
            await take_turns(gate.open_slot(), 1)
        observer.cancel()
        return gate.pop_usage()

    usage = asyncio.run(run())
    assert usage.running == 3 * usage.num_reads and usage.max_cache_usage == 0.5


def test_evictions_during_a_long_tool_call_count_but_do_not_lower_the_budget() -> None:
    async def run() -> RequestGate:
        gate = RequestGate(CachedPolicy(cached=0), 4, CacheBudget())
        gate.load, gate.prefill_cost = LOAD, PrefillCost(1e-12)  # no patience
        await take_turns(gate.open_slot(len(PROMPT_IDS)), 9)
        return gate

    gate = asyncio.run(run())
    assert gate.usage.num_evicted == 8 and gate.budget is not None and gate.budget.tokens == UNLIMITED


def test_oldest_conversation_has_its_place_again_after_a_long_tool_call() -> None:
    async def run() -> None:
        gate = RequestGate(CachedPolicy(cached=300), 4, CacheBudget(500.0))
        gate.load, gate.prefill_cost = LOAD, PrefillCost(1e-4)  # the patience is 25 ms
        first, second = gate.open_slot(300), gate.open_slot(300)
        first.mark_idle()
        await asyncio.sleep(0.03)
        gate.recount_fitting()
        assert gate.is_fitting(second)
        async with asyncio.timeout(10.0):
            await take_turns(first, 1)
        assert not gate.is_fitting(second)
        for _ in range(2):
            first.release()
        assert gate.num_conversations == 1 and gate.is_fitting(second)

    asyncio.run(run())
