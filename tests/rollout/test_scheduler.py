"""The rollout scheduler: engines share groups, none lost or duplicated, with slow, halted and lost engines."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from scripted import (
    CHAT,
    CONFIG,
    PROMPT,
    DeterministicPolicy,
    FailingPolicy,
    InProcessCalculator,
    ScriptedPolicy,
    begin_rollout,
    call,
    make_generation,
    parse,
)

from megarl.engine.engine_protocol import NOT_RECORDED, EngineLost, Generation, RecordedPrefix, RequestFailed
from megarl.environments.protocol import ToolResult
from megarl.rollout.aborted import TooManyAborted
from megarl.rollout.conversation import RolloutContext, derive_seed, run_conversation
from megarl.rollout.group_queue import GroupQueue, LocalKVStore
from megarl.rollout.partial_rollouts import PartialRollout
from megarl.rollout.scheduler import GenerationResult, Group, gather_rollouts
from megarl.types import Ids, Prompt, Rollout

pytestmark = [pytest.mark.alone, pytest.mark.slow]


def gather(
    script: ScriptedPolicy,
    prompts: list[Prompt],
    samples: int,
    seed: int = 1,
    first_group: int = 0,
    deadline_in: float | None = None,
    num_total: int | None = None,
    **config: Any,
) -> list[Rollout]:

    async def run() -> list[Rollout]:
        gathered = await gather_rollouts(
            prompts,
            GroupQueue(len(prompts)),
            script,
            RolloutContext(CHAT, InProcessCalculator(), parse, replace(CONFIG, **config)),
            samples=samples,
            greedy=False,
            seed=seed,
            first_group=first_group,
            deadline=None if deadline_in is None else asyncio.get_running_loop().time() + deadline_in,
            num_total=num_total,
        )
        assert not gathered.partials
        return gathered.rollouts

    return asyncio.run(run())


def test_returns_all_samples_in_prompt_order() -> None:
    prompts = [replace(PROMPT, id=name) for name in "abc"]
    script = ScriptedPolicy("3")
    rollouts = gather(script, prompts, 4, first_group=10)
    assert [rollout.prompt.id for rollout in rollouts] == list("aaaabbbbcccc")
    assert [rollout.group for rollout in rollouts] == [10] * 4 + [11] * 4 + [12] * 4
    assert 2 <= script.max_running <= CONFIG.concurrency
    assert all(rollout.turns[0].token_ids is rollout.prompt.token_ids for rollout in rollouts)


def test_seed_depends_only_on_step_group_and_sample() -> None:
    rollouts = gather(ScriptedPolicy("3"), [PROMPT, PROMPT], 3, seed=4)
    seeds = [rollout.seed for rollout in rollouts]
    assert len(set(seeds)) == 6 and seeds == [derive_seed(4, group, i) for group in (0, 1) for i in range(3)]
    assert [rollout.seed for rollout in gather(ScriptedPolicy("3"), [PROMPT], 1, seed=4, first_group=1)] == [seeds[3]]
    assert derive_seed(5, 0, 0) != seeds[0]


def test_failed_request_aborts_only_its_conversation() -> None:
    rollouts = gather(FailingPolicy("1", RequestFailed("late"), "3", "4"), [PROMPT], 4)
    assert sorted(rollout.status for rollout in rollouts) == ["aborted", "stop", "stop", "stop"]
    assert [rollout.failure for rollout in rollouts if rollout.failure] == ["late"]


def test_deadline_aborts_running_and_unstarted_conversations() -> None:
    script = FailingPolicy("1", None, "3", call("4"), *[None] * 6)
    rollouts = gather(script, [PROMPT], 7, deadline_in=0.3, concurrency=2)
    assert [rollout.status for rollout in rollouts] == ["stop", "aborted", "stop", *["aborted"] * 4]
    assert {rollout.failure for rollout in rollouts} == {"", "it did not finish within rollout.step_timeout"}
    assert rollouts[3].num_actions == len(make_generation(call("4")).token_ids) and rollouts[3].tool_calls == 1
    assert rollouts[6].num_actions == 0


def test_too_many_aborts_end_generation_without_waiting() -> None:
    """The third abort of 20 exceeds a tenth. The other conversations would hang until the deadline."""
    failures = [RequestFailed("late")] * 3
    started = time.monotonic()
    with pytest.raises(TooManyAborted, match="3 of 20 rollouts were aborted") as raised:
        gather(
            FailingPolicy("1", *failures, *[None] * 16), [PROMPT] * 5, 4, deadline_in=60.0, num_total=20, concurrency=20
        )
    assert raised.value.failures == ["late"] * 3 and time.monotonic() - started < 20.0
    rollouts = gather(
        FailingPolicy("1", *failures[:2], *[None] * 17), [PROMPT] * 5, 4, deadline_in=0.5, num_total=20, concurrency=20
    )
    assert [rollout.status for rollout in rollouts].count("aborted") == 19


def test_unreachable_engine_raises_one_error() -> None:
    class UnreachablePolicy(ScriptedPolicy):
        async def generate(
            self,
            context: Sequence[int],
            params: dict[str, Any],
            recorded: RecordedPrefix = NOT_RECORDED,
            on_tokens: Any = None,
        ) -> Generation:
            raise RuntimeError("the engine cannot be reached")

    with pytest.raises(RuntimeError, match="cannot be reached"):
        gather(UnreachablePolicy(), [PROMPT, PROMPT], 2)


PROMPTS = [replace(PROMPT, id=str(i), messages=({"role": "user", "content": f"{i}?"},)) for i in range(40)]


def make_context(**config: Any) -> RolloutContext:
    return RolloutContext(CHAT, InProcessCalculator(), parse, replace(CONFIG, max_turns=4, **config))


def gather_on_engines(
    policies: Sequence[DeterministicPolicy],
    prompts: Sequence[Prompt],
    queues: Sequence[GroupQueue],
    num_needed: int | None = None,
    partial_groups: Sequence[Sequence[Group]] = (),
    **config: Any,
) -> list[GenerationResult | BaseException]:
    """Run engines that share the queues, with seed 7 and two samples; return each one's result or exception."""

    async def run() -> list[GenerationResult | BaseException]:
        engines = [
            gather_rollouts(
                prompts,
                queue,
                policy,
                make_context(**config),
                samples=2,
                greedy=False,
                seed=7,
                num_needed_groups=num_needed,
                partial_groups=partial_groups[number] if partial_groups else (),
                version=policy.weight_version,
            )
            for number, (policy, queue) in enumerate(zip(policies, queues, strict=True))
        ]
        return await asyncio.gather(*engines, return_exceptions=True)

    return asyncio.run(run())


