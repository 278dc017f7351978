"""The launcher: error lines, exit statuses, restarts and cleanup of ranks.

Most tests use ranks without heavy imports; the last ones train.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from other_user import as_other_user, needs_root

from megarl.launch import exit_status
from megarl.launch.launcher import RankMessage, RankMessages, determine_outcome
from megarl.processes import memory_files

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = {name: text for name, text in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
ENVIRONMENT |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}

LAUNCHER = """
import sys
from megarl.launch import launcher, restarts
from megarl.processes.children import inherit_orphans
launcher.ORPHAN_TIMEOUT_S = 1.0
launcher.STOPPED_MARGIN_S = 0.5
pending = []
def attempt(environment):
    launch = launcher.Launch((sys.executable, "rank.py"), 2, sys.argv[1] == "saves", GRACE, pending=pending)
    return launch.run(environment)
inherit_orphans()
with launcher.record_signals(pending):
    sys.exit(launcher.run_with_restarts(attempt, restarts.RestartTracker().decide, pending))
"""
RANK = """
import os, pathlib, sys, time
from megarl.launch import exit_status
from megarl.config import ConfigError
rank = int(os.environ["RANK"])
def wait():
    pathlib.Path(f"started_{rank}").write_text(str(os.getpid()))
    while not exit_status.is_stop_requested():
        time.sleep(0.01)
def stop_together():
    pathlib.Path(f"stopping_{rank}").touch()
    while not os.path.exists(f"stopping_{1 - rank}"):
        time.sleep(0.01)  # torch's agent ends those that are later than the first
    raise exit_status.GracefulExit("saved step 3")
def body():
    BODY
with exit_status.exit_on_error():
    body()
