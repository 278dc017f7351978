"""How a process of a run ends: in one line that says why, with a documented exit status.

    0          done
    1          a fault of ours, or another rank was lost; the line names the log that has the whole traceback
    2          a mistake of the user's
    85         asked to stop (SIGTERM, SIGUSR1) and saved: go on with run.resume=auto
    86         a fault that came again at the same step after a restart: to start again is of no use
    128 + n    ended by signal n without saving: 130 Ctrl-C, 137 killed by the kernel, 143 SIGTERM

A rank that has a launcher (`launcher.py`, `torchrun.py`) tells it, and the launcher says what all of it comes from, and
may start the run again (`restarts.py`); one without says it itself.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, Literal, NamedTuple, NoReturn

from megarl.config import ConfigError
from megarl.config.command_line import missing_package_hint
from megarl.processes import children, memory_files, node
from megarl.processes.children import die_with_parent

REQUEUE_EXIT_CODE = 85
"""Exit status of a run that was asked to stop (SIGUSR1, SIGTERM) and saved itself: go on with run.resume=auto."""
REPEATED_FAULT_EXIT_CODE = 86
"""Exit status of a run that was started again after a fault, and came to the same at the same step."""
LAUNCHER_ENV = "MEGARL_LAUNCHER"
"""Environment variable by which a launcher names itself to its ranks: its pid and the file for their last words."""
RESTART_COUNT_ENV = "MEGARL_RESTARTED"
"""Environment variable of ranks that have been started again: how often."""
TRACEBACK_NOTE_PREFIX = "the whole traceback is in"
"""How the note begins that an exception carries once its traceback is in a file."""
SIGNAL_DEBOUNCE_S = 2.0
"""A signal that comes again within so many seconds is the same request: it was sent to the whole process group, or to
all processes of a Slurm job, and is forwarded besides."""

ExitKind = Literal["stopped", "ended", "mistake", "fault", "lost"]


class RunOutcome(NamedTuple):
    """What the ends of all ranks come to: the exit status, the line that says why, empty where all is well, and what it
    was. killed: by a signal from outside. late: a rank that others have waited for too long. asked: somebody wanted
    it so. rank: whose own end or silence it was, where that is known."""

    status: int
    text: str
    kind: Literal["done", "stopped", "asked", "mistake", "fault", "killed", "lost", "late"]
    rank: int = -1


class GracefulExit(SystemExit):
    """Asked to stop, and saved."""

    def __init__(self, text: str) -> None:
        super().__init__(REQUEUE_EXIT_CODE)
        self.text = text

    def __str__(self) -> str:
        return self.text


class SignalExit(SystemExit):
    """A signal ends this process. A SystemExit, as asyncio lets only that through, and KeyboardInterrupt."""

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)
        self.number = number

    def __str__(self) -> str:
        return f"ended by {signal_name(self.number)}"


ORDERLY_EXITS = (GracefulExit, SignalExit, KeyboardInterrupt)
"""What ends a run without anything being wrong."""


class _Signals:
    """What this process has been asked for."""

    is_stop_requested = False  # to stop at the end of the step
    is_ending = False
    last_signal_time = 0.0
    should_save_on_sigterm = False
    is_writing_checkpoint = False
    launcher: str | None = None


def catch_signals() -> None:
    """From here on a signal ends this process in an orderly way, and SIGUSR1 asks for a stop at the end of the step.

    Slurm sends SIGUSR1 to every process of a job, and it would end those that do not know it, such as the one by
    which torch shares memory. So it is blocked, which processes started from here on inherit, and looked for.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    if given := os.environ.pop(LAUNCHER_ENV, ""):
        parent, _, _Signals.launcher = given.partition(":")
        if os.getppid() == int(parent):
            die_with_parent(int(parent))
        elif not os.path.exists(f"/proc/{parent}"):  # else there is a script in between
            os._exit(1)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup, a job in the background
            signal.signal(number, _on_signal)
    signal.signal(signal.SIGUSR1, _request_stop)  # for threads that were there before, which may get it
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP})


def save_on_sigterm() -> None:
    """From here on a first SIGTERM is answered at the end of the step."""
    _Signals.should_save_on_sigterm = True


@contextlib.contextmanager
def defer_sigterm() -> Iterator[None]:
    """Within the block a checkpoint is written, which no SIGTERM breaks off, however often it comes."""
    _Signals.is_writing_checkpoint = True
    try:
        yield
    finally:
        _Signals.is_writing_checkpoint = False


def is_stop_requested() -> bool:
    return _Signals.is_stop_requested or signal.SIGUSR1 in signal.sigpending()


def begin_exit() -> None:
    """This process has begun to end, which signals shall not disturb."""
    _Signals.is_ending, _Signals.last_signal_time = True, time.monotonic()
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)  # of tasks that ended with us


def _request_stop(number: int, frame: FrameType | None) -> None:
    _Signals.is_stop_requested = True


def _on_signal(number: int, frame: FrameType | None) -> None:
    gently = _Signals.should_save_on_sigterm and number != signal.SIGINT
    again = time.monotonic() - _Signals.last_signal_time < SIGNAL_DEBOUNCE_S
    if again and (_Signals.is_ending or (_Signals.is_stop_requested and gently)):
        return
    _Signals.last_signal_time = time.monotonic()
    if gently and (not _Signals.is_stop_requested or _Signals.is_writing_checkpoint):
        _Signals.is_stop_requested = True
    elif not _Signals.is_ending:
        begin_exit()
        raise SignalExit(number)
    elif _Signals.launcher is None:  # a launcher ends those itself that take long
        os._exit(128 + number)