def make_queues(groups: int, engines: int, partial_groups: int = 0) -> list[GroupQueue]:
    counts = LocalKVStore()
    return [GroupQueue(groups, engines, counts, "step", partial_groups) for _ in range(engines)]


def undisturbed_tokens(prompt: Prompt) -> list[int]:
    """Return the tokens of the conversation when nothing interrupts it."""
    return asyncio.run(
        run_conversation(begin_rollout(prompt), DeterministicPolicy(pause=0), make_context(), {})
    ).token_ids.tolist()


def raise_failures(outcomes: Sequence[GenerationResult | BaseException]) -> list[GenerationResult]:
    for item in outcomes:
        if isinstance(item, BaseException):
            raise item
    return [item for item in outcomes if isinstance(item, GenerationResult)]


@pytest.mark.parametrize("pauses", [(0.0005,) * 3, (0.0001, 0.0005, 0.004)], ids=["equal", "one slow"])
def test_engines_share_groups_without_loss_or_duplicates(pauses: Sequence[float]) -> None:
    policies = [DeterministicPolicy(pause=pause) for pause in pauses]
    outcomes = raise_failures(gather_on_engines(policies, PROMPTS, make_queues(40, 3)))
    rollouts = sorted((rollout for out in outcomes for rollout in out.rollouts), key=lambda item: item.group)
    assert [rollout.group for rollout in rollouts] == [group for group in range(40) for _ in range(2)]
    assert [rollout.seed for rollout in rollouts] == [derive_seed(7, g, sample) for g in range(40) for sample in (0, 1)]
    assert all(rollout.prompt.id == str(rollout.group) for rollout in rollouts)
    for out in outcomes:  # one engine has all samples of a group, in order
        assert [rollout.group for rollout in out.rollouts] == sorted(rollout.group for rollout in out.rollouts)
        assert len(out.rollouts) == 2 * len({rollout.group for rollout in out.rollouts})
    assert all(policy.max_running <= CONFIG.concurrency for policy in policies)