"""


def start_launcher(
    folder: Path, body: str, saves: bool = False, grace: float = 60.0, launcher: str = LAUNCHER
) -> subprocess.Popen[str]:
    """Start a launcher of two ranks that run `body`, in a new process group."""
    (folder / "launcher.py").write_text(launcher.replace("GRACE", str(grace)))
    (folder / "rank.py").write_text(RANK.replace("BODY", body))
    command = [sys.executable, "launcher.py", "saves" if saves else ""]
    return start_process(command, folder)


def start_process(command: list[str], folder: Path) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    return subprocess.Popen(
        command, cwd=folder, env=ENVIRONMENT, stdout=pipe, stderr=pipe, text=True, start_new_session=True
    )


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 240
    while not condition():
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.02)


def wait_for_pids(folder: Path, process: subprocess.Popen[str]) -> list[int]:
    files = [folder / f"started_{rank}" for rank in range(2)]
    wait_for(lambda: all(file.exists() and file.read_text() for file in files), process)
    return [int(file.read_text()) for file in files]


def wait_for_exit(process: subprocess.Popen[str]) -> tuple[int, list[str]]:
    """Return the exit status and the lines of stderr, and assert that its process group is empty."""
    try:
        _, err = process.communicate(timeout=120)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)
    return process.returncode, [line for line in err.splitlines() if line.strip()]


def test_a_successful_run_prints_nothing(tmp_path: Path) -> None:
    assert wait_for_exit(start_launcher(tmp_path, "pass")) == (0, [])


@pytest.mark.parametrize(("number", "status"), [(signal.SIGKILL, 137), (signal.SIGSEGV, 139), (signal.SIGTERM, 143)])
def test_names_a_killed_rank_and_ends_the_other(tmp_path: Path, number: int, status: int) -> None:
    process = start_launcher(tmp_path, "wait()")
    os.kill(wait_for_pids(tmp_path, process)[1], number)
    code, (line,) = wait_for_exit(process)
    assert code == status
    assert "rank 1 was " in line and signal.Signals(number).name in line


@pytest.mark.parametrize("ranks", [(1,), (0, 1)])
def test_kills_stopped_ranks_after_the_timeout(tmp_path: Path, ranks: tuple[int, ...]) -> None:
    """The launcher waits as long as other ranks would."""
    rules = "run_dir='.', save_every=0, max_restarts=0, timeout_s=1.0"
    process = start_launcher(tmp_path, f"exit_status.register_run({rules}); wait()", grace=0.5)
    rank_pids = wait_for_pids(tmp_path, process)
    os.kill(rank_pids[1], signal.SIGSTOP)
    time.sleep(0.5)
    os.kill(rank_pids[1], signal.SIGCONT)  # before the timeout
    for rank in ranks:
        os.kill(rank_pids[rank], signal.SIGSTOP)
    code, (line,) = wait_for_exit(process)
    assert code == 1
    assert line.startswith(tuple(f"error: rank {rank} has been stopped (SIGSTOP) for " for rank in ranks))
    assert line.endswith("s, longer than run.distributed_timeout_s=1, and was killed")


def test_ranks_stopped_with_their_launcher_continue_with_it(tmp_path: Path) -> None:
    """As after Ctrl-Z."""
    body = "exit_status.register_run(run_dir='.', save_every=0, max_restarts=0, timeout_s=1.0); rank or wait()"
    launcher = LAUNCHER.replace(
        "launcher.STOPPED_MARGIN_S", "launcher._SUSPEND_GAP_S, launcher.STOPPED_MARGIN_S"
    ).replace("0.5", "1.5, 0.5")
    (tmp_path / "started_1").write_text("1")
    process = start_launcher(tmp_path, body, launcher=launcher)
    rank = wait_for_pids(tmp_path, process)[0]
    time.sleep(2.5)  # the launcher has checked
    for pid in (process.pid, rank):
        os.kill(pid, signal.SIGSTOP)
    time.sleep(3)
    os.kill(process.pid, signal.SIGCONT)
    time.sleep(1.2)  # a check while the rank is still stopped
    os.kill(rank, signal.SIGCONT)
    time.sleep(1)
    assert process.poll() is None
    os.killpg(process.pid, signal.SIGINT)
    assert wait_for_exit(process) == (130, ["ended by Ctrl-C (SIGINT)"])


def test_kills_ranks_that_ignore_signals(tmp_path: Path) -> None:
    body = "import signal; rank or signal.pthread_sigmask(signal.SIG_BLOCK, [2, 15]); rank or wait(); sys.exit(0)"
    code, lines = wait_for_exit(start_launcher(tmp_path, body, grace=0.5))
    assert code == 1
    assert lines[-1].startswith("error: rank 1 failed: SystemExit: 0 (")
    assert lines[-1].endswith("rank.py, line 16, in body)")


def test_ranks_end_with_a_killed_launcher(tmp_path: Path) -> None:
    process = start_launcher(tmp_path, "wait()")
    wait_for_pids(tmp_path, process)
    process.kill()
    process.communicate()
    wait_for_empty_group(process.pid)


def wait_for_empty_group(group: int) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return
        time.sleep(0.02)
    pytest.fail("a rank still runs")


def test_ctrl_c_prints_one_line(tmp_path: Path) -> None:
    process = start_launcher(tmp_path, "exit_status.save_on_sigterm(); wait()", saves=True)
    wait_for_pids(tmp_path, process)
    os.killpg(process.pid, signal.SIGINT)
    assert wait_for_exit(process) == (130, ["ended by Ctrl-C (SIGINT)"])


@pytest.mark.parametrize("to_all", [True, False])
def test_sigterm_saves_a_checkpoint(tmp_path: Path, to_all: bool) -> None:
    body = "exit_status.save_on_sigterm(); wait(); time.sleep(0.5); raise exit_status.GracefulExit('saved step 3')"
    process = start_launcher(tmp_path, body, saves=True)
    wait_for_pids(tmp_path, process)
    (os.killpg if to_all else os.kill)(process.pid, signal.SIGTERM)
    assert wait_for_exit(process) == (85, ["saved step 3"])


def test_second_sigterm_ends_the_run(tmp_path: Path) -> None:
    body = "exit_status.save_on_sigterm(); wait(); pathlib.Path(f'stop_requested_{rank}').touch(); time.sleep(600)"
    process = start_launcher(tmp_path, body, saves=True)
    wait_for_pids(tmp_path, process)
    process.terminate()
    wait_for(lambda: len(list(tmp_path.glob("stop_requested_*"))) == 2, process)
    time.sleep(2.1)  # a repetition within two seconds is the same request
    process.terminate()
    assert wait_for_exit(process) == (143, ["ended by SIGTERM"])


def test_second_sigterm_waits_for_a_checkpoint_write(tmp_path: Path) -> None:
    body = """
    exit_status.save_on_sigterm(); wait(); pathlib.Path(f'stop_requested_{rank}').touch()
    with exit_status.defer_sigterm():
        while not pathlib.Path("written").exists():
            time.sleep(0.01)
    raise exit_status.GracefulExit("saved step 3")"""
    process = start_launcher(tmp_path, body, saves=True)
    wait_for_pids(tmp_path, process)
    process.terminate()
    wait_for(lambda: len(list(tmp_path.glob("stop_requested_*"))) == 2, process)
    time.sleep(2.1)  # a repetition within two seconds is the same request
    process.terminate()
    time.sleep(0.5)
    (tmp_path / "written").touch()
    assert wait_for_exit(process) == (85, ["saved step 3"])


def test_sigterm_without_checkpoints_ends_the_run(tmp_path: Path) -> None:
    process = start_launcher(tmp_path, "wait()")
    wait_for_pids(tmp_path, process)
    os.killpg(process.pid, signal.SIGTERM)
    assert wait_for_exit(process) == (143, ["ended by SIGTERM"])


def test_keeps_signals_that_arrive_before_ranks_start(tmp_path: Path) -> None:
    process = start_launcher(tmp_path, "wait()", saves=True)
    wait_for(lambda: len(list_children(process.pid)) == 2, process)
    os.killpg(process.pid, signal.SIGTERM)
    assert wait_for_exit(process) == (143, ["ended by SIGTERM"])


def list_children(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def test_prints_config_errors_once_and_faults_with_traceback(tmp_path: Path) -> None:
    assert wait_for_exit(start_launcher(tmp_path, "raise ConfigError('run.dir is wrong')")) == (
        2,
        ["error: run.dir is wrong"],
    )
    code, lines = wait_for_exit(start_launcher(tmp_path, "rank and 1 / 0; wait()"))
    assert code == 1 and lines[0] == "Traceback (most recent call last):"
    assert lines[-1].startswith("error: rank 1 failed: ZeroDivisionError: division by zero (")
    assert lines[-1].endswith("rank.py, line 16, in body)")
    assert wait_for_exit(start_launcher(tmp_path, "rank and os._exit(3); wait()")) == (
        3,
        ["error: rank 1 exited with status 3 without an error message"],
    )


LEAVE_ORPHAN = """
    import pathlib, subprocess
    exit_status.register_run(run_dir=".", save_every=1, max_restarts=3)
    orphan = pathlib.Path("orphan")
    if exit_status.get_restart_count():
        assert not os.path.exists("/proc/" + orphan.read_text())
        return
    if rank:
        orphan.write_text(str(subprocess.Popen(["setsid", "sleep", "600"], start_new_session=True).pid))
    wait()
