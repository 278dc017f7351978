"""Oversampling with scripted engines: no group is lost or trained twice, also across a resume."""

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
from thread_ranks import ThreadRank, as_ranks

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


class FakeCalculator(EnvironmentPool):
    """Tools that yield once, without a process."""

    def __init__(self) -> None:
        super().__init__(CHAT.catalog, 60.0, 1)

    async def call_tool(self, name: str, arguments: dict[str, Any]) -> ToolResult:
        await asyncio.sleep(0)
        return ToolResult(str(len(arguments["expression"])), True)


@dataclass
class OversampledRun:
    """Training steps without training, on one rank that leads an engine."""

    rank: Any
    world: int
    store: LocalKVStore
    oversample: float = 1.5
    max_staleness: int = 100
    pause: float = 0.002
    metrics: list[dict[str, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.loader = PromptLoader(PROMPTS, NEEDED, seed=3)
        self.config = replace(CONFIG, oversample=self.oversample, max_staleness=self.max_staleness, max_turns=4)
        self.oversampling = Oversampling(self.config, self.loader, self.rank, self.rank.rank, self.world)

    def generate(self, prompts: list[Prompt], step: int, greedy: bool = False) -> Rollouts:
        plan = self.oversampling.plan(prompts, step, greedy)
        name = f"{step} {greedy}"
        queue = GroupQueue(len(plan.prompts), self.world, self.store, name, plan.num_partial_groups)
        result = asyncio.run(
            gather_rollouts(
                plan.prompts,
                queue,
                DeterministicPolicy(step, self.pause),
                RolloutContext(CHAT, FakeCalculator(), parse, self.config),
                samples=SAMPLES,
                greedy=greedy,
                seed=step,
                num_needed_groups=plan.num_needed,
                partial_groups=plan.partial_groups,
                version=step,
            )
        )
        rollouts = Rollouts.gather(result.rollouts, [item.group for item in result.rollouts], self.rank, step)
        self.oversampling.record_result(plan, result, queue.count_claimed(), rollouts)
        self.metrics.append(self.oversampling.metrics)
        return rollouts

    def run_steps(self, first: int, last: int) -> list[tuple[Rollout, ...]]:
        """Return the local rollouts of each step."""
        result = []
        for step in range(first, last):
            rollouts = self.generate(self.loader.next_batch(), step)
            assert len(rollouts) == NEEDED * SAMPLES and set(rollouts.group.tolist()) == set(range(NEEDED))
            assert rollouts.group.tolist() == sorted(rollouts.group.tolist())
            result.append(rollouts.local)
        return result

    def save(self, folder: Path) -> str:
        entries = self.rank.all_gather_objects(
            {path.name: entry for path, entry in self.oversampling.save()(folder).items()}
        )
        if self.rank.rank == 0:
            files = {f"partial_groups/{name}": entry._asdict() for part in entries for name, entry in part.items()}
            host = {"host.json": {"bytes": 0, "sha256": ""}}
            (folder / manifest.FILE_NAME).write_text(json.dumps({"files": files | host}))
        self.rank.all_gather_objects(None)
        return json.dumps(self.loader.state_dict())

    def resume(self, folder: Path, state: str) -> None:
        self.loader.load_state_dict(json.loads(state))
        self.oversampling.restore(folder)


def count_prompts(result: list[list[tuple[Rollout, ...]]]) -> Counter[str]:
    return Counter(item.prompt.id for run in result for step in run for item in step)


def first_prompt_ids(count: int) -> list[str]:
    return [prompt.id for prompt in PromptLoader(PROMPTS, NEEDED, seed=3).next_items(count)]


@pytest.mark.parametrize(("before", "after"), [(1, 1), (2, 2), (2, 3), (3, 1)])
def test_no_group_is_lost_or_repeated_across_resume(tmp_path: Path, before: int, after: int) -> None:
    store = LocalKVStore()

    def first(rank: ThreadRank) -> tuple[Any, str]:
        run = OversampledRun(rank, before, store)
        return run.run_steps(1, 5), run.save(tmp_path)

    before_results = as_ranks(before, first)

    def second(rank: ThreadRank) -> tuple[Any, Any, list[str]]:
        run = OversampledRun(rank, after, store)
        run.resume(tmp_path, before_results[0][1])
        steps = run.run_steps(5, 9)
        partial_ids = [item.prompt.id for group in run.oversampling._partial_groups for item in group]
        assert run.oversampling._num_partial_groups == sum(map(len, rank.all_gather_objects(partial_ids))) // SAMPLES
        return steps, run.metrics, partial_ids

    after_results = as_ranks(after, second)
    trained = count_prompts([result for result, _ in before_results]) + count_prompts(
        [result for result, *_ in after_results]
    )
    partial = Counter(name for *_, names in after_results for name in names)
    assert trained.total() == 8 * NEEDED * SAMPLES and not trained.keys() & partial.keys()
    all_groups = trained + partial
    assert set(all_groups.values()) == {SAMPLES}
    assert set(all_groups) == set(first_prompt_ids(len(all_groups)))  # the loader's first prompts, without a gap
    metrics = after_results[0][1]
    assert all(item == metrics for _, item, _ in after_results)  # on all ranks
    assert all(0 <= item["rollout/partial_groups"] <= max_pending_groups(NEEDED, 1.5) - NEEDED for item in metrics)
    assert any(item["rollout/staleness_max"] > 0 for item in metrics)


@pytest.fixture
def deterministic_scheduler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make the scheduler independent of the clock: only the order of tasks matters."""

    async def run_directly(work: Any, *arguments: Any) -> Any:
        return work(*arguments)

    monkeypatch.setattr(scheduler.asyncio, "to_thread", run_directly)
    monkeypatch.setattr(scheduler, "_POLL_S", 3600.0)
    monkeypatch.setattr(scheduler, "_RETURNED_POLL_S", 3600.0)
    monkeypatch.setattr(scheduler.ShieldedTasks, "run", lambda self, counting: counting)
    yield


@pytest.mark.usefixtures("deterministic_scheduler")
def test_resumed_run_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    """Tokens, log-probs, versions, routing and order are the same."""
    uninterrupted = OversampledRun(LOCAL, 1, LocalKVStore(), pause=0.0, max_staleness=2)
    expected = uninterrupted.run_steps(1, 9)
    assert any(turn.versions for step in expected for item in step for turn in item.turns)
    for stop in (2, 5):
        folder = tmp_path / str(stop)
        folder.mkdir()
        before = OversampledRun(LOCAL, 1, LocalKVStore(), pause=0.0, max_staleness=2)
        result = before.run_steps(1, stop)
        state = before.save(folder)
        after = OversampledRun(LOCAL, 1, LocalKVStore(), pause=0.0, max_staleness=2)
        after.resume(folder, state)
        result += after.run_steps(stop, 9)
        assert result == expected
        routing = [[item.routing.tolist() for step in run for item in step] for run in (result, expected)]  # type: ignore
        assert routing[0] == routing[1]


def test_staleness_metrics_by_hand() -> None:
    run = OversampledRun(LOCAL, 1, LocalKVStore(), max_staleness=1)
    for step in range(1, 6):
        rollouts = run.generate(run.loader.next_batch(), step)
        lags = [
            step - version for item in rollouts.local for version, tokens in item.version_spans for _ in range(tokens)
        ]
        metrics = run.metrics[-1]
        assert metrics["rollout/staleness_max"] == max(lags) <= 1
        assert metrics["rollout/staleness_mean"] == pytest.approx(sum(lags) / len(lags))
        assert 0 <= metrics["rollout/idle_frac"] < 1


def test_only_the_training_generation_is_oversampled() -> None:
    run = OversampledRun(LOCAL, 1, LocalKVStore())
    next_prompts = run.loader.next_batch()
    state = run.loader.state_dict()
    for prompts, greedy in (
        (next_prompts, True),
        (PROMPTS[:3], False),
        (next_prompts, False),
    ):  # the last is the step's second generation
        plan = run.oversampling.plan(prompts, 1, greedy)
        assert (plan.prompts, plan.num_needed, plan.num_partial_groups) == (prompts, None, 0)
    assert run.loader.state_dict() == state
    plan = run.oversampling.plan(next_prompts, 2, False)
    assert (len(plan.prompts), plan.num_needed, plan.is_training) == (6, NEEDED, True)


def test_without_oversampling_nothing_is_kept_or_saved(tmp_path: Path) -> None:
    run = OversampledRun(LOCAL, 1, LocalKVStore(), oversample=1.0)
    next_prompts = run.loader.next_batch()
    state = run.loader.state_dict()
    rollouts = run.generate(next_prompts, 1)
    assert [item.prompt.id for item in rollouts.local] == [prompt.id for prompt in next_prompts for _ in range(SAMPLES)]
    assert run.loader.state_dict() == state and run.metrics[-1].keys() == {"rollout/idle_frac"}
    assert run.oversampling.save()(tmp_path) == {} and not list(tmp_path.iterdir())


def test_resumes_partial_groups_without_oversampling(tmp_path: Path) -> None:
    before = OversampledRun(LOCAL, 1, LocalKVStore(), oversample=2.0)
    result = before.run_steps(1, 3)
    state = before.save(tmp_path)
    after = OversampledRun(LOCAL, 1, LocalKVStore(), oversample=1.0)
    after.resume(tmp_path, state)
    num_partial = after.oversampling._num_partial_groups
    result += after.run_steps(3, 5)
    assert (
        num_partial > 0 == after.oversampling._num_partial_groups and after.oversampling.save()(tmp_path / "none") == {}
    )
    assert count_prompts([result]) == Counter({name: SAMPLES for name in first_prompt_ids(4 * NEEDED)})


def test_asynchronous_rollouts_reject_partial_groups(tmp_path: Path) -> None:
    """Asynchronous generation starts with the next prompts, and would skip those of the partial groups."""
    before = OversampledRun(LOCAL, 1, LocalKVStore(), oversample=2.0)
    before.run_steps(1, 2)
    state = before.save(tmp_path)
    after = OversampledRun(LOCAL, 1, LocalKVStore(), oversample=1.0)
    after.oversampling._config = replace(after.oversampling._config, asynchronous=True)
    with pytest.raises(ConfigError, match="groups of partial rollouts .* rollout.asynchronous=true cannot"):
        after.resume(tmp_path, state)


def test_reads_the_folder_name_of_earlier_versions(tmp_path: Path) -> None:
    run = OversampledRun(LOCAL, 1, LocalKVStore(), oversample=2.0)
    run.run_steps(1, 2)
    state = run.save(tmp_path)
    (tmp_path / "partial_groups").rename(tmp_path / "carried")
    manifest_file = tmp_path / manifest.FILE_NAME
    manifest_file.write_text(manifest_file.read_text().replace("partial_groups/", "carried/"))
    resumed = OversampledRun(LOCAL, 1, LocalKVStore())
    resumed.resume(tmp_path, state)
    assert resumed.oversampling._num_partial_groups == run.oversampling._num_partial_groups > 0


def test_damaged_file_raises(tmp_path: Path) -> None:
    run = OversampledRun(LOCAL, 1, LocalKVStore(), oversample=2.0)
    run.run_steps(1, 2)
    state = run.save(tmp_path)
    (tmp_path / "partial_groups/engine_00000.bin").write_text("{}\n")
    with pytest.raises(ConfigError, match="does not hold conversations of this program"):
        OversampledRun(LOCAL, 1, LocalKVStore()).resume(tmp_path, state)


@pytest.mark.parametrize(
    ("num_needed", "oversample", "count"), [(10, 1.1, 11), (4, 1.5, 6), (3, 1.5, 5), (64, 1.0, 64)]
)
def test_max_pending_groups(num_needed: int, oversample: float, count: int) -> None:
    assert max_pending_groups(num_needed, oversample) == count
