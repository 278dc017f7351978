"""Launchers of several nodes: combine their reports, and run two of them on this machine, with a spare one."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from megarl.launch.launcher import RankMessage
from megarl.launch.nodes import MultiNode, NodeReport, combine_reports, decide_restart
from megarl.launch.restarts import RestartPolicy, RestartTracker
from megarl.parallel.job_secret import ForgedError

pytestmark = pytest.mark.nightly

ROOT = Path(__file__).resolve().parents[2]
LOST = RankMessage(0, "lost", "error: rank 0 lost another rank")
RANK = """
import os, pathlib, signal, time
from datetime import timedelta
import torch.distributed as dist
from megarl.launch import exit_status
from megarl.config import ConfigError
rank = int(os.environ["RANK"])
def body():
    exit_status.register_run(run_dir="run", save_every=1, max_restarts=int(os.environ["TIMES"]))
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    dist.barrier()
    attempt = exit_status.get_restart_count()
    pathlib.Path(f"started_{attempt}_{rank}").write_text(str(os.getpid()))
    BODY
with exit_status.exit_on_error():
    body()
"""


def test_finds_the_cause_on_another_node() -> None:
    lost_node = NodeReport("n1", codes={0: 1}, words=(LOST,))
    killed = NodeReport("n2", codes={1: -9})
    outcome, node = combine_reports([lost_node, killed])
    assert (outcome.kind, node) == ("killed", "n2")
    assert outcome.text.startswith("error: rank 1 (node n2) was killed by SIGKILL")
    mistake = NodeReport("n2", codes={1: 2}, words=(RankMessage(1, "mistake", "error: key"),))
    assert combine_reports([lost_node, mistake])[0][:3] == (2, "error: key", "mistake")
    assert combine_reports([lost_node, NodeReport("n2", has_succeeded=True)])[0].kind == "lost"
    assert (
        combine_reports([NodeReport("n1", has_succeeded=True), NodeReport("n2", has_succeeded=True)])[0].kind == "done"
    )
    assert combine_reports([NodeReport("n1"), killed])[1] == "n2"  # the launcher of n1 killed all its ranks


def test_names_a_node_that_does_not_respond() -> None:
    outcome, _ = combine_reports([NodeReport("n1", codes={0: 1}, words=(LOST,)), None])
    assert outcome.text == "error: the launcher of node number 1 does not respond"
    assert combine_reports([NodeReport("n1", codes={0: -9}), None])[0].kind == "killed"
    problem = NodeReport("n1", problem="the nodes did not join: RuntimeError: x")
    assert combine_reports([problem, None])[0].text.endswith("number 1 does not respond")
    assert combine_reports([problem, problem])[0].text == f"error: torchrun: {problem.problem}"


def test_replaces_as_many_nodes_as_there_are_spares(folder: Path) -> None:
    """But not the first, whose launcher decides."""
    policy = RestartPolicy(str(folder / "run"), save_every=1, max_restarts=1)
    killed, lost = NodeReport("n1", codes={1: -9}), NodeReport("n0", codes={0: 1}, words=(LOST,))
    assert decide_restart(RestartTracker(), [lost, None, None], policy, spares=2).should_restart
    assert not decide_restart(RestartTracker(), [lost, None, None], policy, spares=1).should_restart
    tracker = RestartTracker()
    decisions = [decide_restart(tracker, [lost, killed], policy, spares=1) for _ in range(2)]
    assert [(item.should_restart, item.exclude_node) for item in decisions] == [(True, ""), (True, "n1")]
    tracker = RestartTracker()
    decisions = [decide_restart(tracker, [killed, lost], policy, spares=1) for _ in range(2)]
    assert [(item.should_restart, item.exclude_node) for item in decisions] == [(True, ""), (False, "n1")]


def test_reports_round_trip_as_json() -> None:
    report = NodeReport("n1", False, {3: -9}, (LOST,), 15, "")
    assert NodeReport.from_json(report.to_json()) == report


def test_stopped_ranks_have_not_failed() -> None:
    """Ranks of other nodes may still be saving."""
    assert not NodeReport("n1", codes={0: 85, 1: 85}).has_failed and not NodeReport("n1", has_succeeded=True).has_failed
    assert NodeReport("n1", codes={0: 85, 1: 1}).has_failed and NodeReport("n1", problem="they did not join").has_failed


def test_refuses_forged_values_in_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rendezvous store does not authenticate its clients."""
    monkeypatch.setenv("MEGARL_SECRET", "a" * 32)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    first = MultiNode(0, 2, "127.0.0.1", port)
    second = MultiNode(1, 2, "127.0.0.1", port)
    assert first.agree_port() == second.agree_port()
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    store.set("1/port", "1")
    second.attempt = 1
    with pytest.raises(ForgedError):
        second.agree_port()
    store.set("2/port", store.get("0/port"))  # a genuine value of another key
    second.attempt = 2
    with pytest.raises(ForgedError):
        second.agree_port()
    store.set("0/next", '[true, 0, "", 0.0, ""]')
    second.attempt = 0
    after = second.decide_next(NodeReport("n1"), None)
    assert not after.should_restart and "no longer responds: refused" in after.text
    monkeypatch.setenv("MEGARL_SECRET", "b" * 32)
    with pytest.raises(ForgedError, match="its nodes have different secrets, see MEGARL_SECRET in SECURITY.md"):
        MultiNode(1, 2, "127.0.0.1", port).agree_port()


