"""`GroupStream`: generation beside training yields what synchronous generation would, within the allowed staleness,
with slow engines, lost engines and weight syncs."""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from scripted import CHAT, CONFIG, PROMPT, DeterministicPolicy, InProcessCalculator, begin_rollout, parse

from megarl.config import OnWeightSync
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


def make_context() -> RolloutContext:
    return RolloutContext(CHAT, InProcessCalculator(), parse, replace(CONFIG, max_turns=4, concurrency=6))


@cache
def generate_step(step: int) -> list[Rollout]:
    """Return the rollouts of synchronous generation for this step, by weights of version `step`."""
    prompts, policy = STEPS_PROMPTS[step], DeterministicPolicy(version=step, pause=0)
    gathered = gather_rollouts(
        prompts,
        GroupQueue(GROUPS),
        policy,
        make_context(),
        samples=SAMPLES,
        greedy=False,
        seed=100 + step,
        version=step,
    )
    return asyncio.run(gathered).rollouts


@cache
def undisturbed_tokens(step: int, group: int) -> list[int]:
    """Return the tokens of the conversation when nothing interrupts it."""
    prompt = STEPS_PROMPTS[step][group]
    return asyncio.run(
        run_conversation(begin_rollout(prompt), DeterministicPolicy(pause=0), make_context(), {})
    ).token_ids.tolist()