"""


def test_restarts_after_all_orphans_ended(tmp_path: Path) -> None:
    """Including a process that the killed rank started in another session."""
    process = start_launcher(tmp_path, LEAVE_ORPHAN)
    victim = wait_for_pids(tmp_path, process)[1]
    wait_for((tmp_path / "orphan").exists, process)
    os.kill(victim, signal.SIGKILL)
    code, (line,) = wait_for_exit(process)
    assert code == 0
    assert line.startswith("error: rank 1 was killed by SIGKILL") and "; restarting in 2 s from the beginning" in line
    assert (tmp_path / "log.txt").read_text().rstrip().endswith(line)


def test_a_signal_before_a_restart_ends_the_run(tmp_path: Path) -> None:
    process = start_launcher(
        tmp_path, 'exit_status.register_run(run_dir=".", save_every=1, max_restarts=3)\n    wait()'
    )
    os.kill(wait_for_pids(tmp_path, process)[1], signal.SIGKILL)
    wait_for((tmp_path / "log.txt").exists, process)
    process.terminate()
    code, lines = wait_for_exit(process)
    assert (code, lines[1:]) == (143, ["ended by SIGTERM"])


LOST = RankMessage(0, "lost", "error: rank 0 lost another rank")
FAULT = RankMessage(1, "fault", "error: rank 1 failed")
MISTAKE = RankMessage(1, "mistake", "error: key")


def test_reports_the_first_cause() -> None:
    """Not its effects on other ranks."""
    assert determine_outcome({0: 1, 1: 1}, [LOST, FAULT])[:3] == (1, FAULT.text, "fault")
    assert determine_outcome({0: 1, 1: 2}, [LOST, MISTAKE])[:3] == (2, MISTAKE.text, "mistake")
    assert determine_outcome({0: 1, 1: -9}, [LOST])[::2] == (137, "killed")
    assert determine_outcome({0: 1, 1: -11}, [LOST])[::2] == (139, "fault")  # caused by the rank itself
    assert determine_outcome({0: -6, 1: 1}, [FAULT])[:3] == (1, FAULT.text, "fault")
    assert determine_outcome({0: 1}, [LOST])[:3] == (1, LOST.text, "lost")
    saved = [RankMessage(1, "stopped", "saved"), RankMessage(0, "stopped", "saved")]
    assert determine_outcome({0: 85, 1: 85}, saved)[:3] == (85, "saved", "stopped")
    assert determine_outcome({0: 130, 1: 1}, [LOST], stop_signal=2)[:3] == (130, "ended by Ctrl-C (SIGINT)", "asked")
    assert determine_outcome({0: 2, 1: 2}, [MISTAKE], stop_signal=15)[:3] == (2, MISTAKE.text, "mistake")
    assert determine_outcome({}, [])[::2] == (1, "lost")


def test_reports_the_late_rank_rather_than_its_kill() -> None:
    message = RankMessage(1, "late", "error: rank 1 keeps the others waiting")
    assert determine_outcome({0: 1}, [LOST, message])[:3] == (1, message.text, "late")
    assert determine_outcome({0: 1, 1: -9}, [LOST, message])[:3] == (1, message.text, "late")
    assert (
        determine_outcome({0: 1, 1: 1}, [message, LOST, RankMessage(1, "fault", "error: out of memory")])[2] == "fault"
    )
    assert determine_outcome({0: -9, 1: 1}, [message])[2] == "killed"


def test_names_ranks_with_their_roles() -> None:
    roles = {0: "actor, reference", 1: "critic"}
    assert determine_outcome({0: 1, 1: -15}, [LOST], roles=roles)[:2] == (
        143,
        "error: rank 1 (critic) was killed by SIGTERM",
    )
    assert determine_outcome({0: 7}, [], roles=roles)[:2] == (
        7,
        "error: rank 0 (actor, reference) exited with status 7 without an error message",
    )
    assert determine_outcome({2: 7}, [], roles=roles)[1].startswith("error: rank 2 exited")


# --- messages to a launcher -------------------------------------------------------------------------------------------

RUN_MESSAGE_TEXT = '{"run_dir": "/", "save_every": 1, "max_restarts": 0, "timeout_s": 0.001}'
INVALID_MESSAGES = [
    *(b"not json", b"[]", b"7", b'{"a": 1}', b"\xff\xfe", b"[" * 5000),
    b'{"rank": "0", "kind": "fault", "text": ""}',
    b'{"rank": 0, "kind": "nothing", "text": ""}',
    b'{"rank": 0, "kind": "fault", "text": 5}',
    b'{"rank": 0, "kind": "run", "text": "{}"}',
    b'{"rank": 0, "kind": "run", "text": "{\\"run_dir\\": 1, \\"save_every\\": 1, \\"max_restarts\\": 1}"}',
]


def test_drops_and_counts_invalid_messages(capsys: pytest.CaptureFixture[str]) -> None:
    messages = RankMessages()
    file = messages.environment[exit_status.LAUNCHER_ENV].partition(":")[2]
    for text in INVALID_MESSAGES:
        memory_files.append(file, b"\n" + text + b"\n")
    memory_files.append(file, b'\n{"rank": 0, "kind": "fau')  # from a rank that was killed during the write
    memory_files.append(file, b'\n{"rank": 1, "kind": "fault", "text": "x"}\n{"rank": 1')
    assert messages.read() == [RankMessage(1, "fault", "x")]
    assert messages.num_dropped == len(INVALID_MESSAGES) + 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("warning: dropped b'not json', which is not a message from a rank")
    memory_files.append(file, b', "kind": "lost", "text": "y"}\n')
    assert messages.read()[1:] == [RankMessage(1, "lost", "y")]
    messages.close()


def test_writing_to_an_ended_launcher_fails() -> None:
    messages = RankMessages()
    file = messages.environment[exit_status.LAUNCHER_ENV].partition(":")[2]
    messages.close()
    with Path(os.devnull).open() as stdin, pytest.raises(FileNotFoundError):
        memory_files.append(re.sub(r"\d+$", str(stdin.fileno()), file), b"x")
    with pytest.raises(OSError):
        memory_files.append(file, b"x")


def list_reachable_sockets(pid: int) -> list[str]:
    """List the abstract sockets of a process, to which other users could send."""
    links = [os.readlink(link.path) for link in os.scandir(f"/proc/{pid}/fd")]
    rows = [row.split() for row in Path("/proc/net/unix").read_bytes().split(b"\n")[1:] if b" @" in row]
    return [repr(row) for row in rows if f"socket:[{row[6].decode()}]" in links]


WRITE_TO_OPEN_FILES = """
reached = []
for pid in sys.argv[2:]:
    for number in range(256):
        try:
            file = os.open(f"/proc/{pid}/fd/{number}", os.O_WRONLY | os.O_APPEND)
            reached.append(f"{pid} {number}")
            os.write(file, sys.argv[1].encode())
        except OSError:
            pass
