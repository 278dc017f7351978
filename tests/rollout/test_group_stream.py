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
from megarl.rollout.group_stream import AdmittedPrompt, GroupStream
from megarl.rollout.partial_rollouts import Group
from megarl.rollout.scheduler import gather_rollouts
from megarl.types import Prompt, Rollout

GROUPS, SAMPLES, STEPS = 4, 2, 3
STEPS_PROMPTS = [
    [
        replace(PROMPT, id=f"{step}/{i}", messages=({"role": "user", "content": f"{step} and {i}?"},))
        for i in range(GROUPS)
    ]
    for step in range(STEPS)
]


def make_context(**config: Any) -> RolloutContext:
    return RolloutContext(CHAT, InProcessCalculator(), parse, replace(CONFIG, max_turns=4, concurrency=6, **config))


def admitted(step: int) -> list[AdmittedPrompt]:
    """Return the prompts of a step with the seeds of synchronous generation."""
    return [AdmittedPrompt(prompt, 100 + step, index) for index, prompt in enumerate(STEPS_PROMPTS[step])]


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
            make_context(max_staleness=max_staleness),
            samples=SAMPLES,
            max_groups=-(-GROUPS * (max_staleness + 1) // len(policies)),
            timeout=60.0,
        )
        for policy in policies
    ]
    tasks = [asyncio.create_task(stream.run()) for stream in streams]
    num_admitted = 0

    async def admit(last_step: int) -> None:
        nonlocal num_admitted
        while num_admitted < min(last_step, STEPS):
            for stream in streams:
                await stream.admit(admitted(num_admitted))
            num_admitted += 1

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
            started.append(min(counts.add("groups/taken", 0), num_admitted * GROUPS))
            for policy in policies:
                assert mode == "in_place" or policy.num_running == 0
                policy.weight_version = step + 1
            await asyncio.gather(*(stream.set_version(step + 1) for stream in streams))
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
            await stream.admit(admitted(step))
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
        await stream.admit(admitted(0))
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
        await stream.admit(admitted(0))
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
        await stream.admit(admitted(0))
        await stream.collect(GROUPS)
        await asyncio.sleep(0.3)  # the engine is idle
        await stream.pause("retract")
        task.cancel()

    start = time.monotonic()
    asyncio.run(run())
    took = time.monotonic() - start
    ((busy_start, end),) = events
    assert 0 < end - busy_start < took - 0.3


ALL_PROMPTS = [prompt for prompts in STEPS_PROMPTS for prompt in prompts]
NEEDED, IN_FLIGHT = 2, 4


