"""Generation that goes on beside training: what a step gets is what it would have got by itself, never older than it
may be, whoever is slow, and however often the weights are replaced meanwhile."""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from scripted import CHAT, CONFIG, PROMPT, Writer, begun, parse

from megarl.config import OnWeightSync
from megarl.environments.process_sessions import EnvironmentPool
from megarl.environments.protocol import ToolResult
from megarl.rollout.conversation import RolloutContext, run_conversation
from megarl.rollout.group_queue import UNLIMITED, GroupQueue, LocalKVStore
from megarl.rollout.group_stream import GroupStream
from megarl.rollout.scheduler import gather_rollouts
from megarl.types import Rollout

GROUPS, SAMPLES, STEPS = 4, 2, 3
STEPS_PROMPTS = [
    [
        replace(PROMPT, id=f"{step}/{i}", messages=({"role": "user", "content": f"{step} and {i}?"},))
        for i in range(GROUPS)
    ]
    for step in range(STEPS)
]


class Calculator(EnvironmentPool):
    """Tools that take a moment, without a process."""

    def __init__(self) -> None:
        super().__init__(CHAT.catalog, 60.0, 1)

    async def call_tool(self, name: str, arguments: dict[str, Any]) -> ToolResult:
        await asyncio.sleep(random.random() * 0.002)
        return ToolResult(str(len(arguments["expression"])), True)


def surroundings() -> RolloutContext:
    return RolloutContext(CHAT, Calculator(), parse, replace(CONFIG, max_turns=4, concurrency=6))


@cache
def by_itself(step: int) -> list[Rollout]:
    """What the step's own generation has, by weights of version `step`."""
    prompts, writer = STEPS_PROMPTS[step], Writer(version=step, pause=0)
    gathered = gather_rollouts(
        prompts,
        GroupQueue(GROUPS),
        writer,
        surroundings(),
        samples=SAMPLES,
        greedy=False,
        seed=100 + step,
        version=step,
    )
    return asyncio.run(gathered).rollouts


@cache
def alone(step: int, group: int) -> list[int]:
    """The tokens of a conversation that nothing has stopped."""
    prompt = STEPS_PROMPTS[step][group]
    return asyncio.run(run_conversation(begun(prompt), Writer(pause=0), surroundings(), {})).token_ids.tolist()


