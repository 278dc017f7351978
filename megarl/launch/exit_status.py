"""Orderly exit of a run's processes: one line that gives the reason, and an exit status that `launch/README.md` lists.

A rank with a launcher reports to it, and the launcher prints the root cause. A rank without one prints its own line.
"""

from __future__ import annotations

import atexit
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
from megarl.processes import memory_files, node
from megarl.processes.children import die_with_parent

REQUEUE_EXIT_CODE, REPEATED_FAULT_EXIT_CODE = 85, 86
"""Exit statuses of a run that was asked to stop and saved, and of one that hit the same fault after a restart."""
LAUNCHER_ENV = "MEGARL_LAUNCHER"
"""Environment variable: the launcher's pid and the file for messages of its ranks."""
RESTART_COUNT_ENV = "MEGARL_RESTARTED"
"""Environment variable of restarted ranks: the number of restarts."""
TRACEBACK_NOTE_PREFIX = "the full traceback is in"
"""Prefix of the note on an exception whose traceback is in a file."""
SIGNAL_DEBOUNCE_S = 2.0
"""Seconds within which a repeated signal is the same request.

A signal to the whole process group, or to all processes of a Slurm job, is also forwarded and arrives twice.
"""

ExitKind = Literal["stopped", "ended", "mistake", "fault", "lost"]


class RunOutcome(NamedTuple):
    """The combined outcome of all ranks."""

    status: int
    text: str
    """The reason, empty on success."""
    kind: Literal["done", "stopped", "asked", "mistake", "fault", "killed", "lost", "late"]
    """killed: by an external signal. late: others have waited too long. asked: requested by the user."""
    rank: int = -1
    """The rank that caused the outcome, if known."""


class GracefulExit(SystemExit):
    """The run was asked to stop, and has saved."""

    def __init__(self, text: str) -> None:
        super().__init__(REQUEUE_EXIT_CODE)
        self.text = text

    def __str__(self) -> str:
        return self.text


class SignalExit(SystemExit):
    """A signal ends this process. A SystemExit, because asyncio re-raises only that and KeyboardInterrupt."""

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)
        self.number = number

    def __str__(self) -> str:
        return f"ended by {signal_name(self.number)}"


ORDERLY_EXITS = (GracefulExit, SignalExit, KeyboardInterrupt)
"""Exceptions that end a run without a fault."""


class _Signals:
    """Signal state of this process."""

    is_stop_requested = False  # stop at the end of the step
    is_ending = False
    last_signal_time = 0.0
    should_save_on_sigterm = False
    is_writing_checkpoint = False
    launcher: str | None = None


def catch_signals() -> None:
    """Install signal handlers: signals end this process in an orderly way; SIGUSR1 requests a stop after the step."""
    if threading.current_thread() is not threading.main_thread():
        return
    if launcher_address := os.environ.pop(LAUNCHER_ENV, ""):
        parent, _, _Signals.launcher = launcher_address.partition(":")
        if os.getppid() == int(parent):
            die_with_parent(int(parent))
        elif not os.path.exists(f"/proc/{parent}"):  # otherwise a script runs in between
            os._exit(1)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup, a background job
            signal.signal(number, _on_signal)
        # Python restores the default actions when it finalizes. A SIGTERM of torch's agent, which ends ranks that exit
        # after the first, would then kill a rank that has saved and reported.
        atexit.register(signal.signal, number, signal.SIG_IGN)
    signal.signal(signal.SIGUSR1, _on_signal)  # threads started earlier may receive it
    # Slurm sends SIGUSR1 to every process of a job and would kill those without a handler, such as torch's shared
    # memory manager. It is therefore blocked, which later child processes inherit, and polled as a pending signal.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP})


def save_on_sigterm() -> None:
    """From now on, handle the first SIGTERM at the end of the step."""
    _Signals.should_save_on_sigterm = True


@contextlib.contextmanager
def defer_sigterm() -> Iterator[None]:
    """Defer any number of SIGTERMs within the block, in which a checkpoint is written."""
    _Signals.is_writing_checkpoint = True
    try:
        yield
    finally:
        _Signals.is_writing_checkpoint = False


def is_stop_requested() -> bool:
    return _Signals.is_stop_requested or signal.SIGUSR1 in signal.sigpending()


def begin_exit() -> None:
    """Mark this process as exiting, so that signals do not disturb it."""
    _Signals.is_ending, _Signals.last_signal_time = True, time.monotonic()
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)  # tasks that end with the process


def _on_signal(number: int, frame: FrameType | None) -> None:
    if number == signal.SIGUSR1:
        _Signals.is_stop_requested = True
        return
    can_save = _Signals.should_save_on_sigterm and number != signal.SIGINT
    is_repeated = time.monotonic() - _Signals.last_signal_time < SIGNAL_DEBOUNCE_S
    if is_repeated and (_Signals.is_ending or (_Signals.is_stop_requested and can_save)):
        return
    _Signals.last_signal_time = time.monotonic()
    if can_save and (not _Signals.is_stop_requested or _Signals.is_writing_checkpoint):
        _Signals.is_stop_requested = True
    elif not _Signals.is_ending:
        begin_exit()
        raise SignalExit(number)
    elif _Signals.launcher is None:  # a launcher kills slow ranks itself
        os._exit(128 + number)


@contextlib.contextmanager
def exit_on_error() -> Iterator[None]:
    """Wrap a script's own flow: report an early end in one line and exit with the documented status."""
    status: list[int] = []
    atexit.register(_skip_native_teardown, status)
    try:
        catch_signals()
        yield
    except BaseException as error:  # noqa: B036  top level of the program
        status.append(report_error(error))
        sys.exit(status[0])


