"""Hanging and slow ranks in real processes: the watchdog names the rank, writes all stacks and ends the run."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from megarl.utils.addresses import free_port

sys.path.insert(0, str(Path(__file__).parent))

from test_launcher import start_launcher, wait_for, wait_for_exit  # noqa: E402

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
    # Like `ranks.join`, without Megatron.
    dist.init_process_group("gloo", rank=rank, world_size=2, timeout=timedelta(seconds=8))
    ranks._host_group, ranks._timeout_s = dist.group.WORLD, 8.0
    job = ranks.Job(rank, 2, rank)
    watchdog = HangWatchdog(
        job, pathlib.Path("."), clock, ["actor"], lambda text: print(text, file=sys.stderr),
        lambda rank, text: exit_status.notify_launcher("late", text, rank),
    )
    watchdog.start()
    try:
        BODY
    finally:
        watchdog.drain()
        watchdog.close()
        dist.destroy_process_group()  # as `ranks.shutdown` does
"""
HANGS = """
        with clock.phase("actor_update", "actor"):
            pathlib.Path(f"started_{rank}").write_text(str(os.getpid()))
            HANG() if rank else ranks.barrier()
"""
SLOW = """
        for step in range(1, 5):
            with clock.phase("actor_update", "actor"):
                until = time.monotonic() + (3.0 if rank else 0.3)
                while time.monotonic() < until:
                    pass
                ranks.barrier()
            figures, line = watchdog.check_step(step)
            assert figures["perf/slowest_rank"] == 1 and figures["perf/slowest_ratio"] > 2
            if line and rank == 0:
                print(line, file=sys.stderr)
"""


def make_rank_body(body: str) -> str:
    return RANK.replace("BODY", body.strip())


def write_free_port(folder: Path) -> None:
    (folder / "port").write_text(str(free_port()))


@pytest.mark.parametrize(
    ("hang", "stack_text"),
    [
        pytest.param("loop_in_python", "which is at", marks=pytest.mark.nightly),
        pytest.param("loop_in_c", "which computes without releasing the GIL", marks=pytest.mark.nightly),
        pytest.param("sleep", "which is at", marks=pytest.mark.nightly),
    ],
)
def test_names_the_hanging_rank_and_writes_all_stacks(tmp_path: Path, hang: str, stack_text: str) -> None:
    write_free_port(tmp_path)
    code, lines = wait_for_exit(start_launcher(tmp_path, make_rank_body(HANGS.replace("HANG", hang)), grace=2.0))
    result = [line for line in lines if "the others have waited" in line]
    assert code == 1 and len(result) == 2, lines  # printed when detected, and at the end
    assert f"for rank 1 on node {os.uname().nodename} {stack_text}" in result[-1] and result[-1].startswith("error: ")
    assert result[-1].endswith("The stacks of all ranks are in logs/rank_N.log")
    assert "in barrier" in (tmp_path / "logs/rank_0.log").read_text()
    assert f"in {hang}" in (tmp_path / "logs/rank_1.log").read_text()


@pytest.mark.nightly
def test_names_a_stopped_rank_without_its_stack(tmp_path: Path) -> None:
    write_free_port(tmp_path)
    process = start_launcher(tmp_path, make_rank_body(HANGS.replace("HANG", "sleep")), grace=2.0)
    wait_for((tmp_path / "started_1").exists, process)
    os.kill(int((tmp_path / "started_1").read_text()), signal.SIGSTOP)
    code, lines = wait_for_exit(process)
    assert code == 1 and "which is stopped (SIGSTOP)" in lines[-1], lines
    assert lines[-1].endswith("but for rank 1, which could not write its stacks")
    assert "in barrier" in (tmp_path / "logs/rank_0.log").read_text()


@pytest.mark.nightly
def test_names_a_slow_rank_and_continues(tmp_path: Path) -> None:
    write_free_port(tmp_path)
    code, lines = wait_for_exit(start_launcher(tmp_path, make_rank_body(SLOW)))
    assert code == 0, lines
    (line,) = [line for line in lines if " is slow" in line]
    assert f"rank 1 on node {os.uname().nodename} is slow and delays the others: " in line, lines
    assert " s of work in actor_update, " in line