class TwoLaunchers:
    """Two launchers with one rank each in a folder, and those of spare nodes."""

    def __init__(self, folder: Path, body: str, times: int = 3, spares: int = 0) -> None:
        self.folder = folder
        (folder / "rank.py").write_text(RANK.replace("BODY", body.replace("\n", "\n    ")))
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        environment = {name: text for name, text in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
        environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "MEGARL_LEAVE_OUT": str(folder / "leave_out")}
        environment |= {"TIMES": str(times), "MEGARL_SPARES": str(spares), "MEGARL_STATUS": str(folder / "status")}
        command = [sys.executable, "-m", "megarl.torchrun", "--nnodes", "2", "--nproc-per-node", "1"]
        command += ["--master-addr", "127.0.0.1", "--master-port", port]
        self.launchers = [
            subprocess.Popen(
                [*command, "--node-rank", str(node), "rank.py"],
                cwd=folder,
                env=environment | {"SLURMD_NODENAME": f"n{node}"},
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
            for node in range(2 + spares)
        ]

    def wait_for(self, name: str) -> int:
        """Wait for the pid that a rank writes to a file."""
        file, deadline = self.folder / name, time.monotonic() + 120
        while not (file.exists() and file.read_text()):
            if time.monotonic() > deadline:
                for item in self.launchers:
                    item.kill()  # its ranks end with it
                pytest.fail(f"no {name}")
            assert all(item.poll() is None for item in self.launchers), self.wait_for_exit()
            time.sleep(0.02)
        return int(file.read_text())

    def wait_for_exit(self) -> list[tuple[int, list[str]]]:
        """Return exit statuses and error lines, and assert that their process groups are empty."""
        result = []
        for item in self.launchers:
            _, err = item.communicate(timeout=200)
            with pytest.raises(ProcessLookupError):
                os.killpg(item.pid, 0)
            result.append((item.returncode, [line for line in err.splitlines() if line.startswith(("error", "ended"))]))
        return result


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "run" / "checkpoints" / "step_000004").mkdir(parents=True)
    return tmp_path