class OversampledEngines:
    """Engines whose steps take the first groups that are complete, and sleep between."""

    def __init__(
        self, policies: list[DeterministicPolicy], max_staleness: int, partial_groups: list[list[Group]] | None = None
    ) -> None:
        self.policies, counts = policies, LocalKVStore()
        restored = partial_groups or [[] for _ in policies]
        self.num_pending, first = sum(map(len, restored)), 0
        self.streams = []
        for policy, groups in zip(policies, restored, strict=True):
            self.streams.append(
                GroupStream(
                    GroupQueue(UNLIMITED, len(policies), counts, first=self.num_pending),
                    policy,
                    make_context(max_staleness=max_staleness),
                    samples=SAMPLES,
                    max_groups=IN_FLIGHT,
                    timeout=60.0,
                    version=policy.weight_version,
                    is_ordered=False,
                    partial_groups=dict(enumerate(groups, first)),
                )
            )
            first += len(groups)
        self.tasks = [asyncio.create_task(stream.run()) for stream in self.streams]
        self.num_stale = 0

    async def step(self, prompts: list[Prompt]) -> list[Rollout]:
        """Start prompts from the list until enough groups are in flight; return the rollouts of the first complete."""
        while self.num_pending < IN_FLIGHT and prompts:
            admitted = AdmittedPrompt(prompts.pop(0), 7, len(prompts))
            for stream in self.streams:
                await stream.admit([admitted])
            self.num_pending += 1
        count = min(NEEDED, self.num_pending)
        parts = await asyncio.gather(*(stream.collect(count, 10) for stream in self.streams))
        self.num_pending -= count
        self.num_stale += sum(part.num_stale for part in parts if part is not None)
        rollouts = [rollout for part in parts if part is not None for rollout in part.rollouts]
        prompts_by_group = {group: prompt for part in parts if part for group, prompt in part.prompts.items()}
        assert sorted(rollout.group for rollout in rollouts) == sorted(list(range(10, 10 + count)) * SAMPLES)
        assert all(prompts_by_group[rollout.group] == rollout.prompt for rollout in rollouts)
        return rollouts

    async def sync_weights(self) -> None:
        await asyncio.gather(*(stream.pause("retract", sleeps=True) for stream in self.streams))
        for stream, policy in zip(self.streams, self.policies, strict=True):
            assert policy.num_running == 0 or stream.is_lost
            policy.weight_version += 1
            await stream.set_version(policy.weight_version)

    async def wake(self) -> None:
        for number, stream in enumerate(self.streams):
            if stream.is_lost:
                await self.tasks[number]
                self.policies[number] = DeterministicPolicy(self.policies[number].weight_version)
                await stream.reconnect(self.policies[number], stream._context)
                self.tasks[number] = asyncio.create_task(stream.run())
            else:
                await stream.resume()

    async def snapshot(self) -> list[list[Group]]:
        for stream in self.streams:
            await stream.hold_claims(True)
        groups = [await stream.snapshot() for stream in self.streams]
        for stream in self.streams:
            await stream.hold_claims(False)
        return groups

    async def close(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)


def assert_whole(rollout: Rollout) -> None:
    """Check that the rollout has the tokens of an undisturbed conversation, and a routing record of each by the newest
    weights."""
    step, group = map(int, rollout.prompt.id.split("/"))
    assert rollout.token_ids.tolist() == undisturbed_tokens(step, group)
    newest = rollout.version_spans[-1][0]
    assert rollout.routing is not None
    assert rollout.routing[:, 0].tolist() == [[number, newest] for number in range(rollout.num_tokens - 1)]


@pytest.mark.parametrize("dies_after", [-1, 5, 60, 150])
def test_oversampling_neither_loses_nor_repeats_groups(dies_after: int) -> None:
    """Until the prompts are used up, also with an engine that is lost and reconnects at the next step."""

    async def run() -> list[Rollout]:
        engines = OversampledEngines([DeterministicPolicy(0, 0.002, dies_after), DeterministicPolicy(0, 0.004)], 100)
        prompts, done = list(ALL_PROMPTS), []
        while prompts or engines.num_pending:
            done += await engines.step(prompts)
            await engines.sync_weights()
            await engines.wake()
        await engines.close()
        assert engines.num_stale == 0
        return done

    done = asyncio.run(run())
    assert sorted(rollout.prompt.id for rollout in done) == sorted(prompt.id for prompt in ALL_PROMPTS for _ in "ab")
    assert any(turn.versions for rollout in done for turn in rollout.turns)  # some were paused within a turn
    for rollout in done:
        assert_whole(rollout)


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_oversampling_restarts_conversations_beyond_max_staleness(max_staleness: int) -> None:
    async def run() -> tuple[list[tuple[int, Rollout]], int]:
        engines = OversampledEngines([DeterministicPolicy(0, 0.003) for _ in range(2)], max_staleness)
        prompts, done = list(ALL_PROMPTS), []
        for version in range(5):
            done += [(version, rollout) for rollout in await engines.step(prompts)]
            await engines.sync_weights()
            await engines.wake()
        await engines.close()
        return done, engines.num_stale

    done, num_stale = asyncio.run(run())
    assert num_stale > 0
    for version, rollout in done:
        assert version - min(version for version, _ in rollout.version_spans) <= max_staleness
        assert_whole(rollout)


