"""The rollout stream: the prompts that it admits, requests that it rejects, and groups in flight across a resume."""

from __future__ import annotations

import asyncio
import json
import threading
from collections import Counter
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from scripted import CHAT, PROMPT, DeterministicPolicy, parse
from thread_ranks import ThreadRank, as_ranks

from megarl.checkpoint import manifest
from megarl.config import Config, ConfigError, from_dict
from megarl.config.keys import max_pending_groups
from megarl.data.loader import PromptLoader
from megarl.environments.process_sessions import EnvironmentPool
from megarl.environments.protocol import ToolResult
from megarl.rollout.conversation import RolloutContext
from megarl.rollout.group_queue import LocalKVStore
from megarl.rollout.group_stream import AdmittedPrompt, GroupStream
from megarl.types import LOCAL, Prompt, Rollout, Rollouts
from megarl.workers.async_rollout import RolloutStream

pytestmark = [pytest.mark.alone, pytest.mark.slow]

PROMPTS = [replace(PROMPT, id=str(i), messages=({"role": "user", "content": f"{i}?"},)) for i in range(60)]
NEEDED, SAMPLES, LAST = 4, 2, 6


class FakeStreamRunner:
    """A fake engine runner that records admitted prompts."""

    def __init__(self) -> None:
        self.groups, self.is_ordered = 0, None
        self.admitted: list[tuple[str, int, int]] = []

    def start_stream(self, queue: Any, max_groups: int, is_ordered: bool, **settings: Any) -> None:
        self.groups, self.is_ordered = max_groups, is_ordered

    def admit(self, prompts: Sequence[AdmittedPrompt]) -> None:
        self.admitted += [(item.prompt.id, item.seed, item.index) for item in prompts]

    def set_version(self, version: int) -> None:
        return None


def make_config(**rollout: Any) -> Config:
    rollout = {"max_turns": 4, "concurrency": 6, "max_new_tokens": 100, **rollout}
    return from_dict({"run": {"num_rollout": LAST}, "data": {"prompts_per_step": NEEDED}, "rollout": rollout})


def make_stream(**rollout: Any) -> tuple[RolloutStream, Any, PromptLoader[Prompt]]:
    runner: Any = FakeStreamRunner()
    loader = PromptLoader(PROMPTS, NEEDED, seed=3, shuffle=False)
    config = make_config(**rollout)
    arguments = LOCAL, runner, 0, 2, LocalKVStore(), lambda step: 10 * step, print
    return RolloutStream(config, loader, *arguments), runner, loader


@pytest.mark.parametrize("max_staleness", [0, 1, 3])
def test_admits_each_step_within_max_staleness(max_staleness: int) -> None:
    stream, runner, loader = make_stream(asynchronous=True, max_staleness=max_staleness)
    for step in range(1, LAST + 1):
        prompts = loader.next_batch()
        assert stream.provides(prompts) and not stream.provides(prompts[:-1])
        stream.request_groups(NEEDED, 8, step, step - 1)
        assert len(runner.admitted) == NEEDED * min(LAST, step + max_staleness)
        stream.on_weight_sync(step)
        assert len(runner.admitted) == NEEDED * min(LAST, step + 1 + max_staleness)
    assert runner.admitted == [
        (str(4 * step + index), 10 * (step + 1), index) for step in range(LAST) for index in range(4)
    ]
    assert (runner.groups, runner.is_ordered) == (2 * (1 + max_staleness), True)  # for two engines


def test_further_prompts_of_a_step_come_from_those_in_flight() -> None:
    """As an algorithm asks for that samples until its batch is full: the next steps' prompts are used, and replaced."""
    stream, runner, loader = make_stream(asynchronous=True, max_staleness=1)
    loader.next_batch()
    stream.request_groups(NEEDED, 8, 1, 0)
    assert len(runner.admitted) == 8
    assert stream.provides(loader.next_items(3))
    stream.request_groups(3, 8, 1, 0)
    assert [int(name) for name, *_ in runner.admitted] == list(range(11))  # always as many as a step needs ahead


def test_oversampling_keeps_the_same_number_in_flight() -> None:
    stream, runner, loader = make_stream(oversample=1.5)
    for step in range(1, 4):
        loader.next_batch()
        stream.request_groups(NEEDED, 8, step, step - 1)
        assert stream.metrics["rollout/partial_groups"] == (2 if step > 1 else 0)
        assert len(runner.admitted) == 4 * step + 2
        stream.on_weight_sync(step)
        assert len(runner.admitted) == 4 * step + 2
    assert (runner.groups, runner.is_ordered) == (3, False)


def test_oversampling_combines_with_asynchronous_generation() -> None:
    stream, runner, loader = make_stream(oversample=1.5, asynchronous=True, max_staleness=1)
    loader.next_batch()
    stream.request_groups(NEEDED, 8, 1, 0)
    assert len(runner.admitted) == 4 + 2 + 4
    stream.on_weight_sync(1)
    assert len(runner.admitted) == 8 + 2 + 4


