"""Stands between a machine's ranks and its SGLang servers: `python -m megarl.rollout.engine_host FD PARENT [preload]`.

Importing SGLang takes ten seconds of a core. With `preload` the host does it once and all processes of all engines are
forked from it; without, as a process that has used CUDA cannot be forked, each server is a program of its own.
`hosting.py` is the ranks' side.

For each connection the host forks a supervisor. A rank must not be a server's parent, because SGLang kills its parent's
whole process tree when a start fails; and a server must not outlive its rank, however that dies. So the supervisor
starts the server and ends it when the connection closes, which the kernel does for a rank that was killed, too. As
subreaper it inherits whatever the server leaves behind, so nothing escapes. The host ends, and all of them with it, at
SIGTERM, which the kernel sends when the process that started it dies.

A connection carries one line of JSON {"log": path, "environment": {...}, "settings": {...}} and, when the server has
ended, its exit status as a line.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import select
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from typing import IO, Any

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_LOOK_S = 0.5


def die_with_parent(parent: int, of: signal.Signals = signal.SIGKILL) -> None:
    """Have the kernel send this process a signal when its parent dies, or the parent's thread that started it.

    parent: its pid; if it is already gone, this process exits at once.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, of, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def _inherit_orphans() -> None:
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _children() -> list[int]:
    with open(f"/proc/self/task/{os.getpid()}/children") as listing:
        return [int(pid) for pid in listing.read().split()]


def _is_tracker(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as command:
            return b"resource_tracker" in command.read()
    except OSError:
        return False


def _reap() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _end_all(spared: Callable[[int], bool], grace: float) -> None:
    """Kill the children, and theirs as they arrive here, until none is left; the spared ones after `grace` seconds."""
    deadline = time.monotonic() + grace
    while children := _children():
        for pid in children:
            if time.monotonic() > deadline or not spared(pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        _reap()
        time.sleep(0.01)


def _fork(work: Callable[[], None]) -> int:
    """Pid of a child that does the work and exits, with status 1 if that raised; it never comes back here."""
    if pid := os.fork():
        return pid
    status = 1
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        work()
        status = 0
    except SystemExit as leaving:
        status = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except BaseException:  # noqa: B036  whatever it is, the child must not go on as its parent
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


class EngineHost:
    """listener: where ranks connect; its starter has bound it. preload: import SGLang here, for all engines."""

    def __init__(self, listener: socket.socket, preload: bool) -> None:
        self._listener = listener
        self._preload = preload
        self._pid = os.getpid()
        self._said = tempfile.TemporaryFile()  # noqa: SIM115  what the import prints belongs to each engine's log
        self._failed = False

    def run(self) -> None:
        """Serve until SIGTERM."""
        _inherit_orphans()
        if self._preload:
            self._import()
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # until here there was nothing to end
        try:
            while True:
                if select.select([self._listener], [], [], _LOOK_S)[0]:
                    connection, _ = self._listener.accept()
                    with connection:
                        _fork(lambda: self._supervise(connection))  # noqa: B023  the child uses it at once
                _reap()
        finally:
            for pid in _children():
                os.kill(pid, signal.SIGTERM)
            _end_all(lambda pid: True, grace=10.0)
            os._exit(0)  # taking SGLang's modules apart would take two seconds

    def _import(self) -> None:
        _print_to(self._said)
        try:
            from megarl.rollout import engine_server

            engine_server.load()
        except BaseException:  # noqa: B036  told to each rank that asks for an engine
            traceback.print_exc()
            self._failed = True
        sys.stdout.flush()
        sys.stderr.flush()
        gc.freeze()  # else each process would copy these pages when it collects garbage

    def _supervise(self, connection: socket.socket) -> None:
        self._listener.close()
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
        with connection.makefile("rb") as lines:
            order = json.loads(lines.readline())
        with open(order["log"], "ab") as log:
            self._said.seek(0)
            shutil.copyfileobj(self._said, log)
            _print_to(log)
        if self._failed:
            connection.sendall(b"1\n")
            return
        _inherit_orphans()
        scratch = tempfile.mkdtemp(prefix="engine-")  # SGLang leaves its sockets behind when it is killed
        os.environ.update(order["environment"], TMPDIR=scratch)
        tempfile.tempdir = None
        try:
            server = _fork(lambda: self._serve(connection, order["settings"], os.getppid()))
            while not (ended := os.waitpid(server, os.WNOHANG))[0]:
                closed, _, _ = select.select([connection], [], [], _LOOK_S)
                if closed or os.getppid() != self._pid:
                    return
            time.sleep(0.2)  # let its last lines reach the log
            connection.sendall(b"%d\n" % os.waitstatus_to_exitcode(ended[1]))
        finally:
            # Python's resource trackers end by themselves after the others, and only they remove the semaphores that
            # the others leave in shared memory.
            _end_all(_is_tracker, grace=5.0)
            shutil.rmtree(scratch, ignore_errors=True)

    def _serve(self, connection: socket.socket, settings: dict[str, Any], supervisor: int) -> None:
        connection.close()
        os.setsid()
        die_with_parent(supervisor)
        if self._preload:
            from megarl.rollout import engine_server

            engine_server.main(settings)
            return
        with tempfile.TemporaryFile() as text:  # not the command line, where others could read the API key
            text.write(json.dumps(settings).encode())
            text.seek(0)
            os.dup2(text.fileno(), 0)
        os.execv(sys.executable, [sys.executable, "-m", "megarl.rollout.engine_server"])


def _print_to(file: IO[bytes]) -> None:
    os.dup2(file.fileno(), 1)
    os.dup2(file.fileno(), 2)


if __name__ == "__main__":
    die_with_parent(int(sys.argv[2]), signal.SIGTERM)
    EngineHost(socket.socket(fileno=int(sys.argv[1])), preload="preload" in sys.argv[3:]).run()