async def train(
    policies: list[DeterministicPolicy], max_staleness: int, mode: OnWeightSync, step_seconds: float = 0.05
) -> tuple[list[list[Rollout]], list[int]]:
    """Return the rollouts of each step, with a weight sync after each, and the groups started by each sync."""
    counts, steps, started = LocalKVStore(), [], []
    streams = [
        GroupStream(
            GroupQueue(UNLIMITED, len(policies), counts),
            policy,
            make_context(),
            samples=SAMPLES,
            max_groups=-(-GROUPS * (max_staleness + 1) // len(policies)),
            timeout=60.0,
        )
        for policy in policies
    ]
    tasks = [asyncio.create_task(stream.run()) for stream in streams]
    admitted = 0

    async def admit(last_step: int) -> None:
        nonlocal admitted
        while admitted < min(last_step, STEPS):
            for stream in streams:
                await stream.admit(STEPS_PROMPTS[admitted], 100 + admitted)
            admitted += 1

    try:
        for step in range(STEPS):
            await admit(step + 1 + max_staleness)
            selected = await asyncio.gather(*(stream.collect(GROUPS) for stream in streams))
            gathered = [part for part in selected if part is not None]
            steps.append(sorted((item for part in gathered for item in part.rollouts), key=lambda item: item.group))
            assert all(0 <= part.busy_seconds <= part.num_slots * part.seconds + 0.1 for part in gathered)
            assert sum(len(part.group_ages) for part in gathered) == GROUPS
            await asyncio.sleep(random.random() * step_seconds)
            await asyncio.gather(*(stream.pause(mode) for stream in streams))
            started.append(min(counts.add("groups/taken", 0), admitted * GROUPS))
            for policy in policies:
                assert mode == "in_place" or policy.num_running == 0
                policy.weight_version = step + 1
            await asyncio.gather(*(stream.resume() for stream in streams))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return steps, started


@pytest.mark.parametrize("engines", [1, 3])
def test_lag_0_equals_synchronous_generation(engines: int) -> None:
    """The same rollouts in the same order: prompts, seeds, tokens, log-probs and versions."""
    steps, started = asyncio.run(train([DeterministicPolicy(pause=0.0002) for _ in range(engines)], 0, "retract"))
    for step, rollouts in enumerate(steps):
        assert rollouts == generate_step(step)
    assert started == [GROUPS * (step + 1) for step in range(STEPS)]


@pytest.mark.parametrize("mode", ["retract", "wait"])
@pytest.mark.parametrize(("engines", "max_staleness"), [(1, 1), (2, 1), (3, 2)])
def test_rollouts_through_weight_syncs_are_whole_and_within_the_lag(
    engines: int, max_staleness: int, mode: OnWeightSync
) -> None:
    random.seed(f"{engines} {max_staleness} {mode}")
    # Each engine is slower than the one before.
    policies = [DeterministicPolicy(pause=0.0002 * 4**number) for number in range(engines)]
    steps, started = asyncio.run(train(policies, max_staleness, mode))
    num_mixed = 0
    for step, rollouts in enumerate(steps):
        expected = generate_step(step)
        assert [(item.prompt.id, item.group, item.seed, item.status) for item in rollouts] == [
            (item.prompt.id, item.group, item.seed, item.status) for item in expected
        ]
        for rollout in rollouts:
            assert rollout.token_ids.tolist() == undisturbed_tokens(step, rollout.group)
            chosen = [run for turn in rollout.turns if turn.is_action for run in turn.version_spans]
            versions = [version for version, _ in chosen]
            assert versions == sorted(versions) and 0 <= step - versions[0] <= max_staleness and versions[-1] <= step
            assert mode == "retract" or all(not turn.versions for turn in rollout.turns)
            num_mixed += len(set(versions)) > 1
            assert rollout.routing is not None  # one record for each token, in order
            # All of it is by the newest weights, which have read the older ones' tokens again.
            assert rollout.routing[:, 0].tolist() == [[i, versions[-1]] for i in range(rollout.num_tokens - 1)]
    assert num_mixed if mode == "retract" else not num_mixed
    assert all(count <= GROUPS * min(STEPS, step + 1 + max_staleness) for step, count in enumerate(started))
    assert started[0] > GROUPS  # groups of the next step started while the first was trained on


async def collect_with_losses(policies: list[DeterministicPolicy], steps: int) -> tuple[list[list[Rollout]], list[int]]:
    """Return the rollouts of each step, and how many conversations were interrupted and restarted. Lost engines
    reconnect only when all are lost."""
    counts, result, num_lost = LocalKVStore(), [], [0, 0]
    options: dict[str, Any] = dict(samples=SAMPLES, max_groups=GROUPS, timeout=60.0)
    streams = [
        GroupStream(GroupQueue(UNLIMITED, len(policies), counts), policy, make_context(), **options)
        for policy in policies
    ]
    tasks = [asyncio.create_task(stream.run()) for stream in streams]
    for step in range(steps):
        for stream in streams:
            await stream.admit(STEPS_PROMPTS[step], 100 + step)
    for _ in range(steps):
        while None in (gathered := await asyncio.gather(*(stream.collect(GROUPS) for stream in streams))):
            assert all(part is None for part in gathered) and all(stream.is_lost for stream in streams)
            await asyncio.gather(*tasks)
            for stream in streams:
                await stream.reconnect(DeterministicPolicy(), make_context())
            tasks = [asyncio.create_task(stream.run()) for stream in streams]
        parts = [part for part in gathered if part is not None]
        result.append(sorted((item for part in parts for item in part.rollouts), key=lambda item: item.group))
        num_lost = [
            num_lost[0] + sum(part.num_interrupted for part in parts),
            num_lost[1] + sum(part.num_restarted for part in parts),
        ]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return result, num_lost


@pytest.mark.parametrize("dies_after", [(5, -1), (60, -1), (-1, 90), (60,), (150,), (40, 70)], ids=str)
def test_groups_of_a_lost_engine_finish_elsewhere_or_after_reconnect(dies_after: tuple[int, ...]) -> None:
    steps, (interrupted, restarted) = asyncio.run(
        collect_with_losses([DeterministicPolicy(dies_after=item) for item in dies_after], 2)
    )
    for step, rollouts in enumerate(steps):
        expected = generate_step(step)
        assert [(item.prompt.id, item.group, item.seed) for item in rollouts] == [
            (item.prompt.id, item.group, item.seed) for item in expected
        ]
        assert all(item.token_ids.tolist() == undisturbed_tokens(step, item.group) for item in rollouts)
    assert 0 < interrupted == restarted


def test_pause_does_not_wait_for_a_lost_engine() -> None:
    async def run() -> None:
        policy = DeterministicPolicy(dies_after=5)
        stream = GroupStream(
            GroupQueue(UNLIMITED), policy, make_context(), samples=SAMPLES, max_groups=GROUPS, timeout=60.0
        )
        await stream.admit(STEPS_PROMPTS[0], 100)
        task = asyncio.create_task(stream.run())
        while not policy.num_written:
            await asyncio.sleep(0.001)
        await stream.pause("wait")  # for responses that will not come
        await task
        assert stream.is_lost
        await stream.pause("retract")
        await stream.reconnect(DeterministicPolicy(), make_context())
        task = asyncio.create_task(stream.run())
        selected = await stream.collect(GROUPS)
        task.cancel()
        assert selected is not None and len(selected.rollouts) == GROUPS * SAMPLES

    asyncio.run(run())


def test_aborts_conversations_after_the_timeout() -> None:
    async def run() -> list[str]:
        stream = GroupStream(
            GroupQueue(UNLIMITED),
            DeterministicPolicy(pause=0.2),
            make_context(),
            samples=SAMPLES,
            max_groups=GROUPS,
            timeout=0.3,
        )
        task = asyncio.create_task(stream.run())
        await stream.admit(STEPS_PROMPTS[0], 1)
        selected = await stream.collect(GROUPS)
        task.cancel()
        assert selected is not None
        return [item.failure for item in selected.rollouts if item.status == "aborted"]

    assert set(asyncio.run(run())) == {"it did not finish within rollout.step_timeout"}


def test_reports_busy_intervals_of_its_engine() -> None:
    events: list[tuple[float, float]] = []

    async def run() -> None:
        stream = GroupStream(
            GroupQueue(UNLIMITED),
            DeterministicPolicy(),
            make_context(),
            samples=SAMPLES,
            max_groups=GROUPS,
            timeout=60.0,
            on_busy_interval=lambda busy_start, end: events.append((busy_start, end)),
        )
        task = asyncio.create_task(stream.run())
        await stream.pause("retract")
        assert events == []
        await stream.resume()
        await stream.admit(STEPS_PROMPTS[0], 1)
        await stream.collect(GROUPS)
        await asyncio.sleep(0.3)  # the engine is idle
        await stream.pause("retract")
        task.cancel()

    start = time.monotonic()
    asyncio.run(run())
    took = time.monotonic() - start
    ((busy_start, end),) = events
    assert 0 < end - busy_start < took - 0.3