def test_synchronous_generation_needs_no_stream() -> None:
    stream, _, loader = make_stream()
    assert not stream.provides(loader.next_batch()) and stream.save()(Path("none")) == {}


def test_skipped_prompts_or_changed_samples_raise() -> None:
    stream, _, loader = make_stream(asynchronous=True)
    loader.next_batch()
    stream.request_groups(NEEDED, 8, 1, 0)
    loader.next_batch()
    with pytest.raises(ConfigError, match="wants 4 samples of each prompt, but 8 were already started"):
        stream.request_groups(NEEDED, 4, 2, 1)
    loader.next_batch()
    with pytest.raises(ConfigError, match="generates for 4 prompts, but the loader has returned 8"):
        stream.request_groups(NEEDED, 8, 3, 2)


class FakeCalculator(EnvironmentPool):
    """Tools that yield once, without a process."""

    def __init__(self) -> None:
        super().__init__(CHAT.catalog, 60.0, 1)

    async def call_tool(self, name: str, arguments: dict[str, Any]) -> ToolResult:
        await asyncio.sleep(0)
        return ToolResult(str(len(arguments["expression"])), True)


class ScriptedRunner:
    """A `GroupStream` with a scripted engine, in a thread of its own as in `RolloutRunner`."""

    def __init__(self, config: Config, pause: float) -> None:
        self.policy = DeterministicPolicy(pause=pause)
        self._config = config.rollout
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(60)

    def start_stream(self, queue: Any, **settings: Any) -> None:
        async def start() -> None:
            context = RolloutContext(CHAT, FakeCalculator(), parse, self._config)
            self.stream = GroupStream(queue, self.policy, context, timeout=60.0, **settings)
            self._task = asyncio.create_task(self.stream.run())

        self._run(start())

    def admit(self, prompts: Sequence[AdmittedPrompt]) -> None:
        self._run(self.stream.admit(prompts))

    def collect(self, count: int) -> Any:
        return self._run(self.stream.collect(count))

    def sleep(self) -> None:
        self._run(self.stream.pause("retract", sleeps=True))

    def wake(self) -> None:
        self._run(self.stream.resume())

    def set_version(self, version: int) -> None:
        self.policy.weight_version = version
        self._run(self.stream.set_version(version))

    def hold_claims(self, is_held: bool) -> None:
        self._run(self.stream.hold_claims(is_held))

    def snapshot(self) -> Any:
        return self._run(self.stream.snapshot())

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._task.cancel)
        self._loop.call_soon_threadsafe(self._loop.call_later, 0.1, self._loop.stop)
        self._thread.join()


