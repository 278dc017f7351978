"""What becomes of groups that engines share: none is lost or comes twice, whoever is slow, stopped or gone."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from scripted import CHAT, CONFIG, PROMPT, Fails, Script, Writer, begun, call, parse, said

from megarl.engine.engine_protocol import EngineLost, Generation, RequestFailed
from megarl.environments.process_sessions import EnvironmentPool
from megarl.environments.protocol import ToolResult
from megarl.rollout.aborted import TooManyAborted
from megarl.rollout.conversation import RolloutContext, derive_seed, run_conversation
from megarl.rollout.group_queue import GroupQueue, LocalKVStore
from megarl.rollout.partial_rollouts import PartialRollout
from megarl.rollout.scheduler import GenerationResult, Group, gather_rollouts
from megarl.types import Ids, Prompt, Rollout

pytestmark = [pytest.mark.alone, pytest.mark.slow]


class Calculator(EnvironmentPool):
    """Tools that take a moment, without a process."""

    def __init__(self) -> None:
        super().__init__(CHAT.catalog, 60.0, 1)

    async def call_tool(self, name: str, arguments: dict[str, Any]) -> ToolResult:
        await asyncio.sleep(random.random() * 0.002)
        return ToolResult(str(len(arguments["expression"])), True)


def gather(
    script: Script,
    prompts: list[Prompt],
    samples: int,
    seed: int = 1,
    first_group: int = 0,
    deadline_in: float | None = None,
    of: int | None = None,
    **config: Any,
) -> list[Rollout]:

    async def run() -> list[Rollout]:
        gathered = await gather_rollouts(
            prompts,
            GroupQueue(len(prompts)),
            script,
            RolloutContext(CHAT, Calculator(), parse, replace(CONFIG, **config)),
            samples=samples,
            greedy=False,
            seed=seed,
            first_group=first_group,
            deadline=None if deadline_in is None else asyncio.get_running_loop().time() + deadline_in,
            num_total=of,
        )
        assert not gathered.partials
        return gathered.rollouts

    return asyncio.run(run())


def test_all_samples_of_all_prompts_in_order() -> None:
    prompts = [replace(PROMPT, id=name) for name in "abc"]
    script = Script("3")
    rollouts = gather(script, prompts, 4, first_group=10)
    assert [rollout.prompt.id for rollout in rollouts] == list("aaaabbbbcccc")
    assert [rollout.group for rollout in rollouts] == [10] * 4 + [11] * 4 + [12] * 4
    assert 2 <= script.most_at_once <= CONFIG.concurrency
    assert all(rollout.turns[0].token_ids is rollout.prompt.token_ids for rollout in rollouts)


def test_each_sample_has_a_seed_of_its_own_that_does_not_depend_on_the_others() -> None:
    rollouts = gather(Script("3"), [PROMPT, PROMPT], 3, seed=4)
    seeds = [rollout.seed for rollout in rollouts]
    assert len(set(seeds)) == 6 and seeds == [derive_seed(4, group, i) for group in (0, 1) for i in range(3)]
    assert [rollout.seed for rollout in gather(Script("3"), [PROMPT], 1, seed=4, first_group=1)] == [seeds[3]]
    assert derive_seed(5, 0, 0) != seeds[0]


def test_only_the_failing_conversation_is_aborted() -> None:
    rollouts = gather(Fails("1", RequestFailed("late"), "3", "4"), [PROMPT], 4)
    assert sorted(rollout.status for rollout in rollouts) == ["aborted", "stop", "stop", "stop"]
    assert [rollout.failure for rollout in rollouts if rollout.failure] == ["late"]


def test_what_is_not_done_at_the_deadline_is_aborted_also_what_has_not_begun() -> None:
    script = Fails("1", None, "3", call("4"), *[None] * 6)
    rollouts = gather(script, [PROMPT], 7, deadline_in=0.3, concurrency=2)
    assert [rollout.status for rollout in rollouts] == ["stop", "aborted", "stop", *["aborted"] * 4]
    assert {rollout.failure for rollout in rollouts} == {"", "it did not finish within rollout.step_timeout"}
    assert rollouts[3].num_actions == len(said(call("4")).token_ids) and rollouts[3].tool_calls == 1
    assert rollouts[6].num_actions == 0


def test_once_too_many_are_aborted_the_others_are_not_waited_for() -> None:
    """The third of 20 is one too many for a tenth; the others would hang until the deadline, at which all are taken."""
    late = [RequestFailed("late")] * 3
    began = time.monotonic()
    with pytest.raises(TooManyAborted, match="3 of 20 rollouts were aborted") as raised:
        gather(Fails("1", *late, *[None] * 16), [PROMPT] * 5, 4, deadline_in=60.0, of=20, concurrency=20)
    assert raised.value.failures == ["late"] * 3 and time.monotonic() - began < 20.0
    rollouts = gather(Fails("1", *late[:2], *[None] * 17), [PROMPT] * 5, 4, deadline_in=0.5, of=20, concurrency=20)
    assert [rollout.status for rollout in rollouts].count("aborted") == 19


def test_a_failing_engine_is_one_error() -> None:
    class Gone(Script):
        async def generate(
            self, context: Sequence[int], params: dict[str, Any], routed: int = 0, on_tokens: Any = None
        ) -> Generation:
            raise RuntimeError("the engine cannot be reached")

    with pytest.raises(RuntimeError, match="cannot be reached"):
        gather(Gone(), [PROMPT, PROMPT], 2)


PROMPTS = [replace(PROMPT, id=str(i), messages=({"role": "user", "content": f"{i}?"},)) for i in range(40)]


def surroundings(**config: Any) -> RolloutContext:
    return RolloutContext(CHAT, Calculator(), parse, replace(CONFIG, max_turns=4, **config))


def together(
    writers: Sequence[Writer],
    prompts: Sequence[Prompt],
    tickets: Sequence[GroupQueue],
    needed: int | None = None,
    carried: Sequence[Sequence[Group]] = (),
    **config: Any,
) -> list[GenerationResult | BaseException]:
    """What each of the engines that share the tickets comes to; seed 7, two samples."""

    async def run() -> list[GenerationResult | BaseException]:
        engines = [
            gather_rollouts(
                prompts,
                local,
                writer,
                surroundings(**config),
                samples=2,
                greedy=False,
                seed=7,
                num_needed_groups=needed,
                partial_groups=carried[number] if carried else (),
                version=writer.weight_version,
            )
            for number, (writer, local) in enumerate(zip(writers, tickets, strict=True))
        ]
        return await asyncio.gather(*engines, return_exceptions=True)

    return asyncio.run(run())


def shared(groups: int, engines: int, carried: int = 0) -> list[GroupQueue]:
    counts = LocalKVStore()
    return [GroupQueue(groups, engines, counts, "step", carried) for _ in range(engines)]


def alone(prompt: Prompt) -> list[int]:
    """The tokens of a conversation that nothing has stopped."""
    return asyncio.run(run_conversation(begun(prompt), Writer(pause=0), surroundings(), {})).token_ids.tolist()


def no_failure(outcomes: Sequence[GenerationResult | BaseException]) -> list[GenerationResult]:
    for item in outcomes:
        if isinstance(item, BaseException):
            raise item
    return [item for item in outcomes if isinstance(item, GenerationResult)]


@pytest.mark.parametrize("pauses", [(0.0005,) * 3, (0.0001, 0.0005, 0.004)], ids=["alike", "one is slow"])
def test_engines_share_groups_without_losing_one_or_taking_it_twice(pauses: Sequence[float]) -> None:
    writers = [Writer(pause=pause) for pause in pauses]
    outcomes = no_failure(together(writers, PROMPTS, shared(40, 3)))
    rollouts = sorted((rollout for out in outcomes for rollout in out.rollouts), key=lambda item: item.group)
    assert [rollout.group for rollout in rollouts] == [group for group in range(40) for _ in range(2)]
    assert [rollout.seed for rollout in rollouts] == [derive_seed(7, g, sample) for g in range(40) for sample in (0, 1)]
    assert all(rollout.prompt.id == str(rollout.group) for rollout in rollouts)
    for out in outcomes:  # a group's samples are on one engine, in order
        assert [rollout.group for rollout in out.rollouts] == sorted(rollout.group for rollout in out.rollouts)
        assert len(out.rollouts) == 2 * len({rollout.group for rollout in out.rollouts})
    assert all(writer.most_at_once <= CONFIG.concurrency for writer in writers)


def to_the_end(
    writers: Sequence[Writer],
    prompts: Sequence[Prompt],
    tickets: Sequence[GroupQueue],
    needed: int | None = None,
    carried: Sequence[Sequence[Group]] = (),
    **config: Any,
) -> list[GenerationResult]:
    """As `together`; what a lost engine has left when all others are done is done by all of them, lost ones with a new
    writer."""
    result = no_failure(together(writers, prompts, tickets, needed, carried, **config))
    while any(out.engine_loss for out in result):
        if not (tickets[0].count_unclaimed() if needed is None else tickets[0].count_complete() < needed):
            break
        again = [Writer(writer.weight_version) for writer in writers]
        more = no_failure(together(again, prompts, tickets, needed, [()] * len(writers), **config))
        result = [item.merge(other) for item, other in zip(result, more, strict=True)]
    return result


def one_by_one(outcomes: Sequence[GenerationResult]) -> list[Rollout]:
    """All rollouts, by group; a group's are one engine's, by sample."""
    return sorted((item for out in outcomes for item in out.rollouts), key=lambda item: item.group)


def assert_nothing_lost(rollouts: Sequence[Rollout], prompts: Sequence[Prompt]) -> None:
    """Each sample once, with its own seed and the tokens that nothing has disturbed."""
    numbers = [(group, sample) for group in range(len(prompts)) for sample in (0, 1)]
    assert [(item.group, item.seed) for item in rollouts] == [(g, derive_seed(7, g, sample)) for g, sample in numbers]
    for rollout in rollouts:
        assert rollout.prompt.id == prompts[rollout.group].id
        assert rollout.token_ids.tolist() == alone(prompts[rollout.group])


def test_what_a_lost_engine_has_begun_is_done_by_the_rest() -> None:
    tickets, prompts = shared(16, 3), PROMPTS[:16]
    outcomes = no_failure(together([Writer(lasts=60), Writer(), Writer()], prompts, tickets))
    dead, *others = outcomes
    assert dead.engine_loss is not None and str(dead.engine_loss) == "the engine is gone" and dead.num_restarted == 0
    assert all(out.engine_loss is None and out.num_interrupted == 0 for out in others)
    assert_nothing_lost(one_by_one(outcomes), prompts)
    assert 0 < dead.num_interrupted == sum(out.num_restarted for out in others) <= 2 * CONFIG.concurrency
    assert tickets[0].count_unclaimed() == 0 and tickets[0].count_claimed() == 16


def test_an_engine_that_is_lost_and_starts_again_does_what_was_lost_and_nothing_else() -> None:
    """Alone, and lost twice: what was done before is not done again."""
    tickets, events, result = shared(6, 1), [], None
    for writer in (Writer(lasts=70), Writer(lasts=70), Writer()):

        async def gather_with(writer: Writer) -> GenerationResult:
            around = replace(
                surroundings(), on_rollout_finished=lambda rollout: events.append((rollout.prompt.id, rollout.seed))
            )
            options: dict[str, Any] = {"samples": 2, "greedy": False, "seed": 7}
            return await gather_rollouts(PROMPTS[:6], tickets[0], writer, around, **options)

        out = asyncio.run(gather_with(writer))
        result = out if result is None else result.merge(out)
    assert result is not None and result.engine_loss is None and 0 < result.num_interrupted == result.num_restarted
    assert_nothing_lost(result.rollouts, PROMPTS[:6])
    assert sorted(events) == sorted((item.prompt.id, item.seed) for item in result.rollouts)


def test_an_engine_that_is_seen_to_hang_is_lost_whatever_it_is_at() -> None:
    script, events = Fails("1", None, None, None), []

    async def hangs() -> None:
        while len(script.asked) < 4 or not events:
            await asyncio.sleep(0.01)
        raise EngineLost("hangs", "engine 0 sent no heartbeat")

    async def run() -> GenerationResult:
        around = replace(surroundings(), on_rollout_finished=events.append)
        options: dict[str, Any] = {"samples": 2, "greedy": False, "seed": 7, "watch": hangs}
        return await gather_rollouts(PROMPTS[:2], tickets, script, around, **options)

    tickets = GroupQueue(2)
    out = asyncio.run(run())
    assert (
        out.engine_loss is not None
        and out.engine_loss.fault == "hangs"
        and out.rollouts == []
        and out.num_interrupted == 3
    )
    back = [tickets.claim_returned(), tickets.claim_returned()]
    assert tickets.claim_returned() is None and sorted(item.number for item in back) == [0, 1]
    assert sorted(item.status or "" for group in back for item in group.group) == ["", "", "", "stop"]


@pytest.mark.parametrize("lasts", [5, 60, 150, 220])
def test_where_engines_share_more_than_is_needed_a_lost_ones_groups_go_on_elsewhere(lasts: int) -> None:
    """With what was carried, also where enough were complete before or after it was lost."""
    needed, begin = 6, 9
    left, carried, done = list(PROMPTS[:30]), [[], []], []
    for step in range(20):
        retained = sum(map(len, carried))
        fresh = left[: begin - retained]
        wanted = min(needed, retained + len(fresh))
        tickets = shared(len(fresh), 2, retained)
        writers = [Writer(step, 0.001, lasts=lasts if step in (0, 2) else -1), Writer(step, 0.003)]
        outcomes = to_the_end(writers, fresh, tickets, wanted, carried, max_staleness=100)
        left = left[tickets[0].count_claimed() :]
        rollouts = one_by_one(outcomes)
        assert sorted({item.group for item in rollouts}) == list(range(wanted)) and len(rollouts) == 2 * wanted
        done += rollouts
        carried = [out.partials for out in outcomes]
        while (back := tickets[0].claim_returned()) is not None:
            carried[0].append(back.group)
        if not left and not any(carried):
            break
    assert sorted(rollout.prompt.id for rollout in done) == sorted(prompt.id for prompt in PROMPTS[:30] for _ in "ab")
    assert all(rollout.token_ids.tolist() == alone(rollout.prompt) for rollout in done)


def test_of_few_groups_each_engine_begins_its_share_however_early_it_comes() -> None:
    outcomes = no_failure(together([Writer(pause=0.002)] * 4, PROMPTS[:8], shared(8, 4), concurrency=100))
    assert [len(out.rollouts) for out in outcomes] == [4] * 4


def test_while_a_tool_runs_the_engine_writes_for_somebody_else() -> None:
    """One slot; the tool of the first conversation returns when another has come to an end."""
    other_ended = asyncio.Event()

    class Waits(Calculator):
        async def call_tool(self, name: str, arguments: dict[str, Any]) -> ToolResult:
            await asyncio.wait_for(other_ended.wait(), 60.0)
            return ToolResult("3", True)

    class Policy(Script):
        async def generate(
            self, context: Ids | Sequence[int], params: dict[str, Any], routed: int = 0, on_tokens: Any = None
        ) -> Generation:
            assert self.at_once == 0
            out = await super().generate(context, params, routed)
            if len(self.asked) == 2:
                other_ended.set()
            return out

    tools = Waits()
    script = Policy(call("1+2"), "first to end", "last to end")
    around = RolloutContext(CHAT, tools, parse, replace(CONFIG, concurrency=1))
    options: dict[str, Any] = {"samples": 1, "greedy": False, "seed": 0}
    out = asyncio.run(gather_rollouts(PROMPTS[:2], GroupQueue(2), script, around, **options))
    assert [rollout.answer for rollout in out.rollouts] == ["last to end", "first to end"]


def test_no_more_conversations_are_begun_than_twice_what_the_engine_has_room_for() -> None:
    """All tools hang until the deadline, so that every slot is free all the time."""

    class Hangs(Calculator):
        begun = 0

        async def call_tool(self, name: str, arguments: dict[str, Any]) -> ToolResult:
            self.begun += 1
            await asyncio.sleep(3600)
            raise AssertionError

    tools = Hangs()
    around = RolloutContext(CHAT, tools, parse, replace(CONFIG, concurrency=3))

    async def run() -> None:
        tickets, options = GroupQueue(40), {"samples": 1, "greedy": False, "seed": 0}
        task = asyncio.create_task(
            gather_rollouts(PROMPTS, tickets, Script(call("1+2")), around, **options)  # type: ignore[arg-type]
        )
        while tools.begun < 6:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        assert (tools.begun, tickets.count_claimed()) == (6, 6)
        task.cancel()
        await asyncio.wait([task])

    asyncio.run(run())


def test_when_enough_groups_are_complete_the_rest_is_stopped_and_gone_on_with() -> None:
    """Steps of 6 groups with half as many again under way, on three engines, until there are no prompts."""
    engines, needed, begin = 3, 6, 9
    left, carried, done, anew = list(PROMPTS[:34]), [[] for _ in range(engines)], [], 0
    for step in range(20):
        retained = sum(map(len, carried))
        fresh = left[: begin - retained]
        wanted = min(needed, retained + len(fresh))
        tickets = shared(len(fresh), engines, retained)
        writers = [Writer(step, pause=0.003) for _ in range(engines)]
        outcomes = no_failure(together(writers, fresh, tickets, wanted, carried, max_staleness=100))
        left = left[tickets[0].count_claimed() :]
        rollouts = [rollout for out in outcomes for rollout in out.rollouts]
        # As many groups as are needed, numbered in the order in which they were complete.
        assert sorted({rollout.group for rollout in rollouts}) == list(range(wanted)) and len(rollouts) == 2 * wanted
        done += rollouts
        carried = [out.partials for out in outcomes]
        anew += sum(out.num_stale for out in outcomes)
        if not left and not any(carried):
            break
    assert sorted(rollout.prompt.id for rollout in done) == sorted(prompt.id for prompt in PROMPTS[:34] for _ in "ab")
    assert anew == 0 and step > 4
    assert any(turn.versions for rollout in done for turn in rollout.turns)  # some were stopped in the middle of a turn
    for rollout in done:
        assert rollout.token_ids.tolist() == alone(rollout.prompt)
        assert rollout.routing is not None and rollout.routing.flatten().tolist() == [*range(rollout.num_tokens - 1)]


def halted(version: int, text: str = "12") -> PartialRollout:
    around = surroundings()
    around.halt.set()
    return asyncio.run(run_conversation(begun(PROMPTS[1], 5), Script(said(text, "abort", version)), around, {}))


@pytest.mark.parametrize(("lag", "anew"), [(0, 2), (1, 1), (2, 0)])
def test_what_would_be_too_old_when_it_is_done_is_begun_anew(lag: int, anew: int) -> None:
    group = halted(2), halted(1)
    out = no_failure(
        together([Writer(version=3)], [], [GroupQueue(0, num_partial_groups=1)], 1, [[group]], max_staleness=lag)
    )[0]
    assert out.num_stale == anew and [rollout.seed for rollout in out.rollouts] == [5, 5]
    oldest = [int(min(rollout.turns[1].token_versions)) for rollout in out.rollouts]
    assert oldest == [2 if lag >= 1 else 3, 1 if lag >= 2 else 3]


def test_a_group_that_was_complete_too_late_counts_at_once() -> None:
    """It needs no policy, and comes before those that do."""
    ended = replace(halted(2), status="stop")
    groups = [(halted(2), halted(2)), (ended, ended)]
    out = no_failure(together([Writer(version=3)], PROMPTS[:5], [GroupQueue(5, num_partial_groups=2)], 1, [groups]))[0]
    assert [rollout.token_ids.tolist() for rollout in out.rollouts] == [ended.token_ids.tolist()] * 2
    assert [5, 5] in [[item.seed for item in group] for group in out.partials]