@pytest.mark.parametrize("engines_after", [1, 2, 3])
def test_oversampling_continues_from_a_snapshot(engines_after: int) -> None:
    """No group is lost or repeated, with any number of engines afterwards."""

    async def run() -> tuple[list[Rollout], list[Group]]:
        engines = OversampledEngines([DeterministicPolicy(0, 0.004) for _ in range(2)], 100)
        prompts, done = list(ALL_PROMPTS), []
        done += await engines.step(prompts)
        await engines.sync_weights()
        await engines.wake()
        engines.policies[0].waits_after = engines.policies[0].num_written + 1
        done += await engines.step(prompts)
        await engines.policies[0].waits.wait()
        await engines.sync_weights()
        groups = [group for part in await engines.snapshot() for group in part]
        await engines.close()
        unclaimed = ALL_PROMPTS[len(ALL_PROMPTS) - len(prompts) - engines.num_pending + len(groups) :]
        prompts = list(unclaimed)
        policies = [DeterministicPolicy(3, 0.001) for _ in range(engines_after)]
        engines = OversampledEngines(policies, 100, [groups[number::engines_after] for number in range(engines_after)])
        while prompts or engines.num_pending:
            done += await engines.step(prompts)
        await engines.close()
        return done, groups

    done, groups = asyncio.run(run())
    assert any(partial.num_turn_tokens and not partial.is_turn_complete for group in groups for partial in group)
    assert sorted(rollout.prompt.id for rollout in done) == sorted(prompt.id for prompt in ALL_PROMPTS for _ in "ab")
    for rollout in done:
        assert_whole(rollout)


def test_complete_groups_of_a_snapshot_come_first() -> None:
    async def run() -> list[str]:
        source = OversampledEngines([DeterministicPolicy(pause=0)], 100)
        await source.step(list(ALL_PROMPTS[:4]))
        await asyncio.sleep(0.2)  # the other two are complete, too
        (groups,) = await source.snapshot()
        await source.close()
        assert len(groups) == 2 and all(partial.status is not None for group in groups for partial in group)
        engines = OversampledEngines([DeterministicPolicy(pause=0.01)], 100, [groups])
        rollouts = await engines.step(list(ALL_PROMPTS[4:]))
        await engines.close()
        return [rollout.prompt.id for rollout in rollouts]

    assert set(asyncio.run(run())) <= {prompt.id for prompt in ALL_PROMPTS[:4]}


def test_timeouts_bound_the_wait_for_conversations_before_sleep() -> None:
    """With `wait` they end first, but none takes longer than its time-out."""

    async def run() -> list[str]:
        policy, context = DeterministicPolicy(pause=0.5), make_context()
        stream = GroupStream(GroupQueue(UNLIMITED), policy, context, samples=SAMPLES, max_groups=GROUPS, timeout=0.3)
        task = asyncio.create_task(stream.run())
        await stream.admit(admitted(0))
        while not policy.num_running:
            await asyncio.sleep(0.01)
        async with asyncio.timeout(20):
            await stream.pause("wait", sleeps=True)
        await stream.resume()
        result = await stream.collect(1)
        task.cancel()
        assert result is not None
        return [rollout.failure for rollout in result.rollouts]

    assert set(asyncio.run(run())) == {"it did not finish within rollout.step_timeout"}


def test_time_asleep_counts_for_no_timeout() -> None:
    async def run() -> list[Rollout]:
        policy = DeterministicPolicy(pause=0.01)
        stream = GroupStream(
            GroupQueue(UNLIMITED), policy, make_context(), samples=SAMPLES, max_groups=GROUPS, timeout=2.0
        )
        task = asyncio.create_task(stream.run())
        await stream.admit(admitted(0))
        await asyncio.sleep(0.1)
        await stream.pause("retract", sleeps=True)
        await asyncio.sleep(2.5)
        await stream.resume()
        result = await stream.collect(GROUPS)
        task.cancel()
        assert result is not None and result.seconds < 2.4
        return result.rollouts

    assert all(rollout.status != "aborted" for rollout in asyncio.run(run()))
