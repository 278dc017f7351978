"""Steps with more groups under way than they need, on played engines: none is lost or comes twice."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from scripted import CHAT, CONFIG, PROMPT, DeterministicPolicy, parse
from thread_ranks import Thread, as_ranks

from megarl.checkpoint import manifest
from megarl.config import ConfigError
from megarl.config.keys import max_pending_groups
from megarl.data.loader import PromptLoader
from megarl.environments.process_sessions import EnvironmentPool
from megarl.environments.protocol import ToolResult
from megarl.rollout import scheduler
from megarl.rollout.conversation import RolloutContext
from megarl.rollout.group_queue import GroupQueue, LocalKVStore
from megarl.rollout.scheduler import gather_rollouts
from megarl.types import Prompt, Rollout, Rollouts
from megarl.types.comm import LOCAL
from megarl.workers.async_rollout import Oversampling

pytestmark = [pytest.mark.alone, pytest.mark.slow]

PROMPTS = [replace(PROMPT, id=str(i), messages=({"role": "user", "content": f"{i}?"},)) for i in range(60)]
NEEDED, SAMPLES = 4, 2


class Calculator(EnvironmentPool):
    """Tools that take a moment, without a process."""

    def __init__(self) -> None:
        super().__init__(CHAT.catalog, 60.0, 1)

    async def call_tool(self, name: str, arguments: dict[str, Any]) -> ToolResult:
        await asyncio.sleep(0)
        return ToolResult(str(len(arguments["expression"])), True)


@dataclass
class Run:
    """On one rank, which leads an engine: steps as the loop takes them."""

    rank: Any
    world: int
    counts: LocalKVStore
    oversample: float = 1.5
    max_staleness: int = 100
    pause: float = 0.002
    figures: list[dict[str, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.loader = PromptLoader(PROMPTS, NEEDED, seed=3)
        self.config = replace(CONFIG, oversample=self.oversample, max_staleness=self.max_staleness, max_turns=4)
        self.ahead = Oversampling(self.config, self.loader, self.rank, self.rank.rank, self.world)

    def generate(self, prompts: list[Prompt], step: int, greedy: bool = False) -> Rollouts:
        plan = self.ahead.plan(prompts, step, greedy)
        name = f"{step} {greedy}"
        tickets = GroupQueue(len(plan.prompts), self.world, self.counts, name, plan.num_partial_groups)
        mine = asyncio.run(
            gather_rollouts(
                plan.prompts,
                tickets,
                DeterministicPolicy(step, self.pause),
                RolloutContext(CHAT, Calculator(), parse, self.config),
                samples=SAMPLES,
                greedy=greedy,
                seed=step,
                num_needed_groups=plan.num_needed,
                partial_groups=plan.partial_groups,
                version=step,
            )
        )
        rollouts = Rollouts.gather(mine.rollouts, [item.group for item in mine.rollouts], self.rank, step)
        self.ahead.record_result(plan, mine, tickets.count_claimed(), rollouts)
        self.figures.append(self.ahead.metrics)
        return rollouts

    def steps(self, first: int, last: int) -> list[tuple[Rollout, ...]]:
        """What is here of each."""
        result = []
        for step in range(first, last):
            rollouts = self.generate(self.loader.next_batch(), step)
            assert len(rollouts) == NEEDED * SAMPLES and set(rollouts.group.tolist()) == set(range(NEEDED))
            assert rollouts.group.tolist() == sorted(rollouts.group.tolist())
            result.append(rollouts.local)
        return result

    def save(self, folder: Path) -> str:
        entries = self.rank.all_gather_objects({path.name: entry for path, entry in self.ahead.save()(folder).items()})
        if self.rank.rank == 0:
            files = {f"partial_groups/{name}": entry._asdict() for part in entries for name, entry in part.items()}
            host = {"host.json": {"bytes": 0, "sha256": ""}}
            (folder / manifest.FILE_NAME).write_text(json.dumps({"files": files | host}))
        self.rank.all_gather_objects(None)
        return json.dumps(self.loader.state_dict())

    def resume(self, folder: Path, state: str) -> None:
        self.loader.load_state_dict(json.loads(state))
        self.ahead.restore(folder)


def prompts_of(result: list[list[tuple[Rollout, ...]]]) -> Counter[str]:
    return Counter(item.prompt.id for run in result for step in run for item in step)


def in_order(count: int) -> list[str]:
    return [prompt.id for prompt in PromptLoader(PROMPTS, NEEDED, seed=3).next_items(count)]


@pytest.mark.parametrize(("before", "after"), [(1, 1), (2, 2), (2, 3), (3, 1)])
def test_no_group_is_lost_or_comes_twice_also_on_other_engines(tmp_path: Path, before: int, after: int) -> None:
    counts = LocalKVStore()

    def first(rank: Thread) -> tuple[Any, str]:
        run = Run(rank, before, counts)
        return run.steps(1, 5), run.save(tmp_path)

    begun = as_ranks(before, first)

    def second(rank: Thread) -> tuple[Any, Any, list[str]]:
        run = Run(rank, after, counts)
        run.resume(tmp_path, begun[0][1])
        later = run.steps(5, 9)
        retained = [item.prompt.id for group in run.ahead._partial_groups for item in group]
        assert run.ahead._num_partial_groups == sum(map(len, rank.all_gather_objects(retained))) // SAMPLES
        return later, run.figures, retained

    ended = as_ranks(after, second)
    done = prompts_of([result for result, _ in begun]) + prompts_of([result for result, *_ in ended])
    retained = Counter(name for *_, names in ended for name in names)
    assert done.total() == 8 * NEEDED * SAMPLES and not done.keys() & retained.keys()
    everything = done + retained
    assert set(everything.values()) == {SAMPLES}
    assert set(everything) == set(in_order(len(everything)))  # the first of the loader's, without a gap
    figures = ended[0][1]
    assert all(item == figures for _, item, _ in ended)  # on all ranks
    assert all(0 <= item["rollout/partial_groups"] <= max_pending_groups(NEEDED, 1.5) - NEEDED for item in figures)
    assert any(item["rollout/staleness_max"] > 0 for item in figures)


@pytest.fixture
def exact(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing depends on the clock: all that happens follows from the order in which tasks wait."""

    async def directly(work: Any, *arguments: Any) -> Any:
        return work(*arguments)

    monkeypatch.setattr(scheduler.asyncio, "to_thread", directly)
    monkeypatch.setattr(scheduler, "_POLL_S", 3600.0)
    monkeypatch.setattr(scheduler, "_RETURNED_POLL_S", 3600.0)
    monkeypatch.setattr(scheduler.ShieldedTasks, "run", lambda self, counting: counting)
    yield


