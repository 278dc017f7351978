"""`local_ranks`: results of ranks, and why there are none."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "tools"))

import local_ranks  # noqa: E402

pytestmark = pytest.mark.alone

FAILS = """
import os, signal, sys, time
if os.environ["RANK"] == "1":
    {}
time.sleep(60)
"""


def test_returns_what_the_first_rank_prints() -> None:
    program = (
        "import os; print('RESULT', '[%s, %s, %s]' % (os.environ['RANK'], os.environ['X'], os.environ['WORLD_SIZE']))"
    )
    pids: list[int] = []
    settings = lambda rank: ((), {"X": str(7 + rank)})  # noqa: E731
    assert local_ranks.run(["-c", program], 2, watch=pids.extend, rank_settings=settings) == [0, 7, 2]
    assert len(pids) == 2


def test_returns_what_a_function_returns() -> None:
    assert local_ranks.run_function("megarl.view.run_timeline:seconds", 1, intervals=[[1.0, 3.5]]) == 2.5


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("sys.exit('no such layout')", r"rank 1 exited with 1\nno such layout"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "rank 1 was ended by signal 9, perhaps for lack of memory"),
    ],
)
def test_ends_with_the_rank_that_failed(line: str, message: str) -> None:
    with pytest.raises(SystemExit, match=message):
        local_ranks.run(["-c", FAILS.format(line)], 2)


def test_ends_without_a_result() -> None:
    with pytest.raises(SystemExit, match="rank 0 printed no result"):
        local_ranks.run(["-c", "pass"], 1)
    with pytest.raises(SystemExit, match="not done after 0.2 s"):
        local_ranks.run(["-c", "import time; time.sleep(60)"], 1, timeout=0.2)


def test_names_the_killed_rank_rather_than_those_that_miss_it() -> None:
    text = local_ranks.describe_failure([1, -9], ["peer has gone", ""], 1.0)
    assert text.startswith("rank 1 was ended by signal 9")