def run_and_exit(program: Callable[[], int]) -> NoReturn:
    """Run a program that reports its own errors, except for a signal before it gets that far; exit with its status."""
    status: list[int] = []
    atexit.register(_skip_native_teardown, status)
    try:
        catch_signals()
        status.append(program())
    except SignalExit as error:
        status.append(report_error(error))
    sys.exit(status[0])


def _skip_native_teardown(status: list[int]) -> None:
    """End the process with this exit status, if there is one, after the exit handlers that were registered later.

    Threads of torch's process groups can abort a process whose libraries are being torn down (exit status 134), which
    also takes a second. Handlers that were registered earlier do not run, except for that of `logging`.
    """
    if status:
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):  # closed, or the reader has gone
                stream.flush()
        os._exit(status[0])


def report_error(error: BaseException) -> int:
    """Report why this process ends, to the launcher or on stderr, and return its exit status."""
    begin_exit()  # torch's agent sends a signal to ranks that end after the first
    kind, status, text = classify_error(error)
    if notify_launcher(kind, text[-8000:]):
        return status
    if kind in ("lost", "fault") or _is_first_report(text):
        print(text, file=sys.stderr, flush=True)
    return status


def notify_launcher(kind: str, text: str, rank: int | None = None) -> bool:
    """Send the launcher a message about this rank or another; return False if there is no launcher to receive it."""
    if _Signals.launcher is None:
        return False
    message = {"rank": int(os.environ.get("RANK", "0")) if rank is None else rank, "kind": kind, "text": text}
    try:
        # Starts with a newline, because a rank that was killed while writing may have left half a line.
        memory_files.append(_Signals.launcher, b"\n" + json.dumps(message).encode() + b"\n")
        return True
    except OSError:  # the launcher has exited
        return False


def register_run(**rules: Any) -> None:
    """Send the launcher what restarts of this run depend on, see `RestartPolicy`. On the first rank of each node."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        notify_launcher("run", json.dumps(rules))


def get_restart_count() -> int:
    """Return how often a launcher has restarted this run."""
    return int(os.environ.get(RESTART_COUNT_ENV, "0"))


def classify_error(error: BaseException) -> tuple[ExitKind, int, str]:
    """Return kind, exit status and line of an error. A fault without a log has its traceback above the line."""
    if isinstance(error, GracefulExit):
        return "stopped", REQUEUE_EXIT_CODE, error.text
    if isinstance(error, (SignalExit, KeyboardInterrupt)):
        number = error.number if isinstance(error, SignalExit) else signal.SIGINT
        return "ended", 128 + number, f"ended by {signal_name(number)}"
    subject = f"rank {os.environ.get('RANK', '0')}" if os.environ.get("WORLD_SIZE", "1") != "1" else "the run"
    if os.environ.get("GROUP_WORLD_SIZE", "1") != "1":
        subject += f" on node {node.get_name()}"
    traceback_notes = [note for note in getattr(error, "__notes__", ()) if note.startswith(TRACEBACK_NOTE_PREFIX)]
    suffix = "".join(f"; {note}" for note in traceback_notes[:1])
    if lost := _lost_peer(error):
        users = ""
        with contextlib.suppress(OSError, ValueError):
            # Another user who is connected to the job's ports may have taken a rank's place.
            if names := ", ".join(map(str, node.list_connected_users())):
                users = f"; user {names} of this machine is connected to its ports (SECURITY.md, What is not closed)"
        return "lost", 1, _join_lines(f"error: {subject} lost another rank: {lost}{users}{suffix}")
    if isinstance(error, ConfigError):
        return "mistake", 2, _join_lines(f"error: {error}")
    if missing := missing_package_hint(error):
        return "mistake", 2, _join_lines(f"error: {missing}")
    frames = traceback.extract_tb(error.__traceback__)
    location = f" ({frames[-1].filename}, line {frames[-1].lineno}, in {frames[-1].name})" if frames else ""
    line = _join_lines(f"error: {subject} failed: {type(error).__name__}: {error}{location}{suffix}")
    return "fault", 1, line if suffix else "".join(traceback.format_exception(error)) + line


def signal_name(number: int) -> str:
    if number == signal.SIGINT:
        return "Ctrl-C (SIGINT)"
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _lost_peer(error: BaseException | None) -> str:
    """Return what torch.distributed or a neighbor reports about a lost rank, if that caused the error; else empty."""
    while error is not None:
        is_gloo_error = isinstance(error, RuntimeError) and ("gloo/" in str(error) or "Gloo " in str(error))
        is_neighbor_error = isinstance(error, ConnectionError) and re.match(r"rank \d+ disconnected: ", str(error))
        names = ("WeightSyncError", "DistBackendError", "DistNetworkError", "DistStoreError")
        if is_gloo_error or is_neighbor_error or type(error).__name__ in names:
            return re.sub(r"\[\S*/gloo/\S*\] ", "", str(error))
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return ""


def _join_lines(text: str) -> str:
    return " ".join(part.strip() for part in text.splitlines() if part.strip())


def _is_first_report(text: str) -> bool:
    """Return whether no other rank has reported this text: for a mistake all ranks raise the same error."""
    ranks = sys.modules.get("megarl.parallel.ranks")
    is_first = None if ranks is None else ranks.is_first_report(text)
    if is_first is not None:
        return bool(is_first)
    local = os.environ.get("LOCAL_RANK", "0")
    return not local.isdigit() or int(local) == 0  # a mistake may affect one node only