@pytest.mark.usefixtures("exact")
def test_a_run_that_was_stopped_goes_on_as_one_that_was_not(tmp_path: Path) -> None:
    """Token by token, with their log-probs, versions and routing, and in the same order."""
    full = Run(LOCAL, 1, LocalKVStore(), pause=0.0, max_staleness=2)
    expected = full.steps(1, 9)
    assert any(turn.versions for step in expected for item in step for turn in item.turns)
    for stop in (2, 5):
        folder = tmp_path / str(stop)
        folder.mkdir()
        before = Run(LOCAL, 1, LocalKVStore(), pause=0.0, max_staleness=2)
        result = before.steps(1, stop)
        state = before.save(folder)
        after = Run(LOCAL, 1, LocalKVStore(), pause=0.0, max_staleness=2)
        after.resume(folder, state)
        result += after.steps(stop, 9)
        assert result == expected
        routing = [[item.routing.tolist() for step in run for item in step] for run in (result, expected)]  # type: ignore
        assert routing[0] == routing[1]


def test_figures_by_hand() -> None:
    run = Run(LOCAL, 1, LocalKVStore(), max_staleness=1)
    for step in range(1, 6):
        rollouts = run.generate(run.loader.next_batch(), step)
        lags = [
            step - version for item in rollouts.local for version, tokens in item.version_spans for _ in range(tokens)
        ]
        figures = run.figures[-1]
        assert figures["rollout/staleness_max"] == max(lags) <= 1
        assert figures["rollout/staleness_mean"] == pytest.approx(sum(lags) / len(lags))
        assert 0 <= figures["rollout/idle_frac"] < 1


def test_only_the_steps_own_generation_of_all_its_prompts_is_over_sampled() -> None:
    run = Run(LOCAL, 1, LocalKVStore())
    value = run.loader.next_batch()
    state = run.loader.state_dict()
    for prompts, greedy in ((value, True), (PROMPTS[:3], False), (value, False)):  # the last is the second of the step
        plan = run.ahead.plan(prompts, 1, greedy)
        assert (plan.prompts, plan.num_needed, plan.num_partial_groups) == (prompts, None, 0)
    assert run.loader.state_dict() == state
    plan = run.ahead.plan(value, 2, False)
    assert (len(plan.prompts), plan.num_needed, plan.is_training) == (6, NEEDED, True)


