"""How a run starts and ends as processes: one line, the documented exit status, nobody left behind.

Most of it with ranks that import nothing heavy; three real runs at the end.
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
from megarl.launch import exit_status as ending
from megarl.config import ConfigError
rank = int(os.environ["RANK"])
def wait():
    pathlib.Path(f"there_{rank}").write_text(str(os.getpid()))
    while not ending.is_stop_requested():
        time.sleep(0.01)
def stop_together():
    pathlib.Path(f"stopping_{rank}").touch()
    while not os.path.exists(f"stopping_{1 - rank}"):
        time.sleep(0.01)  # torch's agent ends those that are later than the first
    raise ending.GracefulExit("saved step 3")
def body():
    BODY
with ending.exit_on_error():
    body()
"""


def run_of(
    folder: Path, body: str, saves: bool = False, grace: float = 60.0, launcher: str = LAUNCHER
) -> subprocess.Popen[str]:
    """Two ranks that do `body`, in a process group of their own."""
    (folder / "launcher.py").write_text(launcher.replace("GRACE", str(grace)))
    (folder / "rank.py").write_text(RANK.replace("BODY", body))
    command = [sys.executable, "launcher.py", "saves" if saves else ""]
    return start(command, folder)


def start(command: list[str], folder: Path) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    return subprocess.Popen(
        command, cwd=folder, env=ENVIRONMENT, stdout=pipe, stderr=pipe, text=True, start_new_session=True
    )


def wait_for(there: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 240
    while not there():
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.02)


def pids(folder: Path, process: subprocess.Popen[str]) -> list[int]:
    files = [folder / f"there_{rank}" for rank in range(2)]
    wait_for(lambda: all(file.exists() and file.read_text() for file in files), process)
    return [int(file.read_text()) for file in files]


def ended(process: subprocess.Popen[str]) -> tuple[int, list[str]]:
    """Exit status and lines on stderr; nobody of its process group, which is its session, is left."""
    _, err = process.communicate(timeout=120)
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)
    return process.returncode, [line for line in err.splitlines() if line.strip()]


def test_a_run_that_goes_well_says_nothing(tmp_path: Path) -> None:
    assert ended(run_of(tmp_path, "pass")) == (0, [])


@pytest.mark.parametrize(("number", "status"), [(signal.SIGKILL, 137), (signal.SIGSEGV, 139), (signal.SIGTERM, 143)])
def test_a_killed_rank_is_named_and_the_other_ends(tmp_path: Path, number: int, status: int) -> None:
    process = run_of(tmp_path, "wait()")
    os.kill(pids(tmp_path, process)[1], number)
    code, (line,) = ended(process)
    assert code == status
    assert "rank 1 was " in line and signal.Signals(number).name in line


@pytest.mark.parametrize("which", [(1,), (0, 1)])
def test_ranks_that_stay_stopped_are_killed(tmp_path: Path, which: tuple[int, ...]) -> None:
    """Nobody waits for them but the launcher, which waits as long as ranks would."""
    rules = "run_dir='.', save_every=0, max_restarts=0, timeout_s=1.0"
    process = run_of(tmp_path, f"ending.register_run({rules}); wait()", grace=0.5)
    there = pids(tmp_path, process)
    os.kill(there[1], signal.SIGSTOP)
    time.sleep(0.5)
    os.kill(there[1], signal.SIGCONT)  # not for long
    for rank in which:
        os.kill(there[rank], signal.SIGSTOP)
    code, (line,) = ended(process)
    assert code == 1
    assert line.startswith(tuple(f"error: rank {rank} has been stopped (SIGSTOP) for " for rank in which))
    assert line.endswith("s, longer than run.distributed_timeout_s=1, and was killed")


def test_ranks_that_are_stopped_with_their_launcher_go_on_with_it(tmp_path: Path) -> None:
    """As by Ctrl-Z."""
    body = "ending.register_run(run_dir='.', save_every=0, max_restarts=0, timeout_s=1.0); rank or wait()"
    launcher = LAUNCHER.replace(
        "launcher.STOPPED_MARGIN_S", "launcher._SUSPEND_GAP_S, launcher.STOPPED_MARGIN_S"
    ).replace("0.5", "1.5, 0.5")
    (tmp_path / "there_1").write_text("1")
    process = run_of(tmp_path, body, launcher=launcher)
    rank = pids(tmp_path, process)[0]
    time.sleep(2.5)  # it has looked
    for pid in (process.pid, rank):
        os.kill(pid, signal.SIGSTOP)
    time.sleep(3)
    os.kill(process.pid, signal.SIGCONT)
    time.sleep(1.2)  # a look with the rank still stopped
    os.kill(rank, signal.SIGCONT)
    time.sleep(1)
    assert process.poll() is None
    os.killpg(process.pid, signal.SIGINT)
    assert ended(process) == (130, ["ended by Ctrl-C (SIGINT)"])