print(reached)
"""


@needs_root
@pytest.mark.parametrize("forged", ["not json", RUN_MESSAGE_TEXT])
@pytest.mark.parametrize("torchrun", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_other_users_cannot_write_to_a_launcher(tmp_path: Path, forged: str, torchrun: bool) -> None:
    """Nor to its ranks, and the run still stops at SIGTERM."""
    message = "\n" + json.dumps({"rank": 0, "kind": "run", "text": forged}) + "\n"
    body = "exit_status.save_on_sigterm(); wait(); stop_together()"
    process = start_torchrun(tmp_path, body) if torchrun else start_launcher(tmp_path, body, saves=True)
    rank_pids = [process.pid, *wait_for_pids(tmp_path, process)]
    assert as_other_user(WRITE_TO_OPEN_FILES, message, *map(str, rank_pids)) == "[]\n"
    assert [item for pid in rank_pids for item in list_reachable_sockets(pid)] == []
    process.terminate()
    assert wait_for_exit(process) == (85, ["saved step 3"])


@pytest.mark.parametrize("torchrun", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_continues_after_invalid_messages_from_a_rank(tmp_path: Path, torchrun: bool) -> None:
    """The run still stops at SIGTERM."""
    body = """
    from megarl.processes import memory_files
    for text in (b"not json", b"[]", b'{"a": 1}'):
        memory_files.append(exit_status._Signals.launcher, b"\\n" + text + b"\\n")
    exit_status.save_on_sigterm(); wait(); stop_together()"""
    process = start_torchrun(tmp_path, body) if torchrun else start_launcher(tmp_path, body, saves=True)
    wait_for_pids(tmp_path, process)
    time.sleep(1.5)
    process.terminate()
    code, lines = wait_for_exit(process)
    assert (code, lines[1:]) == (85, ["saved step 3"])
    assert lines[0].startswith("warning: dropped b'not json', which is not a message from a rank")


def test_does_not_kill_saved_ranks_during_finalization(tmp_path: Path) -> None:
    """torch's agent sends SIGTERM to ranks that exit after the first."""
    body = """
    class Late:
        def __del__(self, sleep=time.sleep): sleep(3.0 * rank)
    globals()["late"] = Late()  # deleted after Python has restored the default actions of signals
    exit_status.save_on_sigterm(); wait(); stop_together()"""
    process = start_torchrun(tmp_path, body)
    wait_for_pids(tmp_path, process)
    process.terminate()
    assert wait_for_exit(process) == (85, ["saved step 3"])