@contextlib.contextmanager
def exit_on_error() -> Iterator[None]:
    """Around a script's own flow: whatever ends it early is told in one line, and gives the documented exit status."""
    try:
        catch_signals()
        yield
    except BaseException as error:  # noqa: B036  the end of the program
        sys.exit(report_error(error))


def run_and_exit(program: Callable[[], int]) -> NoReturn:
    """Run a program that tells by itself, but for a signal before it gets so far; exit with its status."""
    try:
        catch_signals()
        status = program()
    except SignalExit as error:
        status = report_error(error)
    sys.exit(status)


def report_error(error: BaseException) -> int:
    """Say why this process ends, to the launcher or on stderr; returns its exit status. A signal changes nothing any
    more: torch's agent sends one to ranks that end after the first."""
    begin_exit()
    kind, status, text = classify_error(error)
    if notify_launcher(kind, text[-8000:]):
        return status
    if kind in ("lost", "fault") or _is_first_report(text):
        print(text, file=sys.stderr, flush=True)
    return status


def notify_launcher(kind: str, text: str, rank: int | None = None) -> bool:
    """Say something to the launcher, of this rank or of another; False where there is none, or it does not hear."""
    if _Signals.launcher is None:
        return False
    own = int(os.environ.get("RANK", "0"))
    word = {"rank": own if rank is None else rank, "kind": kind, "text": text}
    try:
        # Begun by a line's end: a rank that was killed while it wrote may have left half a line.
        memory_files.append(_Signals.launcher, b"\n" + json.dumps(word).encode() + b"\n")
        return True
    except OSError:  # it is gone
        return False


def register_run(**rules: Any) -> None:
    """Tell the launcher what a restart of this run depends on, see `restarts.RestartPolicy`. On the first rank of a node."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        notify_launcher("run", json.dumps(rules))


def get_restart_count() -> int:
    """How often a launcher has started this run again."""
    return int(os.environ.get(RESTART_COUNT_ENV, "0"))


def classify_error(error: BaseException) -> tuple[ExitKind, int, str]:
    """What it is, the exit status, and the line. A fault without a log has its traceback above the line."""
    if isinstance(error, GracefulExit):
        return "stopped", REQUEUE_EXIT_CODE, error.text
    if isinstance(error, (SignalExit, KeyboardInterrupt)):
        number = error.number if isinstance(error, SignalExit) else signal.SIGINT
        return "ended", 128 + number, f"ended by {signal_name(number)}"
    who = f"rank {os.environ.get('RANK', '0')}" if os.environ.get("WORLD_SIZE", "1") != "1" else "the run"
    if os.environ.get("GROUP_WORLD_SIZE", "1") != "1":
        who += f" on node {node.get_name()}"
    where = next((note for note in getattr(error, "__notes__", ()) if note.startswith(TRACEBACK_NOTE_PREFIX)), "")
    if lost := _lost_peer(error):
        return (
            "lost",
            1,
            _join_lines(
                f"error: {who} lost another rank: {lost}{_describe_foreign_users()}" + (f"; {where}" if where else "")
            ),
        )
    if isinstance(error, ConfigError):
        return "mistake", 2, _join_lines(f"error: {error}")
    if missing := missing_package_hint(error):
        return "mistake", 2, _join_lines(f"error: {missing}")
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({frames[-1].filename}, line {frames[-1].lineno}, in {frames[-1].name})" if frames else ""
    line = _join_lines(f"error: {who} failed: {type(error).__name__}: {error}{place}" + (f"; {where}" if where else ""))
    return "fault", 1, line if where else "".join(traceback.format_exception(error)) + line


def _describe_foreign_users() -> str:
    """That others are connected who may have taken a rank's place."""
    with contextlib.suppress(OSError, ValueError):
        if users := children.list_connected_users():
            names = ", ".join(map(str, users))
            return f"; user {names} of this machine is connected to its ports (SECURITY.md, What is not closed)"
    return ""


def signal_name(number: int) -> str:
    try:
        name = signal.Signals(number).name
    except ValueError:
        name = f"signal {number}"
    return {"SIGINT": "Ctrl-C (SIGINT)"}.get(name, name)


def _lost_peer(error: BaseException | None) -> str:
    """What torch.distributed, or a neighbour, says of a rank that is gone or does not answer, if that is behind the
    error."""
    while error is not None:
        gloo = isinstance(error, RuntimeError) and ("gloo/" in str(error) or "Gloo " in str(error))
        neighbour = isinstance(error, ConnectionError) and re.match(r"rank \d+ is gone: ", str(error))
        names = ("WeightSyncError", "DistBackendError", "DistNetworkError", "DistStoreError")
        if gloo or neighbour or type(error).__name__ in names:
            return re.sub(r"\[\S*/gloo/\S*\] ", "", str(error))
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return ""


def _join_lines(text: str) -> str:
    return " ".join(part.strip() for part in text.splitlines() if part.strip())


def _is_first_report(text: str) -> bool:
    """Whether no other rank has said it: they raise the same error for a mistake, and one line is enough."""
    ranks = sys.modules.get("megarl.parallel.ranks")
    if ranks is not None:
        first = ranks.is_first_report(text)
        if first is not None:
            return bool(first)
    local = os.environ.get("LOCAL_RANK", "0")
    return not local.isdigit() or int(local) == 0  # a mistake may be one node's own