def gather_until_complete(
    policies: Sequence[DeterministicPolicy],
    prompts: Sequence[Prompt],
    queues: Sequence[GroupQueue],
    num_needed: int | None = None,
    partial_groups: Sequence[Sequence[Group]] = (),
    **config: Any,
) -> list[GenerationResult]:
    """Call `gather_on_engines` until all groups are complete; later rounds replace lost engines' policies."""
    result = raise_failures(gather_on_engines(policies, prompts, queues, num_needed, partial_groups, **config))
    while any(out.engine_loss for out in result):
        if not (queues[0].count_unclaimed() if num_needed is None else queues[0].count_complete() < num_needed):
            break
        replacements = [DeterministicPolicy(policy.weight_version) for policy in policies]
        second_result = raise_failures(
            gather_on_engines(replacements, prompts, queues, num_needed, [()] * len(policies), **config)
        )
        result = [item.merge(other) for item, other in zip(result, second_result, strict=True)]
    return result


def sort_by_group(outcomes: Sequence[GenerationResult]) -> list[Rollout]:
    """Return all rollouts ordered by group, then by sample."""
    return sorted((item for out in outcomes for item in out.rollouts), key=lambda item: item.group)


def assert_complete(rollouts: Sequence[Rollout], prompts: Sequence[Prompt]) -> None:
    """Check that each sample occurs once, with its seed and its undisturbed tokens."""
    numbers = [(group, sample) for group in range(len(prompts)) for sample in (0, 1)]
    assert [(item.group, item.seed) for item in rollouts] == [(g, derive_seed(7, g, sample)) for g, sample in numbers]
    for rollout in rollouts:
        assert rollout.prompt.id == prompts[rollout.group].id
        assert rollout.token_ids.tolist() == undisturbed_tokens(prompts[rollout.group])


def test_other_engines_finish_the_groups_of_a_lost_engine() -> None:
    queues, prompts = make_queues(16, 3), PROMPTS[:16]
    outcomes = raise_failures(
        gather_on_engines(
            [DeterministicPolicy(dies_after=60), DeterministicPolicy(), DeterministicPolicy()], prompts, queues
        )
    )
    lost, *other_outcomes = outcomes
    assert lost.engine_loss is not None and str(lost.engine_loss) == "the engine is gone" and lost.num_restarted == 0
    assert all(out.engine_loss is None and out.num_interrupted == 0 for out in other_outcomes)
    assert_complete(sort_by_group(outcomes), prompts)
    assert 0 < lost.num_interrupted == sum(out.num_restarted for out in other_outcomes) <= 2 * CONFIG.concurrency
    assert queues[0].count_unclaimed() == 0 and queues[0].count_claimed() == 16


def test_restarted_engine_redoes_only_lost_conversations() -> None:
    """The only engine, lost twice, does not repeat finished conversations."""
    queues, finished, result = make_queues(6, 1), [], None
    for policy in (DeterministicPolicy(dies_after=70), DeterministicPolicy(dies_after=70), DeterministicPolicy()):

        async def gather_with(policy: DeterministicPolicy) -> GenerationResult:
            context = replace(
                make_context(), on_rollout_finished=lambda rollout: finished.append((rollout.prompt.id, rollout.seed))
            )
            options: dict[str, Any] = {"samples": 2, "greedy": False, "seed": 7}
            return await gather_rollouts(PROMPTS[:6], queues[0], policy, context, **options)

        out = asyncio.run(gather_with(policy))
        result = out if result is None else result.merge(out)
    assert result is not None and result.engine_loss is None and 0 < result.num_interrupted == result.num_restarted
    assert_complete(result.rollouts, PROMPTS[:6])
    assert sorted(finished) == sorted((item.prompt.id, item.seed) for item in result.rollouts)


def test_watch_that_reports_a_hang_loses_the_engine() -> None:
    script, finished = FailingPolicy("1", None, None, None), []

    async def hangs() -> None:
        while len(script.requests) < 4 or not finished:
            await asyncio.sleep(0.01)
        raise EngineLost("hangs", "engine 0 sent no heartbeat")

    async def run() -> GenerationResult:
        context = replace(make_context(), on_rollout_finished=finished.append)
        options: dict[str, Any] = {"samples": 2, "greedy": False, "seed": 7, "watch": hangs}
        return await gather_rollouts(PROMPTS[:2], queue, script, context, **options)

    queue = GroupQueue(2)
    out = asyncio.run(run())
    assert (
        out.engine_loss is not None
        and out.engine_loss.fault == "hangs"
        and out.rollouts == []
        and out.num_interrupted == 3
    )
    returned = [queue.claim_returned(), queue.claim_returned()]
    assert queue.claim_returned() is None and sorted(item.number for item in returned) == [0, 1]
    assert sorted(item.status or "" for group in returned for item in group.group) == ["", "", "", "stop"]


