"""The rollout scheduler: engines share groups, none lost or duplicated, with slow and lost engines."""

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
from megarl.rollout.scheduler import GenerationResult, gather_rollouts
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
        result = await gather_rollouts(
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
        return result.rollouts

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
            )
            for policy, queue in zip(policies, queues, strict=True)
        ]
        return await asyncio.gather(*engines, return_exceptions=True)

    return asyncio.run(run())


def make_queues(groups: int, engines: int) -> list[GroupQueue]:
    counts = LocalKVStore()
    return [GroupQueue(groups, engines, counts, "step") for _ in range(engines)]


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