def test_restarts_all_nodes_together(folder: Path) -> None:
    """Restart after a rank was killed while another waited for it, and after one failed while another slept."""
    body = "if attempt == 0: dist.barrier() if rank == 0 else time.sleep(600)\n"
    body += "if attempt == 1: rank and {}['key']; time.sleep(600)"
    nodes = TwoLaunchers(folder, body)
    nodes.wait_for("started_0_0")
    os.kill(nodes.wait_for("started_0_1"), signal.SIGKILL)
    (code, lines), report = nodes.wait_for_exit()
    assert (code, lines) == report and code == 0
    first, second = lines
    assert first.startswith("error: rank 1 (node n1) was killed by SIGKILL")
    assert "restarting in 2 s from checkpoint step_000004 (restart 1 of this run, 1 of 3" in first
    assert second.startswith("error: rank 1 on node n1 failed: KeyError: 'key' (")
    assert "restarting in 8 s" in second
    log_lines = (folder / "run" / "log.txt").read_text().splitlines()
    assert [line.partition("  ")[2] for line in log_lines] == lines
    assert not (folder / "leave_out").exists()


def test_a_config_error_on_one_node_ends_all(folder: Path) -> None:
    nodes = TwoLaunchers(folder, "if rank == 1: raise ConfigError('run.dir is wrong')\ntime.sleep(600)")
    assert nodes.wait_for_exit() == [(2, ["error: run.dir is wrong"])] * 2


def test_ctrl_c_on_all_nodes_ends_the_run(folder: Path) -> None:
    nodes = TwoLaunchers(folder, "time.sleep(600)")
    nodes.wait_for("started_0_0"), nodes.wait_for("started_0_1")
    for item in nodes.launchers:
        os.killpg(item.pid, signal.SIGINT)
    assert nodes.wait_for_exit() == [(130, ["ended by Ctrl-C (SIGINT)"])] * 2


def test_excludes_the_node_of_repeated_failures(folder: Path) -> None:
    nodes = TwoLaunchers(folder, "rank and os.kill(os.getpid(), signal.SIGKILL); time.sleep(600)", times=1)
    (code, lines), report = nodes.wait_for_exit()
    assert (code, lines) == report and code == 137 and len(lines) == 2
    assert (folder / "leave_out").read_text() == "n1\n"


def test_a_spare_replaces_a_lost_node(folder: Path) -> None:
    """The node's launcher and rank are gone at once, as if the machine were. The run's status is that of the others."""
    nodes = TwoLaunchers(folder, "if attempt == 0: dist.barrier() if rank == 0 else time.sleep(600)", spares=1)
    nodes.wait_for("started_0_0"), nodes.wait_for("started_0_1")
    os.kill(nodes.launchers[1].pid, signal.SIGKILL)
    report, lost, spare = nodes.wait_for_exit()
    assert report == spare and report[0] == 0 and lost[0] == -signal.SIGKILL
    (line,) = report[1]
    assert line.startswith("error: the launcher of node number 1 does not respond; restarting in 2 s from checkpoint")
    assert line.endswith("; node number 1 is replaced by the spare node n2")
    assert {file.name for file in folder.glob("started_*")} == {
        f"started_{n}_{rank}" for n in (0, 1) for rank in (0, 1)
    }
    assert (folder / "status").read_text() == "0\n"


def test_a_spare_replaces_the_node_of_repeated_failures(folder: Path) -> None:
    body = "if os.environ['SLURMD_NODENAME'] == 'n1': os.kill(os.getpid(), signal.SIGKILL)\n"
    nodes = TwoLaunchers(folder, body + "if attempt < 2: time.sleep(600)", times=1, spares=1)
    report, replaced, spare = nodes.wait_for_exit()
    assert report == replaced == spare and report[0] == 0
    first, second = report[1]
    assert first.endswith("(restart 1 of this run, 1 of 1 without a new checkpoint)")
    assert second.endswith(
        "(restart 2 of this run, 1 of 1 without a new checkpoint); node n1 is replaced by the spare node n2"
    )
    assert (folder / "leave_out").read_text() == "n1\n"