@pytest.mark.parametrize("dies_after", [5, 60, 150, 220])
def test_lost_engine_with_oversampling_and_partial_groups(dies_after: int) -> None:
    """Groups are carried over steps, and enough may be complete before or after the loss."""
    num_needed, num_started = 6, 9
    prompts_left, partial_groups, done = list(PROMPTS[:30]), [[], []], []
    for step in range(20):
        num_partial = sum(map(len, partial_groups))
        new_prompts = prompts_left[: num_started - num_partial]
        num_expected = min(num_needed, num_partial + len(new_prompts))
        queues = make_queues(len(new_prompts), 2, num_partial)
        policies = [
            DeterministicPolicy(step, 0.001, dies_after=dies_after if step in (0, 2) else -1),
            DeterministicPolicy(step, 0.003),
        ]
        outcomes = gather_until_complete(policies, new_prompts, queues, num_expected, partial_groups, max_staleness=100)
        prompts_left = prompts_left[queues[0].count_claimed() :]
        rollouts = sort_by_group(outcomes)
        assert (
            sorted({item.group for item in rollouts}) == list(range(num_expected)) and len(rollouts) == 2 * num_expected
        )
        done += rollouts
        partial_groups = [out.partials for out in outcomes]
        while (returned := queues[0].claim_returned()) is not None:
            partial_groups[0].append(returned.group)
        if not prompts_left and not any(partial_groups):
            break
    assert sorted(rollout.prompt.id for rollout in done) == sorted(prompt.id for prompt in PROMPTS[:30] for _ in "ab")
    assert all(rollout.token_ids.tolist() == undisturbed_tokens(rollout.prompt) for rollout in done)


def test_each_engine_starts_no_more_than_its_share() -> None:
    outcomes = raise_failures(
        gather_on_engines([DeterministicPolicy(pause=0.002)] * 4, PROMPTS[:8], make_queues(8, 4), concurrency=100)
    )
    assert [len(out.rollouts) for out in outcomes] == [4] * 4


def test_engine_serves_another_conversation_while_a_tool_runs() -> None:
    """One slot; the tool of the first conversation returns once another conversation has ended."""
    other_ended = asyncio.Event()

    class WaitingCalculator(InProcessCalculator):
        async def call_tool(self, name: str, arguments: dict[str, Any]) -> ToolResult:
            await asyncio.wait_for(other_ended.wait(), 60.0)
            return ToolResult("3", True)

    class Policy(ScriptedPolicy):
        async def generate(
            self,
            context: Ids | Sequence[int],
            params: dict[str, Any],
            recorded: RecordedPrefix = NOT_RECORDED,
            on_tokens: Any = None,
        ) -> Generation:
            assert self.num_running == 0
            out = await super().generate(context, params, recorded)
            if len(self.requests) == 2:
                other_ended.set()
            return out

    tools = WaitingCalculator()
    script = Policy(call("1+2"), "first to end", "last to end")
    context = RolloutContext(CHAT, tools, parse, replace(CONFIG, concurrency=1))
    options: dict[str, Any] = {"samples": 1, "greedy": False, "seed": 0}
    out = asyncio.run(gather_rollouts(PROMPTS[:2], GroupQueue(2), script, context, **options))
    assert [rollout.answer for rollout in out.rollouts] == ["last to end", "first to end"]