def test_a_rank_that_sleeps_on_is_killed(tmp_path: Path) -> None:
    body = "import signal; rank or signal.pthread_sigmask(signal.SIG_BLOCK, [2, 15]); rank or wait(); sys.exit(0)"
    code, lines = ended(run_of(tmp_path, body, grace=0.5))
    assert code == 1
    assert lines[-1].startswith("error: rank 1 failed: SystemExit: 0 (")
    assert lines[-1].endswith("rank.py, line 16, in body)")


def test_a_launcher_that_is_killed_takes_its_ranks_along(tmp_path: Path) -> None:
    process = run_of(tmp_path, "wait()")
    pids(tmp_path, process)
    process.kill()
    process.communicate()
    wait_for_nobody(process.pid)


def wait_for_nobody(group: int) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return
        time.sleep(0.02)
    pytest.fail("a rank is left")


def test_ctrl_c_is_one_line(tmp_path: Path) -> None:
    process = run_of(tmp_path, "ending.save_on_sigterm(); wait()", saves=True)
    pids(tmp_path, process)
    os.killpg(process.pid, signal.SIGINT)
    assert ended(process) == (130, ["ended by Ctrl-C (SIGINT)"])


@pytest.mark.parametrize("to_all", [True, False])
def test_sigterm_is_answered_by_saving(tmp_path: Path, to_all: bool) -> None:
    body = "ending.save_on_sigterm(); wait(); time.sleep(0.5); raise ending.GracefulExit('saved step 3')"
    process = run_of(tmp_path, body, saves=True)
    pids(tmp_path, process)
    (os.killpg if to_all else os.kill)(process.pid, signal.SIGTERM)
    assert ended(process) == (85, ["saved step 3"])


def test_a_second_sigterm_ends_the_run(tmp_path: Path) -> None:
    body = "ending.save_on_sigterm(); wait(); pathlib.Path(f'asked_{rank}').touch(); time.sleep(600)"
    process = run_of(tmp_path, body, saves=True)
    pids(tmp_path, process)
    process.terminate()
    wait_for(lambda: len(list(tmp_path.glob("asked_*"))) == 2, process)
    time.sleep(2.1)  # within two seconds it is the same request
    process.terminate()
    assert ended(process) == (143, ["ended by SIGTERM"])


def test_a_second_sigterm_waits_for_a_checkpoint_that_is_being_written(tmp_path: Path) -> None:
    body = """
    ending.save_on_sigterm(); wait(); pathlib.Path(f'asked_{rank}').touch()
    with ending.defer_sigterm():
        while not pathlib.Path("written").exists():
            time.sleep(0.01)
    raise ending.GracefulExit("saved step 3")"""
    process = run_of(tmp_path, body, saves=True)
    pids(tmp_path, process)
    process.terminate()
    wait_for(lambda: len(list(tmp_path.glob("asked_*"))) == 2, process)
    time.sleep(2.1)  # within two seconds it is the same request
    process.terminate()
    time.sleep(0.5)
    (tmp_path / "written").touch()
    assert ended(process) == (85, ["saved step 3"])


def test_sigterm_without_checkpoints_ends_the_run(tmp_path: Path) -> None:
    process = run_of(tmp_path, "wait()")
    pids(tmp_path, process)
    os.killpg(process.pid, signal.SIGTERM)
    assert ended(process) == (143, ["ended by SIGTERM"])


def test_signals_before_the_ranks_are_up_are_not_lost(tmp_path: Path) -> None:
    process = run_of(tmp_path, "wait()", saves=True)
    wait_for(lambda: len(children(process.pid)) == 2, process)
    os.killpg(process.pid, signal.SIGTERM)
    assert ended(process) == (143, ["ended by SIGTERM"])