@dataclass
class OversampledRun:
    """Training steps without training, on one rank that leads an engine."""

    rank: Any
    world: int
    store: LocalKVStore
    oversample: float = 1.5
    max_staleness: int = 100
    pause: float = 0.002
    policy: str = ""
    metrics: list[dict[str, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.loader = PromptLoader(PROMPTS, NEEDED, seed=3)
        config = make_config(oversample=self.oversample, max_staleness=self.max_staleness)
        self.runner: Any = ScriptedRunner(config, self.pause)
        arguments = self.rank, self.runner, self.rank.rank, self.world, self.store, lambda step: step, print
        self.stream = RolloutStream(config, self.loader, *arguments, self.policy)

    def run_steps(self, first: int, last: int) -> list[tuple[Rollout, ...]]:
        """Return the local rollouts of each step."""
        result = []
        for step in range(first, last):
            if self.stream.is_running:
                self.stream.on_weight_sync(step - 1)
                self.rank.all_gather_objects(None)
            else:
                self.runner.policy.weight_version = step - 1
            assert self.stream.provides(self.loader.next_batch())
            self.stream.request_groups(NEEDED, SAMPLES, step, step - 1)
            self.runner.wake()
            collected = self.runner.collect(NEEDED)
            groups = [item.group for item in collected.rollouts]
            rollouts = Rollouts.gather(collected.rollouts, groups, self.rank, step - 1)
            self.stream.update_metrics(collected, rollouts)
            self.metrics.append(dict(self.stream.metrics))
            assert len(rollouts) == NEEDED * SAMPLES and set(rollouts.group.tolist()) == set(range(NEEDED))
            result.append(rollouts.local)
            self.runner.sleep()
            self.rank.all_gather_objects(None)
        return result

    def save(self, folder: Path, name: str = "partial_groups") -> str:
        entries = self.rank.all_gather_objects({path.name: entry for path, entry in self.stream.save()(folder).items()})
        if self.rank.rank == 0:
            files = {f"{name}/{file}": entry._asdict() for part in entries for file, entry in part.items()}
            host = {"host.json": {"bytes": 0, "sha256": ""}}
            (folder / manifest.FILE_NAME).write_text(json.dumps({"files": files | host}))
        self.rank.all_gather_objects(None)
        self.runner.close()
        return json.dumps(self.loader.state_dict())

    def resume(self, folder: Path, state: str) -> None:
        self.loader.load_state_dict(json.loads(state))
        self.stream.restore(folder)


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
    second_store, last = LocalKVStore(), tmp_path / "last"
    last.mkdir()

    def second(rank: ThreadRank) -> tuple[Any, Any, list[str]]:
        run = OversampledRun(rank, after, second_store)
        run.resume(tmp_path, before_results[0][1])
        steps = run.run_steps(5, 9)
        partial_ids = [item.prompt.id for group in run.runner.snapshot() for item in group]
        run.save(last)
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
    of_one_engine = {"rollout/idle_frac", "rollout/group_age_s_mean", "rollout/group_age_s_max"}
    for _, item, _ in after_results:  # on all ranks
        assert [row.items() - {(name, row[name]) for name in of_one_engine} for row in item] == [
            row.items() - {(name, row[name]) for name in of_one_engine} for row in metrics
        ]
    assert all(0 <= row["rollout/partial_groups"] <= max_pending_groups(NEEDED, 1.5) - NEEDED for row in metrics)
    assert any(row["rollout/staleness_max"] > 0 for row in metrics)


def test_streams_of_two_policies_do_not_meet(tmp_path: Path) -> None:
    """Each has its own queue in the store of the ranks, position in the prompts, and folder in a checkpoint."""
    store = LocalKVStore()
    first = OversampledRun(LOCAL, 1, store)
    second = OversampledRun(LOCAL, 1, store, policy="b")
    second.loader = second.stream._loader = first.loader.fork("b")  # type: ignore[assignment]
    trained = count_prompts([first.run_steps(1, 4)]), count_prompts([second.run_steps(1, 3)])
    assert trained[0].total() == 3 * NEEDED * SAMPLES and trained[1].total() == 2 * NEEDED * SAMPLES
    saved = second.save(tmp_path, "partial_groups_b")
    state = json.loads(first.save(tmp_path / "first"))
    assert (state["samples"], state["forks"]) == (3 * NEEDED, {"b": 2 * NEEDED}) and json.loads(saved)["samples"] == 8
    again = OversampledRun(LOCAL, 1, LocalKVStore(), policy="b")
    again.loader.load_state_dict(json.loads(saved))
    again.stream.restore(tmp_path)
    other = OversampledRun(LOCAL, 1, LocalKVStore())
    other.stream.restore(tmp_path)
    assert (again.stream._num_pending, other.stream._num_pending) == (2, 0)


def test_staleness_metrics_by_hand() -> None:
    run = OversampledRun(LOCAL, 1, LocalKVStore(), max_staleness=1)
    for step in range(1, 6):
        (rollouts,) = run.run_steps(step, step + 1)
        lags = [
            step - 1 - version for item in rollouts for version, tokens in item.version_spans for _ in range(tokens)
        ]
        metrics = run.metrics[-1]
        assert metrics["rollout/staleness_max"] == max(lags) <= 1
        assert metrics["rollout/staleness_mean"] == pytest.approx(sum(lags) / len(lags))
        assert 0 <= metrics["rollout/idle_frac"] < 1
    run.runner.close()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_resumes_partial_groups_without_oversampling(tmp_path: Path, asynchronous: bool) -> None:
    """Also in the order of asynchronous generation."""
    before = OversampledRun(LOCAL, 1, LocalKVStore(), oversample=2.0)
    result = before.run_steps(1, 3)
    state = before.save(tmp_path)
    after = OversampledRun(LOCAL, 1, LocalKVStore(), oversample=1.0)
    after.resume(tmp_path, state)
    if asynchronous:
        after.stream._config = make_config(asynchronous=True, max_staleness=1)
    last = 5 if asynchronous else 4  # the groups in flight are those of a step
    result += after.run_steps(3, last)
    assert count_prompts([result]) == Counter({name: SAMPLES for name in first_prompt_ids((last - 1) * NEEDED)})
    if not asynchronous:
        assert after.stream._num_pending == 0 and after.stream.save()(tmp_path / "none") == {}
        assert not after.stream.provides(after.loader.next_batch())
    after.runner.close()


def test_reads_the_folder_name_of_earlier_versions(tmp_path: Path) -> None:
    run = OversampledRun(LOCAL, 1, LocalKVStore(), oversample=2.0)
    run.run_steps(1, 2)
    state = run.save(tmp_path)
    (tmp_path / "partial_groups").rename(tmp_path / "carried")
    manifest_file = tmp_path / manifest.FILE_NAME
    manifest_file.write_text(manifest_file.read_text().replace("partial_groups/", "carried/"))
    resumed = OversampledRun(LOCAL, 1, LocalKVStore())
    resumed.resume(tmp_path, state)
    assert 0 < resumed.stream._num_pending <= run.stream._num_pending  # prompts that nobody had claimed start anew


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