def test_starts_at_most_twice_concurrency_conversations() -> None:
    """All tools hang, so the engine's slots stay free."""

    class HangingCalculator(InProcessCalculator):
        num_begun = 0

        async def call_tool(self, name: str, arguments: dict[str, Any]) -> ToolResult:
            self.num_begun += 1
            await asyncio.sleep(3600)
            raise AssertionError

    tools = HangingCalculator()
    context = RolloutContext(CHAT, tools, parse, replace(CONFIG, concurrency=3))

    async def run() -> None:
        queue, options = GroupQueue(40), {"samples": 1, "greedy": False, "seed": 0}
        task = asyncio.create_task(
            gather_rollouts(PROMPTS, queue, ScriptedPolicy(call("1+2")), context, **options)  # type: ignore[arg-type]
        )
        while tools.num_begun < 6:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        assert (tools.num_begun, queue.count_claimed()) == (6, 6)
        task.cancel()
        await asyncio.wait([task])

    asyncio.run(run())


def test_stops_and_resumes_surplus_groups_with_oversampling() -> None:
    """Steps of 6 groups with 50 % oversampling, on three engines, until the prompts are used up."""
    engines, num_needed, num_started = 3, 6, 9
    prompts_left, partial_groups, done, num_stale = list(PROMPTS[:34]), [[] for _ in range(engines)], [], 0
    for step in range(20):
        num_partial = sum(map(len, partial_groups))
        new_prompts = prompts_left[: num_started - num_partial]
        num_expected = min(num_needed, num_partial + len(new_prompts))
        queues = make_queues(len(new_prompts), engines, num_partial)
        policies = [DeterministicPolicy(step, pause=0.003) for _ in range(engines)]
        outcomes = raise_failures(
            gather_on_engines(policies, new_prompts, queues, num_expected, partial_groups, max_staleness=100)
        )
        prompts_left = prompts_left[queues[0].count_claimed() :]
        rollouts = [rollout for out in outcomes for rollout in out.rollouts]
        # Exactly the needed groups, numbered in order of completion.
        assert (
            sorted({rollout.group for rollout in rollouts}) == list(range(num_expected))
            and len(rollouts) == 2 * num_expected
        )
        done += rollouts
        partial_groups = [out.partials for out in outcomes]
        num_stale += sum(out.num_stale for out in outcomes)
        if not prompts_left and not any(partial_groups):
            break
    assert sorted(rollout.prompt.id for rollout in done) == sorted(prompt.id for prompt in PROMPTS[:34] for _ in "ab")
    assert num_stale == 0 and step > 4
    assert any(turn.versions for rollout in done for turn in rollout.turns)  # some were stopped within a turn
    for rollout in done:
        assert rollout.token_ids.tolist() == undisturbed_tokens(rollout.prompt)
        newest = [turn.weight_version for turn in rollout.turns if turn.is_action][-1]
        assert rollout.routing is not None  # all of it by the newest weights
        assert rollout.routing[:, 0].tolist() == [[i, newest] for i in range(rollout.num_tokens - 1)]


def make_halted(version: int, text: str = "12") -> PartialRollout:
    context = make_context()
    context.halt.set()
    return asyncio.run(
        run_conversation(
            begin_rollout(PROMPTS[1], 5), ScriptedPolicy(make_generation(text, "abort", version)), context, {}
        )
    )


@pytest.mark.parametrize(("max_staleness", "num_stale"), [(0, 2), (1, 1), (2, 0)])
def test_restarts_partial_rollouts_beyond_max_staleness(max_staleness: int, num_stale: int) -> None:
    group = make_halted(2), make_halted(1)
    out = raise_failures(
        gather_on_engines(
            [DeterministicPolicy(version=3)],
            [],
            [GroupQueue(0, num_partial_groups=1)],
            1,
            [[group]],
            max_staleness=max_staleness,
        )
    )[0]
    assert out.num_stale == num_stale and [rollout.seed for rollout in out.rollouts] == [5, 5]
    oldest = [int(min(rollout.turns[1].token_versions)) for rollout in out.rollouts]
    assert oldest == [2 if max_staleness >= 1 else 3, 1 if max_staleness >= 2 else 3]


def test_completed_partial_group_counts_before_others() -> None:
    """It needs no generation and comes before groups that do."""
    finished = replace(make_halted(2), status="stop")
    groups = [(make_halted(2), make_halted(2)), (finished, finished)]
    out = raise_failures(
        gather_on_engines(
            [DeterministicPolicy(version=3)], PROMPTS[:5], [GroupQueue(5, num_partial_groups=2)], 1, [groups]
        )
    )[0]
    assert [rollout.token_ids.tolist() for rollout in out.rollouts] == [finished.token_ids.tolist()] * 2
    assert [5, 5] in [[item.seed for item in group] for group in out.partials]