def children(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def test_a_mistake_is_told_once_and_a_fault_with_its_traceback(tmp_path: Path) -> None:
    assert ended(run_of(tmp_path, "raise ConfigError('run.dir is wrong')")) == (2, ["error: run.dir is wrong"])
    code, lines = ended(run_of(tmp_path, "rank and 1 / 0; wait()"))
    assert code == 1 and lines[0] == "Traceback (most recent call last):"
    assert lines[-1].startswith("error: rank 1 failed: ZeroDivisionError: division by zero (")
    assert lines[-1].endswith("rank.py, line 16, in body)")
    assert ended(run_of(tmp_path, "rank and os._exit(3); wait()")) == (
        3,
        ["error: rank 1 exited with status 3 without an error message"],
    )


ORPHAN = """
    import pathlib, subprocess
    ending.register_run(run_dir=".", save_every=1, max_restarts=3)
    left = pathlib.Path("left")
    if ending.get_restart_count():
        assert not os.path.exists("/proc/" + left.read_text())
        return
    if rank:
        left.write_text(str(subprocess.Popen(["setsid", "sleep", "600"], start_new_session=True).pid))
    wait()
"""


def test_a_run_starts_again_when_nothing_of_it_is_left(tmp_path: Path) -> None:
    """Not even what a killed rank has started in a session of its own."""
    process = run_of(tmp_path, ORPHAN)
    victim = pids(tmp_path, process)[1]
    wait_for((tmp_path / "left").exists, process)
    os.kill(victim, signal.SIGKILL)
    code, (line,) = ended(process)
    assert code == 0
    assert line.startswith("error: rank 1 was killed by SIGKILL") and "; restarting in 2 s from the beginning" in line
    assert (tmp_path / "log.txt").read_text().rstrip().endswith(line)


def test_a_signal_between_two_starts_ends_it(tmp_path: Path) -> None:
    process = run_of(tmp_path, 'ending.register_run(run_dir=".", save_every=1, max_restarts=3)\n    wait()')
    os.kill(pids(tmp_path, process)[1], signal.SIGKILL)
    wait_for((tmp_path / "log.txt").exists, process)
    process.terminate()
    code, lines = ended(process)
    assert (code, lines[1:]) == (143, ["ended by SIGTERM"])


LOST = RankMessage(0, "lost", "error: rank 0 lost another rank")
FAULT = RankMessage(1, "fault", "error: rank 1 failed")
MISTAKE = RankMessage(1, "mistake", "error: key")


def test_the_first_cause_is_named() -> None:
    """Not what other ranks see of it."""
    assert determine_outcome({0: 1, 1: 1}, [LOST, FAULT])[:3] == (1, FAULT.text, "fault")
    assert determine_outcome({0: 1, 1: 2}, [LOST, MISTAKE])[:3] == (2, MISTAKE.text, "mistake")
    assert determine_outcome({0: 1, 1: -9}, [LOST])[::2] == (137, "killed")
    assert determine_outcome({0: 1, 1: -11}, [LOST])[::2] == (139, "fault")  # its own doing
    assert determine_outcome({0: -6, 1: 1}, [FAULT])[:3] == (1, FAULT.text, "fault")
    assert determine_outcome({0: 1}, [LOST])[:3] == (1, LOST.text, "lost")
    saved = [RankMessage(1, "stopped", "saved"), RankMessage(0, "stopped", "saved")]
    assert determine_outcome({0: 85, 1: 85}, saved)[:3] == (85, "saved", "stopped")
    assert determine_outcome({0: 130, 1: 1}, [LOST], stop_signal=2)[:3] == (130, "ended by Ctrl-C (SIGINT)", "asked")
    assert determine_outcome({0: 2, 1: 2}, [MISTAKE], stop_signal=15)[:3] == (2, MISTAKE.text, "mistake")
    assert determine_outcome({}, [])[::2] == (1, "lost")


def test_a_rank_that_others_have_waited_for_is_the_cause_and_not_that_it_was_killed_for_it() -> None:
    late = RankMessage(1, "late", "error: rank 1 keeps the others waiting")
    assert determine_outcome({0: 1}, [LOST, late])[:3] == (1, late.text, "late")
    assert determine_outcome({0: 1, 1: -9}, [LOST, late])[:3] == (1, late.text, "late")
    assert determine_outcome({0: 1, 1: 1}, [late, LOST, RankMessage(1, "fault", "error: out of memory")])[2] == "fault"
    assert determine_outcome({0: -9, 1: 1}, [late])[2] == "killed"


def test_a_rank_is_named_by_its_roles_where_it_has_its_own() -> None:
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


# --- what others say to a launcher ------------------------------------------------------------------------------------

RULES = '{"run_dir": "/", "save_every": 1, "max_restarts": 0, "timeout_s": 0.001}'
NO_WORDS = [
    *(b"not json", b"[]", b"7", b'{"a": 1}', b"\xff\xfe", b"[" * 5000),
    b'{"rank": "0", "kind": "fault", "text": ""}',
    b'{"rank": 0, "kind": "nothing", "text": ""}',
    b'{"rank": 0, "kind": "fault", "text": 5}',
    b'{"rank": 0, "kind": "run", "text": "{}"}',
    b'{"rank": 0, "kind": "run", "text": "{\\"run_dir\\": 1, \\"save_every\\": 1, \\"max_restarts\\": 1}"}',
]


def test_what_is_no_word_is_dropped_and_counted(capsys: pytest.CaptureFixture[str]) -> None:
    words = RankMessages()
    where = words.environment[exit_status.LAUNCHER_ENV].partition(":")[2]
    for text in NO_WORDS:
        memory_files.append(where, b"\n" + text + b"\n")
    memory_files.append(where, b'\n{"rank": 0, "kind": "fau')  # of a rank that was killed meanwhile
    memory_files.append(where, b'\n{"rank": 1, "kind": "fault", "text": "x"}\n{"rank": 1')
    assert words.read() == [RankMessage(1, "fault", "x")]
    assert words.num_dropped == len(NO_WORDS) + 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("warning: dropped b'not json', which is not a message from a rank")
    memory_files.append(where, b', "kind": "lost", "text": "y"}\n')
    assert words.read()[1:] == [RankMessage(1, "lost", "y")]
    words.close()


def test_words_for_a_launcher_that_has_ended_go_nowhere() -> None:
    words = RankMessages()
    where = words.environment[exit_status.LAUNCHER_ENV].partition(":")[2]
    words.close()
    with Path(os.devnull).open() as other, pytest.raises(FileNotFoundError):
        memory_files.append(re.sub(r"\d+$", str(other.fileno()), where), b"x")
    with pytest.raises(OSError):
        memory_files.append(where, b"x")


def sockets_of(pid: int) -> list[str]:
    """Sockets of a process that somebody else might send something to: abstract ones that datagrams go to."""
    links = [os.readlink(link.path) for link in os.scandir(f"/proc/{pid}/fd")]
    rows = [row.split() for row in Path("/proc/net/unix").read_bytes().split(b"\n")[1:] if b" @" in row]
    return [repr(row) for row in rows if f"socket:[{row[6].decode()}]" in links]


INTRUDER = """
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
@pytest.mark.parametrize("forged", ["not json", RULES])
@pytest.mark.parametrize("torchrun", [False, True])
def test_another_user_cannot_say_anything_to_a_launcher(tmp_path: Path, forged: str, torchrun: bool) -> None:
    """Nor to the ranks; and the run still answers a signal."""
    word = "\n" + json.dumps({"rank": 0, "kind": "run", "text": forged}) + "\n"
    body = "ending.save_on_sigterm(); wait(); stop_together()"
    process = run_by_torchrun(tmp_path, body) if torchrun else run_of(tmp_path, body, saves=True)
    there = [process.pid, *pids(tmp_path, process)]
    assert as_other_user(INTRUDER, word, *map(str, there)) == "[]\n"
    assert [item for pid in there for item in sockets_of(pid)] == []
    process.terminate()
    assert ended(process) == (85, ["saved step 3"])


@pytest.mark.parametrize("torchrun", [False, True])
def test_a_run_whose_rank_says_what_is_no_word_goes_on(tmp_path: Path, torchrun: bool) -> None:
    """And answers a signal."""
    body = """
    from megarl.processes import memory_files
    for text in (b"not json", b"[]", b'{"a": 1}'):
        memory_files.append(ending._Signals.launcher, b"\\n" + text + b"\\n")
    ending.save_on_sigterm(); wait(); stop_together()"""
    process = run_by_torchrun(tmp_path, body) if torchrun else run_of(tmp_path, body, saves=True)
    pids(tmp_path, process)
    time.sleep(1.5)
    process.terminate()
    code, lines = ended(process)
    assert (code, lines[1:]) == (85, ["saved step 3"])
    assert lines[0].startswith("warning: dropped b'not json', which is not a message from a rank")


def test_a_rank_that_has_saved_is_not_ended_while_its_interpreter_finalizes(tmp_path: Path) -> None:
    """torch's agent sends SIGTERM to ranks that exit after the first."""
    body = """
    class Late:
        def __del__(self, sleep=time.sleep): sleep(3.0 * rank)
    globals()["late"] = Late()  # deleted after Python has restored the default actions of signals
    ending.save_on_sigterm(); wait(); stop_together()"""
    process = run_by_torchrun(tmp_path, body)
    pids(tmp_path, process)
    process.terminate()
    assert ended(process) == (85, ["saved step 3"])


def run_by_torchrun(folder: Path, body: str) -> subprocess.Popen[str]:
    (folder / "rank.py").write_text(RANK.replace("BODY", body))
    command = [sys.executable, "-m", "megarl.torchrun", "--standalone", "--nproc-per-node", "2", "rank.py"]
    return start(command, folder)


# --- the whole program ------------------------------------------------------------------------------------------------


def train(folder: Path, quickstart: Path, *overrides: str) -> subprocess.Popen[str]:
    """Two ranks of SFT, which go on for as long as one lets them; TMPDIR is a folder of its own."""
    value = [f"run.dir={folder}/run", f"model.path={quickstart}/model", f"data.train={quickstart}/sft.jsonl"]
    value += ["run.num_rollout=100000", "data.prompts_per_step=4", "track.trackers=[]", "track.progress=false"]
    command = [sys.executable, "-m", "megarl.train", str(ROOT / "configs/quickstart_sft.yaml"), *value, *overrides]
    return start(command, folder)


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("quickstart") / "q"
    command = [sys.executable, str(ROOT / "tools/make_quickstart.py"), str(folder), "--demonstrations", "200"]
    subprocess.run([*command, "--train", "20"], cwd=ROOT, check=True, capture_output=True)
    return folder


def steps(folder: Path) -> int:
    file = folder / "run" / "metrics.jsonl"
    return file.read_text().count("\n") if file.exists() else 0


def test_a_run_saves_itself_at_sigterm_and_starts_again_when_a_rank_is_killed(
    tmp_path: Path, quickstart: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setitem(ENVIRONMENT, "TMPDIR", str(scratch))
    process = train(tmp_path, quickstart, "run.save_every=100000")
    wait_for(lambda: steps(tmp_path) > 0, process)
    os.killpg(process.pid, signal.SIGTERM)
    code, (line,) = ended(process)
    done = steps(tmp_path)
    assert (code, line) == (85, f"stopped on request: saved step {done}, resume with run.resume=auto")
    assert [path.name for path in (tmp_path / "run/checkpoints").glob("step_*")] == [f"step_{done:06d}"]

    process = train(tmp_path, quickstart, "run.save_every=100000", "run.resume=auto")
    wait_for(lambda: steps(tmp_path) > done, process)
    (item,) = [pid for pid in children(process.pid) if b"RANK=1\0" in Path(f"/proc/{pid}/environ").read_bytes()]
    log = tmp_path / "run/log.txt"
    resumed = log.read_text().count("resumed from")
    os.kill(int(item), signal.SIGKILL)
    wait_for(lambda: log.read_text().count("resumed from") > resumed, process)
    os.killpg(process.pid, signal.SIGTERM)
    code, (killed, stopped) = ended(process)
    assert killed == (
        "error: rank 1 was killed by SIGKILL (the kernel does that when memory runs out); restarting in 2 s from "
        f"checkpoint step_{done:06d} (restart 1 of this run, 1 of 3 without a new checkpoint)"
    )
    assert f"  {killed}\n" in log.read_text()
    assert code in (85, 143) and stopped.startswith(("stopped on request: saved step", "ended by SIGTERM"))
    traceback = (tmp_path / "run/logs/rank_0.log").read_text()
    assert "Traceback" in traceback
    assert "gloo" in traceback or "rank 1 disconnected" in traceback  # by whichever way it was waited for
    left = [path.name for path in scratch.iterdir()]
    assert [name for name in left if not name.startswith("torchinductor_")] == []  # torch's cache, for all runs


def test_ctrl_c_while_the_run_starts_is_one_line(tmp_path: Path, quickstart: Path) -> None:
    process = train(tmp_path, quickstart)
    wait_for((tmp_path / "run/log.txt").exists, process)
    os.killpg(process.pid, signal.SIGINT)
    assert ended(process) == (130, ["ended by Ctrl-C (SIGINT)"])