def start_torchrun(folder: Path, body: str) -> subprocess.Popen[str]:
    (folder / "rank.py").write_text(RANK.replace("BODY", body))
    command = [sys.executable, "-m", "megarl.torchrun", "--standalone", "--nproc-per-node", "2", "rank.py"]
    return start_process(command, folder)


# --- real training runs -----------------------------------------------------------------------------------------------


def start_training(folder: Path, quickstart: Path, *overrides: str) -> subprocess.Popen[str]:
    """Start SFT on two ranks, with more steps than any test waits for."""
    settings = [f"run.dir={folder}/run", f"model.path={quickstart}/model", f"data.train={quickstart}/sft.jsonl"]
    settings += ["run.num_rollout=100000", "data.prompts_per_step=4", "track.trackers=[]", "track.progress=false"]
    command = [sys.executable, "-m", "megarl.train", str(ROOT / "configs/quickstart_sft.yaml"), *settings, *overrides]
    return start_process(command, folder)


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("quickstart") / "q"
    command = [sys.executable, str(ROOT / "tools/make_quickstart.py"), str(folder), "--demonstrations", "200"]
    subprocess.run([*command, "--train", "20"], cwd=ROOT, check=True, capture_output=True)
    return folder


def count_steps(folder: Path) -> int:
    file = folder / "run" / "metrics.jsonl"
    return file.read_text().count("\n") if file.exists() else 0


