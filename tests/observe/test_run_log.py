"""`RunLog`: everything a run writes, on rank 0 and the other ranks."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import pytest
from thread_ranks import ThreadRank, as_ranks

from megarl.config import Config, ConfigError, from_dict
from megarl.observe.clock import Span, timeline_file
from megarl.observe.rollout_log import (
    evaluation_folder,
    part_file,
    read_records,
    read_rollouts,
    recorded_steps,
    write_part,
)
from megarl.observe.rollout_table import StepGeneration
from megarl.observe.run_log import RunLog
from megarl.observe.step_record import GenerateCall, StepRecord, make_step_record
from megarl.observe.tracker import read_metrics
from megarl.parallel.ranks import Job
from megarl.types import Prompt, Rollout, Rollouts, Turn

pytestmark = pytest.mark.alone

ROLLOUT = Rollout(Prompt("p", ()), (Turn((1,)), Turn((2,), (-0.5,), is_action=True)))


@pytest.fixture(autouse=True)
def single_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megarl.parallel.ranks.broadcast_object", lambda value, source=0: value)


def job(rank: int) -> Job:
    return Job(rank, world=2, local_rank=rank)


def config(run_dir: Path, **run: str) -> Config:
    return from_dict({"run": {"dir": str(run_dir), "num_rollout": 2, **run}, "track": {"trackers": []}})


def test_each_rank_writes_its_timeline_and_warns_once_of_a_failing_disk(tmp_path: Path) -> None:
    span = Span("step 1", "step", "main", 1.0, 2.0)
    logs = [RunLog(config(tmp_path), job(rank)) for rank in (0, 1)]
    for log in logs:
        log.write_spans([span])
    assert all(timeline_file(tmp_path, rank).is_file() for rank in (0, 1))
    shutil.rmtree(tmp_path / "timeline")
    (tmp_path / "timeline").write_text("no folder")
    with pytest.warns(UserWarning, match="could not write the timeline") as printed:
        logs[1].write_spans([span])
        logs[1].write_spans([span])
    assert len(printed) == 1
    for log in logs:
        log.close()


def test_failed_step_records_its_rollouts(tmp_path: Path) -> None:
    """A failed step can be replayed; a completed step keeps its own record."""
    log = RunLog(config(tmp_path), job(0), {"": "words", "b": "other words"})
    calls = [GenerateCall(Rollouts.gather([ROLLOUT]), is_greedy=False)]
    log.end_step(1, {}, calls[0].rollouts)
    for step in (0, 1):  # before the first step, or in an evaluation
        log.record_failed_step(step, {"": calls * 2})
    log.record_failed_step(2, {"": []})
    log.record_failed_step(3, {"": calls * 2, "b": calls})
    log.record_step(4, calls[0].rollouts, policy="b")  # the run fails between the two policies
    log.record_failed_step(4, {"": calls * 2, "b": calls * 2})
    log.close()
    assert recorded_steps(tmp_path) == [1, 3, 4] and recorded_steps(tmp_path / "policies" / "b") == [3, 4]
    assert len(read_rollouts(tmp_path, 4)) == 2 and len(read_rollouts(tmp_path / "policies" / "b", 4)) == 1
    assert read_rollouts(tmp_path, 1) == [ROLLOUT] and read_rollouts(tmp_path, 3) == [ROLLOUT] * 2


def test_evaluations_are_recorded_beside_training(tmp_path: Path) -> None:
    settings = config(tmp_path)
    settings = dataclasses.replace(
        settings,
        data=dataclasses.replace(settings.data, eval=("data/held_out.jsonl",)),
        run=dataclasses.replace(settings.run, eval_every=2),
    )
    calls = [GenerateCall(Rollouts.gather([ROLLOUT]), is_greedy) for is_greedy in (True, False)]
    log = RunLog(settings, job(0), {"": "words", "b": "other words"})
    log.record_evaluation(0, calls)
    log.record_evaluation(2, calls, "b")
    log.end_step(1, {}, calls[0].rollouts)
    log.close()
    records = read_records(evaluation_folder(tmp_path), 0)
    assert [record.is_greedy for record in records] == [True, False] and recorded_steps(tmp_path) == [1]
    assert [record.rollout.prompt.data_source for record in records] == ["held_out"] * 2, "the set's name"
    assert recorded_steps(evaluation_folder(tmp_path / "policies" / "b")) == [2]
    off = dataclasses.replace(
        settings,
        run=dataclasses.replace(settings.run, dir=str(tmp_path / "off")),
        track=dataclasses.replace(settings.track, save_rollouts=False),
    )
    log = RunLog(off, job(0))
    log.record_evaluation(0, calls)
    log.close()
    assert not evaluation_folder(tmp_path / "off").exists()


@pytest.mark.parametrize(("every", "remaining"), [(2, [0]), (3, [0, 2])])
def test_resume_removes_evaluations_that_are_repeated(tmp_path: Path, every: int, remaining: list[int]) -> None:
    settings = config(tmp_path, resume="auto")
    settings = dataclasses.replace(
        settings,
        data=dataclasses.replace(settings.data, eval=("held_out.jsonl",)),
        run=dataclasses.replace(settings.run, eval_every=every, num_rollout=9),
    )
    calls = [GenerateCall(Rollouts.gather([ROLLOUT]), is_greedy=True)]
    log = RunLog(settings, job(0))
    for step in (0, 2, 4):
        log.record_evaluation(step, calls)
    log.end_step(1, {}, calls[0].rollouts)
    log.close()
    log = RunLog(settings, job(0))
    log.begin(2)
    log.close()
    assert recorded_steps(evaluation_folder(tmp_path)) == remaining


def test_run_of_two_steps_writes_metrics_rollouts_and_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = RunLog(config(tmp_path), job(0))
    log.log_evaluation(0, {"eval/reward_greedy": 0.5})
    for step in (1, 2):
        log.begin_step(step)
        log.progress.begin_phase("generate")
        log.end_step(step, {"rollout/reward_mean": step / 2}, Rollouts.gather([ROLLOUT]))
    log.close()
    assert list(read_metrics(tmp_path)) == [0, 1, 2]
    assert recorded_steps(tmp_path) == [1, 2] and read_rollouts(tmp_path, 2) == [ROLLOUT]
    printed = capsys.readouterr().out.splitlines()
    written = [line.split("  ", 1)[1] for line in (tmp_path / "log.txt").read_text().splitlines()]
    assert printed == written and printed[2].startswith("step 1/2  reward 0.500")
    with pytest.raises(ConfigError, match=r"run\.resume=auto"):
        RunLog(config(tmp_path), job(0))
    RunLog(config(tmp_path, resume="auto"), job(0)).close()


def test_other_ranks_write_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = RunLog(config(tmp_path / "run"), job(1))
    log.begin_step(1)
    log.progress.begin_phase("generate")
    log.log_evaluation(0, {"eval/reward_greedy": 0.5})
    log.end_step(1, {"rollout/reward_mean": 0.5}, Rollouts.gather([]))
    log.log("hello")
    log.close()
    assert not (tmp_path / "run").exists() and capsys.readouterr().out == ""


def test_full_disk_does_not_stop_the_run(tmp_path: Path) -> None:
    log = RunLog(config(tmp_path), job(0))
    (tmp_path / "log.txt").unlink()
    (tmp_path / "log.txt").symlink_to("/dev/full")
    for step in (1, 2):
        file = part_file(tmp_path, step, 0)
        file.parent.mkdir(parents=True)
        file.with_name(f".{file.name}").symlink_to("/dev/full")
    with pytest.warns(UserWarning) as printed:
        for step in (1, 2):
            log.end_step(step, {"rollout/reward_mean": 0.5}, Rollouts.gather([ROLLOUT]))
        log.close()
    texts = [str(warning.message) for warning in printed]
    assert sum("log.txt" in text for text in texts) == 1 and sum("record rollouts" in text for text in texts) == 1
    assert list(read_metrics(tmp_path)) == [1, 2]


def test_each_rank_records_its_rollouts(tmp_path: Path) -> None:
    rollouts = [dataclasses.replace(ROLLOUT, seed=number) for number in range(3)]
    logs = [RunLog(config(tmp_path), job(rank)) for rank in (0, 1)]

    def take_step(rank: ThreadRank) -> None:
        numbers = ([1], [0, 2])[rank.rank]
        logs[rank.rank].end_step(4, {}, Rollouts.gather([rollouts[i] for i in numbers], numbers, rank))

    as_ranks(2, take_step)
    for log in reversed(logs):
        log.close()
    assert read_rollouts(tmp_path, 4) == rollouts


def test_step_record_has_all_generations_with_their_final_rewards() -> None:
    """Two ranks sample twice and answer greedily once. The algorithm returns the first sampling with rewards and turn
    rewards, one rollout of the second, and one that it has made itself on each rank."""

    def rollout(seed: int) -> Rollout:
        return Rollout(Prompt("p", ()), (Turn((1,)), Turn((2,), (-0.5,), is_action=True)), seed=seed)

    def record(rank: ThreadRank) -> StepRecord:
        first, second, greedy = (
            Rollouts.gather([rollout(10 * call + number) for number in numbers], numbers, rank, version=3)
            for call, numbers in enumerate((([1], [0, 2])[rank.rank], ([1], [0])[rank.rank], ([], [0])[rank.rank]))
        )
        calls = [GenerateCall(first, False), GenerateCall(second, False), GenerateCall(greedy, True)]
        scored = [
            dataclasses.replace(
                item, reward=item.seed + 0.5, turns=(item.turns[0], dataclasses.replace(item.turns[1], reward=1.0))
            )
            for item in first.local
        ]
        own = Rollouts.gather([rollout(90 + rank.rank)], None, rank)
        parts = [first.replace_local(scored), second.select(second.reward + second.group == 0), own]
        return make_step_record(calls, Rollouts.concat(parts), {"rollout/idle_frac": 0.5})

    records = as_ranks(2, record)
    rows = sorted(
        (number, item.seed, item.reward, call)
        for result in records
        for number, item, call in zip(result.numbers, result.rollouts, result.calls, strict=True)
    )
    assert rows == [
        *((0, 0, 0.5, 0), (1, 1, 1.5, 0), (2, 2, 2.5, 0), (3, 10, 0.0, 1), (4, 11, 0.0, 1), (5, 20, 0.0, 2)),
        *((6, 90, 0.0, None), (7, 91, 0.0, None)),
    ]
    for result in records:
        assert result.total == 8
        assert result.generation == StepGeneration((False, False, True), 3, {"rollout/idle_frac": 0.5})
        assert StepGeneration.from_json(result.generation.to_json()) == result.generation


def test_resume_discards_later_steps(tmp_path: Path) -> None:
    log = RunLog(config(tmp_path), job(0))
    for step in (1, 2, 3):
        log.end_step(step, {}, Rollouts.gather([ROLLOUT]))
    log.close()
    for step in (2, 3):  # as a run on two ranks would
        write_part(part_file(tmp_path, step, 1), step, 1, [0], [ROLLOUT])
    log = RunLog(config(tmp_path, resume="auto"), job(0))
    assert recorded_steps(tmp_path) == [1, 2, 3]
    log.begin(1)
    assert recorded_steps(tmp_path) == [1]
    log.end_step(2, {}, Rollouts.gather([ROLLOUT]))
    log.close()
    assert read_rollouts(tmp_path, 2) == [ROLLOUT]


def test_log_end_records_the_error(tmp_path: Path) -> None:
    def raised(error: BaseException) -> BaseException:
        try:
            raise error
        except BaseException as caught:  # noqa: B036  as it was raised
            return caught

    logs = [RunLog(config(tmp_path), job(rank)) for rank in (0, 1)]
    crash, config_error = raised(ZeroDivisionError("no \udcff")), raised(ConfigError("run.dir is wrong"))
    logs[1].log_end(crash, is_graceful=False)
    logs[0].log_end(config_error, is_graceful=False)
    logs[0].log_end(raised(SystemExit("ended by SIGTERM")), is_graceful=True)
    for log in logs:
        log.close()
    assert [path.name for path in (tmp_path / "logs").iterdir()] == ["rank_1.log"]
    text = (tmp_path / "logs/rank_1.log").read_text()
    assert "Traceback" in text and "in raised" in text
    assert crash.__notes__ == [f"the full traceback is in {tmp_path}/logs/rank_1.log"]
    assert not hasattr(config_error, "__notes__")
    log_text = (tmp_path / "log.txt").read_text()
    assert (
        "ConfigError: run.dir is wrong\n" in log_text and "  ended by SIGTERM\n" in log_text and "Zero" not in log_text
    )


def test_guards_reach_metrics_and_log(tmp_path: Path) -> None:
    """Rank 1 has the same metrics and logs nothing; both stop together."""

    def guarded(folder: Path) -> Config:
        tree = {"run": {"dir": str(folder)}, "track": {"trackers": []}}
        return from_dict({**tree, "guards": {"ppo_kl": 0.05, "alarms": True}})

    logs = [RunLog(guarded(tmp_path), job(rank)) for rank in (0, 1)]
    for step in (1, 2):
        result = [log.end_step(step, {"actor/grad_norm": 0.1, "guards/ppo_kl": 0.5}) for log in logs]
        assert result[0] == result[1]
    for log in logs:
        with pytest.raises(ConfigError, match="3 consecutive steps"):
            log.end_step(3, {"actor/grad_norm": 1.0, "guards/ppo_kl": 0.5})
    assert logs[0].guards.state_dict() == logs[1].guards.state_dict()
    for log in logs:
        log.close()
    metrics = read_metrics(tmp_path)
    assert [metrics[step]["guards/rollbacks"] for step in (1, 2, 3)] == [1, 2, 3]  # including the step that stopped
    assert [metrics[step]["guards/out_of_band"] for step in (1, 2, 3)] == [1, 1, 0]
    lines = (tmp_path / "log.txt").read_text().splitlines()
    assert sum("ALARM: step" in line and "actor/ppo_kl" in line for line in lines) == 3
    assert sum("ALARM: step 1: actor/grad_norm is 0.1, below" in line for line in lines) == 1
    assert sum("step 3: actor/grad_norm is back in its band" in line for line in lines) == 1
    assert sum("out of band: gradient norm" in line for line in lines) == 2
