"""When a run that has broken off starts again, and when it does not."""

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


def checkpoint(folder: Path, step: int) -> None:
    (folder / "checkpoints" / f"step_{step:06d}").mkdir(parents=True)


def took(folder: Path, step: int) -> None:
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": step}) + "\n")


@pytest.mark.parametrize(
    "end",
    [
        RunOutcome(0, "", "done"),
        RunOutcome(85, "saved step 3", "stopped"),
        RunOutcome(2, "error: key", "mistake"),
        RunOutcome(130, "ended by Ctrl-C (SIGINT)", "asked"),
    ],
)
def test_what_was_meant_does_not_start_again(end: RunOutcome, tmp_path: Path) -> None:
    after = RestartTracker().decide(end, RestartPolicy(str(tmp_path), 1, 3))
    assert (after.should_restart, after.status, after.text) == (False, end.status, end.text)


@pytest.mark.parametrize("rules", [None, RestartPolicy("nowhere", 0, 3), RestartPolicy("nowhere", 1, 0)])
def test_nor_what_has_nothing_to_go_on_from(rules: RestartPolicy | None) -> None:
    assert RestartTracker().decide(KILLED, rules)[:3] == (False, 137, KILLED.text)


def test_it_starts_again_so_many_times_in_a_row_ever_later(tmp_path: Path) -> None:
    restarts, rules = RestartTracker(), RestartPolicy(str(tmp_path), 1, 3)
    checkpoint(tmp_path, 20)
    said = [restarts.decide(KILLED, rules) for _ in range(4)]
    assert [item.should_restart for item in said] == [True, True, True, False]
    assert [item.wait_s for item in said] == [2, 8, 32, 0]
    assert said[0].text == (
        "error: rank 1 was killed by SIGKILL; restarting in 2 s from checkpoint step_000020 (restart 1 of this "
        "run, 1 of 3 without a new checkpoint)"
    )
    assert said[3].status == 137 and "has restarted 3 times without a new checkpoint" in said[3].text


def test_a_new_checkpoint_begins_the_count_anew(tmp_path: Path) -> None:
    restarts, rules = RestartTracker(), RestartPolicy(str(tmp_path), 1, 2)
    said = []
    for step in range(1, 7):
        said.append(restarts.decide(KILLED, rules))
        checkpoint(tmp_path, step)
    assert all(item.should_restart and item.wait_s == 2 for item in said)
    assert "from the beginning, since there is no checkpoint yet (restart 1 of this run, 1 of 2" in said[0].text
    assert "from checkpoint step_000005 (restart 6 of this run, 1 of 2" in said[5].text
    assert [restarts.decide(KILLED, rules).should_restart for _ in range(3)] == [True, True, False]


def test_the_same_fault_at_the_same_step_ends_it(tmp_path: Path) -> None:
    """On whichever rank; at another step it is not the same, nor after something else."""
    restarts, rules = RestartTracker(), RestartPolicy(str(tmp_path), 1, 3)
    took(tmp_path, 6)
    other = FAULT._replace(text=FAULT.text.replace("rank 1", "rank 0").replace("1.log", "0.log"))
    assert restarts.decide(FAULT, rules).should_restart
    took(tmp_path, 5)
    took(tmp_path, 7)
    assert restarts.decide(FAULT, rules).should_restart
    last = restarts.decide(other, rules)
    assert (last.should_restart, last.status) == (False, 86)
    assert last.text.endswith("; that is the same error at step 8 as last time, so the run does not restart")

    restarts = RestartTracker()
    assert all(restarts.decide(end, rules).should_restart for end in (FAULT, KILLED, FAULT))


def test_kills_from_outside_are_not_the_same_fault(tmp_path: Path) -> None:
    restarts, rules = RestartTracker(), RestartPolicy(str(tmp_path), 1, 3)
    assert restarts.decide(KILLED, rules).should_restart and restarts.decide(KILLED, rules).should_restart


def test_where_a_run_stands_is_read_from_its_folder(tmp_path: Path) -> None:
    assert (find_newest_step(tmp_path), read_last_step(tmp_path)) == (0, 0)
    for step in (20, 1_000_000):
        checkpoint(tmp_path, step)
    (tmp_path / "checkpoints" / "step_2000000.tmp").mkdir()
    took(tmp_path, 3)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "torn')
    assert (find_newest_step(tmp_path), read_last_step(tmp_path)) == (1_000_000, 3)


def test_a_restart_is_noted_in_the_runs_log(tmp_path: Path) -> None:
    append_to_log(RestartPolicy(str(tmp_path), 1, 3), "error: it was killed; starting again")
    append_to_log(RestartPolicy(str(tmp_path / "gone"), 1, 3), "nothing comes of it")
    append_to_log(None, "nor of this")
    assert (tmp_path / "log.txt").read_text().endswith("  error: it was killed; starting again\n")
