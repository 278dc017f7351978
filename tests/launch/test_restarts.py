"""Decide whether a failed run restarts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megarl.launch.exit_status import RunOutcome
from megarl.launch.restarts import RestartPolicy, RestartTracker, append_to_log, find_newest_step, read_last_step

KILLED = RunOutcome(137, "error: rank 1 was killed by SIGKILL", "killed")
FAULT = RunOutcome(
    1, "Traceback:\n  in f\nerror: rank 1 failed: KeyError: 'x'; the full traceback is in a/1.log", "fault"
)


def write_checkpoint(folder: Path, step: int) -> None:
    (folder / "checkpoints" / f"step_{step:06d}").mkdir(parents=True)


def write_step(folder: Path, step: int) -> None:
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": step}) + "\n")


@pytest.mark.parametrize(
    "outcome",
    [
        RunOutcome(0, "", "done"),
        RunOutcome(85, "saved step 3", "stopped"),
        RunOutcome(2, "error: key", "mistake"),
        RunOutcome(130, "ended by Ctrl-C (SIGINT)", "asked"),
    ],
)
def test_intended_ends_do_not_restart(outcome: RunOutcome, tmp_path: Path) -> None:
    after = RestartTracker().decide(outcome, RestartPolicy(str(tmp_path), 1, 3))
    assert (after.should_restart, after.status, after.text) == (False, outcome.status, outcome.text)


@pytest.mark.parametrize("rules", [None, RestartPolicy("nowhere", 0, 3), RestartPolicy("nowhere", 1, 0)])
def test_runs_without_checkpoints_or_restarts_do_not_restart(rules: RestartPolicy | None) -> None:
    assert RestartTracker().decide(KILLED, rules)[:3] == (False, 137, KILLED.text)


def test_restarts_a_limited_number_of_times_with_backoff(tmp_path: Path) -> None:
    restarts, rules = RestartTracker(), RestartPolicy(str(tmp_path), 1, 3)
    write_checkpoint(tmp_path, 20)
    decisions = [restarts.decide(KILLED, rules) for _ in range(4)]
    assert [item.should_restart for item in decisions] == [True, True, True, False]
    assert [item.wait_s for item in decisions] == [2, 8, 32, 0]
    assert decisions[0].text == (
        "error: rank 1 was killed by SIGKILL; restarting in 2 s from checkpoint step_000020 (restart 1 of this "
        "run, 1 of 3 without a new checkpoint)"
    )
    assert decisions[3].status == 137 and "has restarted 3 times without a new checkpoint" in decisions[3].text


def test_a_checkpoint_in_memory_counts(tmp_path: Path) -> None:
    """If it is newer than those on disk; a damaged record does not."""
    restarts, rules = RestartTracker(), RestartPolicy(str(tmp_path), 50, 1)
    write_checkpoint(tmp_path, 20)
    record = tmp_path / "in_memory.json"
    for step in (24, 26):
        record.write_text(json.dumps({"id": "0123456789abcdef", "step": step}))
        decision = restarts.decide(KILLED, rules)
        assert decision.should_restart and f"from checkpoint step_0000{step} in memory (restart" in decision.text
    assert not restarts.decide(KILLED, rules).should_restart
    for text in (json.dumps({"id": "", "step": 10}), "[]", "{"):
        record.write_text(text)
        assert "from checkpoint step_000020 (restart 1" in RestartTracker().decide(KILLED, rules).text


def test_a_new_checkpoint_resets_the_count(tmp_path: Path) -> None:
    restarts, rules = RestartTracker(), RestartPolicy(str(tmp_path), 1, 2)
    decisions = []
    for step in range(1, 7):
        decisions.append(restarts.decide(KILLED, rules))
        write_checkpoint(tmp_path, step)
    assert all(item.should_restart and item.wait_s == 2 for item in decisions)
    assert "from the beginning, since there is no checkpoint yet (restart 1 of this run, 1 of 2" in decisions[0].text
    assert "from checkpoint step_000005 (restart 6 of this run, 1 of 2" in decisions[5].text
    assert [restarts.decide(KILLED, rules).should_restart for _ in range(3)] == [True, True, False]


def test_a_repeated_fault_at_the_same_step_ends_the_run(tmp_path: Path) -> None:
    """The rank does not matter; a fault at another step or after another failure counts as new."""
    restarts, rules = RestartTracker(), RestartPolicy(str(tmp_path), 1, 3)
    write_step(tmp_path, 6)
    other_fault = FAULT._replace(text=FAULT.text.replace("rank 1", "rank 0").replace("1.log", "0.log"))
    assert restarts.decide(FAULT, rules).should_restart
    write_step(tmp_path, 5)
    write_step(tmp_path, 7)
    assert restarts.decide(FAULT, rules).should_restart
    last = restarts.decide(other_fault, rules)
    assert (last.should_restart, last.status) == (False, 86)
    assert last.text.endswith("; that is the same error at step 8 as last time, so the run does not restart")

    restarts = RestartTracker()
    assert all(restarts.decide(outcome, rules).should_restart for outcome in (FAULT, KILLED, FAULT))


def test_repeated_kills_restart(tmp_path: Path) -> None:
    restarts, rules = RestartTracker(), RestartPolicy(str(tmp_path), 1, 3)
    assert restarts.decide(KILLED, rules).should_restart and restarts.decide(KILLED, rules).should_restart


def test_reads_progress_from_the_run_folder(tmp_path: Path) -> None:
    assert (find_newest_step(tmp_path), read_last_step(tmp_path)) == (0, 0)
    for step in (20, 1_000_000):
        write_checkpoint(tmp_path, step)
    (tmp_path / "checkpoints" / "step_2000000.tmp").mkdir()
    write_step(tmp_path, 3)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "torn')
    assert (find_newest_step(tmp_path), read_last_step(tmp_path)) == (1_000_000, 3)


def test_writes_restarts_to_the_log(tmp_path: Path) -> None:
    append_to_log(RestartPolicy(str(tmp_path), 1, 3), "error: it was killed; starting again")
    append_to_log(RestartPolicy(str(tmp_path / "missing"), 1, 3), "not written")
    append_to_log(None, "not written either")
    assert (tmp_path / "log.txt").read_text().endswith("  error: it was killed; starting again\n")