@pytest.mark.nightly
def test_saves_at_sigterm_and_restarts_after_a_kill(
    tmp_path: Path, quickstart: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setitem(ENVIRONMENT, "TMPDIR", str(scratch))
    process = start_training(tmp_path, quickstart, "run.save_every=100000")
    wait_for(lambda: count_steps(tmp_path) > 0, process)
    os.killpg(process.pid, signal.SIGTERM)
    code, (line,) = wait_for_exit(process)
    done = count_steps(tmp_path)
    assert (code, line) == (85, f"stopped on request: saved step {done}, resume with run.resume=auto")
    assert [path.name for path in (tmp_path / "run/checkpoints").glob("step_*")] == [f"step_{done:06d}"]

    process = start_training(tmp_path, quickstart, "run.save_every=100000", "run.resume=auto")
    wait_for(lambda: count_steps(tmp_path) > done, process)
    (item,) = [pid for pid in list_children(process.pid) if b"RANK=1\0" in Path(f"/proc/{pid}/environ").read_bytes()]
    log = tmp_path / "run/log.txt"
    resumed = log.read_text().count("resumed from")
    os.kill(int(item), signal.SIGKILL)
    wait_for(lambda: log.read_text().count("resumed from") > resumed, process)
    os.killpg(process.pid, signal.SIGTERM)
    code, (killed, stopped) = wait_for_exit(process)
    assert killed == (
        "error: rank 1 was killed by SIGKILL (the kernel does that when memory runs out); restarting in 2 s from "
        f"checkpoint step_{done:06d} (restart 1 of this run, 1 of 3 without a new checkpoint)"
    )
    assert f"  {killed}\n" in log.read_text()
    assert code in (85, 143) and stopped.startswith(("stopped on request: saved step", "ended by SIGTERM"))
    traceback = (tmp_path / "run/logs/rank_0.log").read_text()
    assert "Traceback" in traceback
    assert "gloo" in traceback or "rank 1 disconnected" in traceback  # whichever connection failed first
    leftover_files = [path.name for path in scratch.iterdir()]
    # The cache of torch is shared by all runs.
    assert [name for name in leftover_files if not name.startswith("torchinductor_")] == []


@pytest.mark.nightly
def test_ctrl_c_during_startup_prints_one_line(tmp_path: Path, quickstart: Path) -> None:
    process = start_training(tmp_path, quickstart)
    wait_for((tmp_path / "run/log.txt").exists, process)
    os.killpg(process.pid, signal.SIGINT)
    assert wait_for_exit(process) == (130, ["ended by Ctrl-C (SIGINT)"])