def test_without_it_nothing_is_kept_written_or_asked_for(tmp_path: Path) -> None:
    run = Run(LOCAL, 1, LocalKVStore(), oversample=1.0)
    value = run.loader.next_batch()
    state = run.loader.state_dict()
    rollouts = run.generate(value, 1)
    assert [item.prompt.id for item in rollouts.local] == [prompt.id for prompt in value for _ in range(SAMPLES)]
    assert run.loader.state_dict() == state and run.figures[-1].keys() == {"rollout/idle_frac"}
    assert run.ahead.save()(tmp_path) == {} and not list(tmp_path.iterdir())


def test_what_was_kept_is_gone_on_with_where_over_sampling_is_turned_off(tmp_path: Path) -> None:
    before = Run(LOCAL, 1, LocalKVStore(), oversample=2.0)
    result = before.steps(1, 3)
    state = before.save(tmp_path)
    after = Run(LOCAL, 1, LocalKVStore(), oversample=1.0)
    after.resume(tmp_path, state)
    retained = after.ahead._num_partial_groups
    result += after.steps(3, 5)
    assert retained > 0 == after.ahead._num_partial_groups and after.ahead.save()(tmp_path / "none") == {}
    assert prompts_of([result]) == Counter({name: SAMPLES for name in in_order(4 * NEEDED)})


def test_what_was_kept_is_not_dropped_where_generation_goes_on_beside_training(tmp_path: Path) -> None:
    """It would begin the prompts that come next, and those of the groups have been handed out."""
    before = Run(LOCAL, 1, LocalKVStore(), oversample=2.0)
    before.steps(1, 2)
    state = before.save(tmp_path)
    after = Run(LOCAL, 1, LocalKVStore(), oversample=1.0)
    after.ahead._config = replace(after.ahead._config, asynchronous=True)
    with pytest.raises(ConfigError, match="groups of partial rollouts .* rollout.asynchronous=true cannot"):
        after.resume(tmp_path, state)


def test_what_was_kept_is_not_gone_on_with_where_routing_is_replayed(tmp_path: Path) -> None:
    """Newer weights would read it again, and choose other experts than those on record."""
    before = Run(LOCAL, 1, LocalKVStore(), oversample=2.0)
    before.steps(1, 2)
    state = before.save(tmp_path)
    after = Run(LOCAL, 1, LocalKVStore(), oversample=1.0)
    after.ahead._replays_routing = True
    with pytest.raises(ConfigError, match="groups of partial rollouts .* train.routing_replay=true cannot"):
        after.resume(tmp_path, state)
    anew = Run(LOCAL, 1, LocalKVStore(), oversample=1.0, max_staleness=0)
    anew.ahead._replays_routing = True
    anew.resume(tmp_path, state)


def test_refuses_partial_groups_of_earlier_versions(tmp_path: Path) -> None:
    run = Run(LOCAL, 1, LocalKVStore(), oversample=2.0)
    run.steps(1, 2)
    state = run.save(tmp_path)
    (tmp_path / "partial_groups").rename(tmp_path / "carried")
    manifest_file = tmp_path / manifest.FILE_NAME
    manifest_file.write_text(manifest_file.read_text().replace("partial_groups/", "carried/"))
    (tmp_path / "carried/engine_00000.bin").write_text('{"groups": [], "arrays": []}\n')
    with pytest.raises(ConfigError, match="carried/engine_00000.bin does not hold conversations of this program"):
        Run(LOCAL, 1, LocalKVStore()).resume(tmp_path, state)


def test_a_damaged_file_is_one_line(tmp_path: Path) -> None:
    run = Run(LOCAL, 1, LocalKVStore(), oversample=2.0)
    run.steps(1, 2)
    state = run.save(tmp_path)
    (tmp_path / "partial_groups/engine_00000.bin").write_text("{}\n")
    with pytest.raises(ConfigError, match="does not hold conversations of this program"):
        Run(LOCAL, 1, LocalKVStore()).resume(tmp_path, state)


@pytest.mark.parametrize(("needed", "oversample", "count"), [(10, 1.1, 11), (4, 1.5, 6), (3, 1.5, 5), (64, 1.0, 64)])
def test_groups_under_way(needed: int, oversample: float, count: int) -> None:
    assert max_pending_groups(needed, oversample) == count
