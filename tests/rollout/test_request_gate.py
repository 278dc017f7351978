"""Answers that are cut off and gone on with, and what they are together."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from scripted import END, Script

from megarl.engine.engine_protocol import Generation
from megarl.rollout.request_gate import RequestGate, merge_generations
from megarl.types import SamplingMask, as_token_ids


def part(tokens: Sequence[int], version: int, finish: Any = "abort", first: int = 0, **more: Any) -> Generation:
    logprobs = np.array([-token / 10 for token in tokens], np.float32)
    routing = torch.arange(first, first + len(tokens)).view(-1, 1, 1)
    return Generation(as_token_ids(tokens), logprobs, finish, version, routing=routing, **more)


def test_two_parts_are_one_answer_by_hand() -> None:
    begun = part([1, 2], 3, drafted=4, accepted=1, cached=3)
    said = merge_generations(begun, part([5], 4, "stop", first=2, drafted=2, accepted=2, cached=9))
    assert said.token_ids.tolist() == [1, 2, 5] and said.finish_reason == "stop"
    assert np.array_equal(said.logprobs, np.array([-0.1, -0.2, -0.5], np.float32))
    assert said.versions == ((3, 2), (4, 1)) and said.weight_version == 4
    assert said.routing is not None and said.routing.flatten().tolist() == [0, 1, 2]
    assert (said.drafted, said.accepted) == (6, 3)
    assert said.cached == 3 and merge_generations(part([], 3, cached=3), part([5], 3, cached=9)).cached == 9


def test_what_could_have_been_sampled_is_joined() -> None:
    sets = SamplingMask.from_rows([[1], [2, 3]]), SamplingMask.from_rows([[5, 6]])
    said = merge_generations(part([1, 2], 3, sampling_mask=sets[0]), part([5], 4, "stop", sampling_mask=sets[1]))
    assert said.sampling_mask is not None
    assert (said.sampling_mask.counts.tolist(), said.sampling_mask.ids.tolist()) == ([1, 2, 2], [1, 2, 3, 5, 6])
    assert merge_generations(part([1], 3), part([2], 3)).sampling_mask is None


def test_parts_of_one_version_have_no_spans_and_a_part_without_tokens_no_version() -> None:
    assert merge_generations(part([1], 3), part([2], 3)).versions == ()
    nothing = part([], 9)
    assert (
        merge_generations(nothing, part([2], 3)).weight_version == 3
        and merge_generations(part([1], 3), nothing).weight_version == 3
    )
    assert merge_generations(merge_generations(part([1], 1), part([2], 2)), part([3], 2)).versions == ((1, 1), (2, 2))


class Cut(Script):
    """A policy whose first answer waits to be stopped."""

    def __init__(self, first: Generation, *later: Generation) -> None:
        super().__init__(*later)
        self.first, self.stopped = first, asyncio.Event()

    async def generate(
        self, context: Sequence[int], params: dict[str, Any], routed: int = 0, on_tokens: Any = None
    ) -> Generation:
        if not self.stopped.is_set():
            self.asked.append((list(context), params))
            await self.stopped.wait()
            return self.first
        self.asked.append((list(context), {**params, "routed": routed}))
        return self.lines[0]  # type: ignore[return-value]

    async def stop(self) -> None:
        self.stopped.set()


def through_a_push(first: Generation, *later: Generation) -> tuple[Generation, list[tuple[list[int], dict[str, Any]]]]:
    async def run() -> tuple[Generation, Any]:
        policy = Cut(first, *later)
        room = RequestGate(policy, 1, asyncio.Event())
        requested = asyncio.create_task(
            room.open_slot().generate([7, 8], {"max_new_tokens": 3, "stop_token_ids": [END]}, routed=1)
        )
        while not room.num_requests:
            await asyncio.sleep(0.001)
        await room.pause("retract")
        assert room.num_requests == 0
        before = len(policy.asked)
        await asyncio.sleep(0.01)
        assert len(policy.asked) == before == 1  # nothing is asked while it is closed
        room.reopen()
        return await requested, policy.asked

    return asyncio.run(run())


def test_what_is_cut_off_is_gone_on_with_by_the_rest_of_its_budget() -> None:
    said, requested = through_a_push(part([11, 12], 0), part([5], 1, "length", first=2))
    assert said.token_ids.tolist() == [11, 12, 5] and said.versions == ((0, 2), (1, 1))
    assert requested[1] == ([7, 8, 11, 12], {"max_new_tokens": 1, "stop_token_ids": [END], "routed": 3})


def test_what_was_done_when_it_was_cut_off_is_done() -> None:
    said, requested = through_a_push(part([11, END], 0))
    assert said.finish_reason == "stop" and said.token_ids.tolist() == [11, END] and len(requested) == 1
    said, requested = through_a_push(part([11, 12, 13], 0))
    assert said.finish_reason == "length" and len(requested) == 1


def test_a_conversation_that_rests_leaves_room_for_another() -> None:
    async def run() -> list[bool]:
        room = RequestGate(Script("3"), 1, asyncio.Event())
        seat = room.open_slot()
        waiting = asyncio.create_task(room.wait_for_room())
        await asyncio.sleep(0.01)
        result = [waiting.done()]
        seat.mark_idle()
        result.append(await waiting)
        room.open_slot()
        assert room.num_conversations == 2 and room.num_idle == 1
        waiting = asyncio.create_task(room.wait_for_room())
        await asyncio.sleep(0.01)
        result.append(waiting.done())  # two for one place are the most
        seat.release()
        assert room.num_idle == 0
        waiting.cancel()
        return result

    assert asyncio.run(run()) == [False, True, False]
