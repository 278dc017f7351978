"""`RequestGate`: responses that a weight sync stops, resumes and merges."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from scripted import END, ScriptedPolicy

from megarl.engine.engine_protocol import NOT_RECORDED, Generation, RecordedPrefix
from megarl.rollout.request_gate import RequestGate, merge_generations
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
