"""When a run that has broken off starts again, and when it does not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megarl.launch.exit_status import Verdict
from megarl.launch.restarts import Restarts, Rules, newest_step, note, steps_taken

KILLED = Verdict(137, "error: rank 1 was killed by SIGKILL", "killed")
FAULT = Verdict(
    1, "Traceback:\n  in f\nerror: rank 1 failed: KeyError: 'x'; the whole traceback is in a/1.log", "fault"
)


def checkpoint(folder: Path, step: int) -> None:
    (folder / "checkpoints" / f"step_{step:06d}").mkdir(parents=True)


def took(folder: Path, step: int) -> None:
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": step}) + "\n")


@pytest.mark.parametrize(
    "end",
    [
        Verdict(0, "", "done"),
        Verdict(85, "saved step 3", "stopped"),
        Verdict(2, "error: key", "mistake"),
        Verdict(130, "ended by Ctrl-C (SIGINT)", "asked"),
    ],
)
def test_what_was_meant_does_not_start_again(end: Verdict, tmp_path: Path) -> None:
    after = Restarts().after(end, Rules(str(tmp_path), 1, 3))
    assert (after.again, after.status, after.text) == (False, end.status, end.text)


@pytest.mark.parametrize("rules", [None, Rules("nowhere", 0, 3), Rules("nowhere", 1, 0)])
def test_nor_what_has_nothing_to_go_on_from(rules: Rules | None) -> None:
    assert Restarts().after(KILLED, rules)[:3] == (False, 137, KILLED.text)


def test_it_starts_again_so_many_times_in_a_row_ever_later(tmp_path: Path) -> None:
    restarts, rules = Restarts(), Rules(str(tmp_path), 1, 3)
    checkpoint(tmp_path, 20)
    said = [restarts.after(KILLED, rules) for _ in range(4)]
    assert [one.again for one in said] == [True, True, True, False]
    assert [one.wait_s for one in said] == [2, 8, 32, 0]
    assert said[0].text == (
        "error: rank 1 was killed by SIGKILL; starting again in 2 s from checkpoint step_000020 (restart 1 of this "
        "run, 1 of 3 without a new checkpoint)"
    )
    assert said[3].status == 137 and "has started again 3 times without a new checkpoint" in said[3].text


def test_a_new_checkpoint_begins_the_count_anew(tmp_path: Path) -> None:
    restarts, rules = Restarts(), Rules(str(tmp_path), 1, 2)
    said = []
    for step in range(1, 7):
        said.append(restarts.after(KILLED, rules))
        checkpoint(tmp_path, step)
    assert all(one.again and one.wait_s == 2 for one in said)
    assert "from the start, as there is no checkpoint yet (restart 1 of this run, 1 of 2" in said[0].text
    assert "from checkpoint step_000005 (restart 6 of this run, 1 of 2" in said[5].text
    assert [restarts.after(KILLED, rules).again for _ in range(3)] == [True, True, False]


def test_the_same_fault_at_the_same_step_ends_it(tmp_path: Path) -> None:
    """On whichever rank; at another step it is not the same, nor after something else."""
    restarts, rules = Restarts(), Rules(str(tmp_path), 1, 3)
    took(tmp_path, 6)
    other = FAULT._replace(text=FAULT.text.replace("rank 1", "rank 0").replace("1.log", "0.log"))
    assert restarts.after(FAULT, rules).again
    took(tmp_path, 5)
    took(tmp_path, 7)
    assert restarts.after(FAULT, rules).again
    last = restarts.after(other, rules)
    assert (last.again, last.status) == (False, 86)
    assert last.text.endswith("; that is the same at step 8 as the time before, so it does not start again")

    restarts = Restarts()
    assert all(restarts.after(end, rules).again for end in (FAULT, KILLED, FAULT))


def test_kills_from_outside_are_not_the_same_fault(tmp_path: Path) -> None:
    restarts, rules = Restarts(), Rules(str(tmp_path), 1, 3)
    assert restarts.after(KILLED, rules).again and restarts.after(KILLED, rules).again


def test_where_a_run_stands_is_read_from_its_folder(tmp_path: Path) -> None:
    assert (newest_step(tmp_path), steps_taken(tmp_path)) == (0, 0)
    for step in (20, 1_000_000):
        checkpoint(tmp_path, step)
    (tmp_path / "checkpoints" / "step_2000000.tmp").mkdir()
    took(tmp_path, 3)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "torn')
    assert (newest_step(tmp_path), steps_taken(tmp_path)) == (1_000_000, 3)


def test_a_restart_is_noted_in_the_runs_log(tmp_path: Path) -> None:
    note(Rules(str(tmp_path), 1, 3), "error: it was killed; starting again")
    note(Rules(str(tmp_path / "gone"), 1, 3), "nothing comes of it")
    note(None, "nor of this")
    assert (tmp_path / "log.txt").read_text().endswith("  error: it was killed; starting again\n")