async def train(
    writers: list[Writer], lag: int, how: OnWeightSync, seconds_a_step: float = 0.05
) -> tuple[list[list[Rollout]], list[int]]:
    """The rollouts of each step, with a push after each; and after each push how many groups had been begun."""
    counts, steps, begun = LocalKVStore(), [], []
    streams = [
        GroupStream(
            GroupQueue(UNLIMITED, len(writers), counts),
            writer,
            surroundings(),
            samples=SAMPLES,
            max_groups=-(-GROUPS * (lag + 1) // len(writers)),
            timeout=60.0,
        )
        for writer in writers
    ]
    at_work = [asyncio.create_task(stream.run()) for stream in streams]
    admitted = 0

    async def admit(last: int) -> None:
        nonlocal admitted
        while admitted < min(last, STEPS):
            for stream in streams:
                await stream.admit(STEPS_PROMPTS[admitted], 100 + admitted)
            admitted += 1

    try:
        for step in range(STEPS):
            await admit(step + 1 + lag)
            selected = await asyncio.gather(*(stream.collect(GROUPS) for stream in streams))
            gathered = [part for part in selected if part is not None]
            steps.append(sorted((item for part in gathered for item in part.rollouts), key=lambda item: item.group))
            assert all(0 <= part.busy_seconds <= part.num_slots * part.seconds + 0.1 for part in gathered)
            assert sum(len(part.group_ages) for part in gathered) == GROUPS
            await asyncio.sleep(random.random() * seconds_a_step)
            await asyncio.gather(*(stream.pause(how) for stream in streams))
            begun.append(min(counts.add("groups/taken", 0), admitted * GROUPS))
            for writer in writers:
                assert how == "in_place" or writer.at_once == 0
                writer.weight_version = step + 1
            await asyncio.gather(*(stream.resume() for stream in streams))
    finally:
        for task in at_work:
            task.cancel()
        await asyncio.gather(*at_work, return_exceptions=True)
    return steps, begun


@pytest.mark.parametrize("engines", [1, 3])
def test_at_lag_0_a_step_has_what_its_own_generation_has(engines: int) -> None:
    """Every rollout with every figure, in the same order: the same prompts, seeds, tokens, log-probs and versions."""
    steps, begun = asyncio.run(train([Writer(pause=0.0002) for _ in range(engines)], 0, "retract"))
    for step, rollouts in enumerate(steps):
        assert rollouts == by_itself(step)
    assert begun == [GROUPS * (step + 1) for step in range(STEPS)]


@pytest.mark.parametrize("how", ["retract", "wait"])
@pytest.mark.parametrize(("engines", "lag"), [(1, 1), (2, 1), (3, 2)])
def test_answers_that_go_on_through_pushes_are_whole_and_never_too_old(
    engines: int, lag: int, how: OnWeightSync
) -> None:
    random.seed(f"{engines} {lag} {how}")
    writers = [Writer(pause=0.0002 * 4**number) for number in range(engines)]  # one slower than the other
    steps, begun = asyncio.run(train(writers, lag, how))
    mixed = 0
    for step, rollouts in enumerate(steps):
        mine = by_itself(step)
        assert [(item.prompt.id, item.group, item.seed, item.status) for item in rollouts] == [
            (item.prompt.id, item.group, item.seed, item.status) for item in mine
        ]
        for rollout in rollouts:
            assert rollout.token_ids.tolist() == alone(step, rollout.group)
            chosen = [run for turn in rollout.turns if turn.is_action for run in turn.version_spans]
            versions = [version for version, _ in chosen]
            assert versions == sorted(versions) and 0 <= step - versions[0] <= lag and versions[-1] <= step
            assert how == "retract" or all(not turn.versions for turn in rollout.turns)
            mixed += len(set(versions)) > 1
            assert rollout.routing is not None  # of each token once, in its place
            assert rollout.routing.flatten().tolist() == list(range(rollout.num_tokens - 1))
    assert mixed if how == "retract" else not mixed
    assert all(count <= GROUPS * min(STEPS, step + 1 + lag) for step, count in enumerate(begun))
    assert begun[0] > GROUPS  # something of the next step's was begun while the first was trained on


async def streamed(writers: list[Writer], steps: int) -> tuple[list[list[Rollout]], list[int]]:
    """The rollouts of each step, where engines that are lost stay so as long as there are others; and how many
    conversations were lost, and begun anew."""
    counts, result, numbers = LocalKVStore(), [], [0, 0]
    names: dict[str, Any] = dict(samples=SAMPLES, max_groups=GROUPS, timeout=60.0)
    streams = [
        GroupStream(GroupQueue(UNLIMITED, len(writers), counts), writer, surroundings(), **names) for writer in writers
    ]
    at_work = [asyncio.create_task(stream.run()) for stream in streams]
    for step in range(steps):
        for stream in streams:
            await stream.admit(STEPS_PROMPTS[step], 100 + step)
    for _ in range(steps):
        while None in (gathered := await asyncio.gather(*(stream.collect(GROUPS) for stream in streams))):
            assert all(part is None for part in gathered) and all(stream.is_lost for stream in streams)
            await asyncio.gather(*at_work)
            for stream in streams:
                await stream.reconnect(Writer(), surroundings())
            at_work = [asyncio.create_task(stream.run()) for stream in streams]
        parts = [part for part in gathered if part is not None]
        result.append(sorted((item for part in parts for item in part.rollouts), key=lambda item: item.group))
        numbers = [
            numbers[0] + sum(part.num_interrupted for part in parts),
            numbers[1] + sum(part.num_restarted for part in parts),
        ]
    for task in at_work:
        task.cancel()
    await asyncio.gather(*at_work, return_exceptions=True)
    return result, numbers


@pytest.mark.parametrize("lasts", [(5, -1), (60, -1), (-1, 90), (60,), (150,), (40, 70)], ids=str)
def test_what_a_lost_engine_has_not_completed_is_done_by_others_or_when_it_is_back(lasts: tuple[int, ...]) -> None:
    steps, (gone, again) = asyncio.run(streamed([Writer(lasts=item) for item in lasts], 2))
    for step, rollouts in enumerate(steps):
        mine = by_itself(step)
        assert [(item.prompt.id, item.group, item.seed) for item in rollouts] == [
            (item.prompt.id, item.group, item.seed) for item in mine
        ]
        assert all(item.token_ids.tolist() == alone(step, item.group) for item in rollouts)
    assert 0 < gone == again


def test_a_pause_does_not_wait_for_an_engine_that_is_lost() -> None:
    async def run() -> None:
        writer = Writer(lasts=5)
        stream = GroupStream(
            GroupQueue(UNLIMITED), writer, surroundings(), samples=SAMPLES, max_groups=GROUPS, timeout=60.0
        )
        await stream.admit(STEPS_PROMPTS[0], 100)
        at_work = asyncio.create_task(stream.run())
        while not writer.written:
            await asyncio.sleep(0.001)
        await stream.pause("wait")  # for answers that will not come
        await at_work
        assert stream.is_lost
        await stream.pause("retract")
        await stream.reconnect(Writer(), surroundings())
        at_work = asyncio.create_task(stream.run())
        selected = await stream.collect(GROUPS)
        at_work.cancel()
        assert selected is not None and len(selected.rollouts) == GROUPS * SAMPLES

    asyncio.run(run())


def test_what_lasts_too_long_is_aborted_by_itself() -> None:
    async def run() -> list[str]:
        stream = GroupStream(
            GroupQueue(UNLIMITED), Writer(pause=0.2), surroundings(), samples=SAMPLES, max_groups=GROUPS, timeout=0.3
        )
        at_work = asyncio.create_task(stream.run())
        await stream.admit(STEPS_PROMPTS[0], 1)
        selected = await stream.collect(GROUPS)
        at_work.cancel()
        assert selected is not None
        return [item.failure for item in selected.rollouts if item.status == "aborted"]

    assert set(asyncio.run(run())) == {"it did not finish within rollout.step_timeout"}


def test_it_says_from_when_to_when_its_engine_was_at_work() -> None:
    events: list[tuple[float, float]] = []

    async def run() -> None:
        stream = GroupStream(
            GroupQueue(UNLIMITED),
            Writer(),
            surroundings(),
            samples=SAMPLES,
            max_groups=GROUPS,
            timeout=60.0,
            on_busy_interval=lambda began, ended: events.append((began, ended)),
        )
        at_work = asyncio.create_task(stream.run())
        await stream.pause("retract")
        assert events == []
        await stream.resume()
        await stream.admit(STEPS_PROMPTS[0], 1)
        await stream.collect(GROUPS)
        await asyncio.sleep(0.3)  # it has nothing to do
        await stream.pause("retract")
        at_work.cancel()

    start = time.monotonic()
    asyncio.run(run())
    took = time.monotonic() - start
    ((began, ended),) = events
    assert 0 < ended - began < took - 0.3
