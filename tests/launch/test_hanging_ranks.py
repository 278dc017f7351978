"""Real ranks that hang, as they are stopped or loop in Python or in C: the job ends in time, with all stacks; or that
are slow."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from test_launcher import ended, run_of, wait_for  # noqa: E402

RANK = """
    from datetime import timedelta
    import torch.distributed as dist
    from megarl.observe.clock import Clock
    from megarl.observe.hang_watchdog import HangWatchdog
    from megarl.parallel import ranks
    def loop_in_python():
        while True:
            pass
    def loop_in_c():
        sum(range(10**15))
    def sleep():
        time.sleep(600)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": pathlib.Path("port").read_text()}
    clock = Clock()
    # As `ranks.join`, without Megatron.
    dist.init_process_group("gloo", rank=rank, world_size=2, timeout=timedelta(seconds=8))
    ranks._host_group, ranks._timeout_s = dist.group.WORLD, 8.0
    job = ranks.Job(rank, 2, rank)
    lookout = HangWatchdog(
        job, pathlib.Path("."), clock, ["actor"], lambda text: print(text, file=sys.stderr),
        lambda rank, text: ending.notify_launcher("late", text, rank),
    )
    lookout.start()
    try:
        BODY
    finally:
        lookout.drain()
        lookout.close()
"""
HANGS = """
        with clock.phase("actor_update", "actor"):
            pathlib.Path(f"there_{rank}").write_text(str(os.getpid()))
            HANG() if rank else ranks.barrier()
"""
SLOW = """
        for step in range(1, 5):
            with clock.phase("actor_update", "actor"):
                until = time.monotonic() + (3.0 if rank else 0.3)
                while time.monotonic() < until:
                    pass
                ranks.barrier()
            figures, line = lookout.check_step(step)
            assert figures["perf/slowest_rank"] == 1 and figures["perf/slowest_ratio"] > 2
            if line and rank == 0:
                print(line, file=sys.stderr)
"""


def ranks_that(body: str) -> str:
    return RANK.replace("BODY", body.strip())


def free_port(folder: Path) -> None:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        (folder / "port").write_text(str(probe.getsockname()[1]))


@pytest.mark.parametrize(
    ("hang", "where"),
    [
        ("loop_in_python", "which is at"),
        ("loop_in_c", "which computes without releasing the GIL"),
        ("sleep", "which is at"),
    ],
)
def test_the_rank_that_others_wait_for_is_named_and_all_stacks_are_written(
    tmp_path: Path, hang: str, where: str
) -> None:
    free_port(tmp_path)
    code, lines = ended(run_of(tmp_path, ranks_that(HANGS.replace("HANG", hang)), grace=2.0))
    result = [line for line in lines if "the others have waited" in line]
    assert code == 1 and len(result) == 2, lines  # said when it was seen, and at the end
    assert f"for rank 1 on node {os.uname().nodename} {where}" in result[-1] and result[-1].startswith("error: ")
    assert result[-1].endswith("The stacks of all ranks are in logs/rank_N.log")
    assert "in barrier" in (tmp_path / "logs/rank_0.log").read_text()
    assert f"in {hang}" in (tmp_path / "logs/rank_1.log").read_text()


def test_a_stopped_rank_is_named_though_it_writes_nothing(tmp_path: Path) -> None:
    free_port(tmp_path)
    process = run_of(tmp_path, ranks_that(HANGS.replace("HANG", "sleep")), grace=2.0)
    wait_for((tmp_path / "there_1").exists, process)
    os.kill(int((tmp_path / "there_1").read_text()), signal.SIGSTOP)
    code, lines = ended(process)
    assert code == 1 and "which is stopped (SIGSTOP)" in lines[-1], lines
    assert lines[-1].endswith("but for rank 1, which could not write its stacks")
    assert "in barrier" in (tmp_path / "logs/rank_0.log").read_text()


def test_a_rank_that_is_ten_times_slower_is_named_and_the_run_goes_on(tmp_path: Path) -> None:
    free_port(tmp_path)
    code, lines = ended(run_of(tmp_path, ranks_that(SLOW)))
    (line,) = [line for line in lines if " is slow" in line]
    assert code == 0
    assert f"rank 1 on node {os.uname().nodename} is slow and delays the others: " in line, lines
    assert " s of work in actor_update, " in line
