"""Stands between a machine's ranks and its SGLang servers.

    python -m megarl.engine.engine_host FD PARENT FOLDER [preload]

Importing SGLang takes ten seconds of a core. With `preload` the host does it once and all processes of all engines are
forked from it; without, as a process that has used CUDA cannot be forked, each server is a program of its own.
`engine_host_client.py` is the ranks' side.

For each connection the host forks a supervisor. A rank must not be a server's parent, because SGLang kills its parent's
whole process tree when a start fails; and a server must not outlive its rank, however that dies. So the supervisor
starts the server and ends it when the connection closes, which the kernel does for a rank that was killed, too. As
subreaper it inherits whatever the server leaves behind, so nothing escapes. The host ends, and all of them with it, at
SIGTERM, which the kernel sends when the process that started it dies.

Each supervisor has a folder for what its engine leaves lying about, named by its pid, in the host's. It is removed with
what SGLang has put in shared memory besides, by the supervisor, or by the host where that was killed. The host's folder
is removed by the process that started it, or, where that is gone, by the last of these to end. A host that was killed
is started again with the same folder and the same socket.

A connection carries one line of JSON {"log": path, "environment": {...}, "settings": {...}} and, when the server has
ended, its exit status as a line.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
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
from pathlib import Path
from typing import IO, Any

from megarl.processes.children import die_with_parent, inherit_orphans, is_tracker

_POLL_S = 0.5


def _children() -> list[int]:
    with open(f"/proc/self/task/{os.getpid()}/children") as listing:
        return [int(pid) for pid in listing.read().split()]


def _reap() -> bool:
    """Whether there was a child that had ended."""
    found = False
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            found = True
    return found


def _kill_children(spared: Callable[[int], bool], grace: float) -> None:
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


def _instance_id(folder: Path) -> str:
    """By what SGLang shall call the engine with this folder."""
    return hashlib.blake2s(bytes(folder), digest_size=6).hexdigest()


def _remove_engine_files(folder: Path) -> None:
    """Remove what an engine whose processes are gone has left: its folder, and the file in shared memory by which they
    tell each other their load. SGLang never removes it; its name is as in `sglang.srt.managers.load_snapshot`."""
    name = _instance_id(folder)
    digest = hashlib.blake2s(name.encode(), digest_size=4).hexdigest()
    Path(f"/dev/shm/sglang_loads_{name}_{digest}.shm").unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def remove_host_folder(path: str) -> None:
    """Remove the folder of a host, and what its engines have left."""
    with contextlib.suppress(OSError):
        for folder in Path(path).iterdir():
            if folder.is_dir():
                _remove_engine_files(folder)
    shutil.rmtree(path, ignore_errors=True)


class EngineHost:
    """listener: where ranks connect; its starter has bound it. folder: its own, with the listener's socket in it.
    preload: import SGLang here, for all engines. starter: handle (pidfd) of the process that has started it."""

    def __init__(self, listener: socket.socket, folder: Path, preload: bool, starter: int) -> None:
        self._listener = listener
        self._folder = folder
        self._preload = preload
        self._starter = starter
        self._pid = os.getpid()
        self._import_log = tempfile.TemporaryFile()  # noqa: SIM115  what the import prints belongs to each engine's log
        self._has_import_failed = False

    def run(self) -> None:
        """Serve until SIGTERM."""
        inherit_orphans()
        self._remove_dead_folders()  # of a host before this one
        if self._preload:
            self._import_sglang()
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # until here there was nothing to end but this
        try:
            while True:
                if select.select([self._listener], [], [], _POLL_S)[0]:
                    connection, _ = self._listener.accept()
                    with connection:
                        _fork(lambda: self._supervise(connection))  # noqa: B023  the child uses it at once
                if _reap():
                    self._remove_dead_folders()
        finally:
            for pid in _children():
                os.kill(pid, signal.SIGTERM)
            _kill_children(lambda pid: True, grace=10.0)
            self._clean_up()
            os._exit(0)  # taking SGLang's modules apart would take two seconds

    def _remove_dead_folders(self) -> None:
        """A supervisor that was killed has left its folder."""
        with contextlib.suppress(OSError):
            for folder in self._folder.iterdir():
                if folder.is_dir() and not Path(f"/proc/{folder.name}").exists():
                    _remove_engine_files(folder)

    def _clean_up(self) -> None:
        """Remove what nobody needs any more: of the host's folder all, where whoever has started it is gone."""
        self._remove_dead_folders()
        with contextlib.suppress(OSError):
            if _has_ended(self._starter) and not any(path.is_dir() for path in self._folder.iterdir()):
                shutil.rmtree(self._folder, ignore_errors=True)

    def _import_sglang(self) -> None:
        _print_to(self._import_log)
        try:
            from megarl.engine import engine_server

            engine_server.import_sglang()
        except BaseException:  # noqa: B036  told to each rank that asks for an engine
            traceback.print_exc()
            self._has_import_failed = True
        sys.stdout.flush()
        sys.stderr.flush()
        gc.freeze()  # else each process would copy these pages when it collects garbage

    def _supervise(self, connection: socket.socket) -> None:
        self._listener.close()
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
        with connection.makefile("rb") as lines:
            order = json.loads(lines.readline())
        with open(order["log"], "ab") as log:
            self._import_log.seek(0)
            shutil.copyfileobj(self._import_log, log)
            _print_to(log)
        if self._has_import_failed:
            connection.sendall(b"1\n")
            return
        inherit_orphans()
        scratch = self._folder / str(os.getpid())
        scratch.mkdir(mode=0o700)
        os.environ.update(order["environment"], TMPDIR=str(scratch))
        tempfile.tempdir = None
        settings = {**order["settings"], "instance": _instance_id(scratch)}
        try:
            server = _fork(lambda: self._serve(connection, settings, os.getppid()))
            while not (ended := os.waitpid(server, os.WNOHANG))[0]:
                closed, _, _ = select.select([connection], [], [], _POLL_S)
                if closed or os.getppid() != self._pid:
                    return
            time.sleep(0.2)  # let its last lines reach the log
            connection.sendall(b"%d\n" % os.waitstatus_to_exitcode(ended[1]))
        finally:
            _kill_children(is_tracker, grace=5.0)
            _remove_engine_files(scratch)
            if os.getppid() != self._pid:
                self._clean_up()

    def _serve(self, connection: socket.socket, settings: dict[str, Any], supervisor: int) -> None:
        connection.close()
        os.setsid()
        die_with_parent(supervisor)
        if self._preload:
            from megarl.engine import engine_server

            engine_server.main(settings)
            return
        with tempfile.TemporaryFile() as text:  # not the command line, where others could read the API key
            text.write(json.dumps(settings).encode())
            text.seek(0)
            os.dup2(text.fileno(), 0)
        os.execv(sys.executable, [sys.executable, "-m", "megarl.engine.engine_server"])


def _print_to(file: IO[bytes]) -> None:
    os.dup2(file.fileno(), 1)
    os.dup2(file.fileno(), 2)


def _has_ended(process: int) -> bool:
    """By its handle (pidfd)."""
    return bool(select.select([process], [], [], 0)[0])


def _exit_early(folder: str, starter: int) -> None:
    if _has_ended(starter):
        shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)


def _main(listener: int, parent: int, folder: str, preload: bool) -> None:
    starter = os.pidfd_open(os.getppid())
    if os.getppid() != parent:  # it was killed before this one had begun
        shutil.rmtree(folder, ignore_errors=True)
        return
    signal.signal(signal.SIGTERM, lambda *_: _exit_early(folder, starter))
    die_with_parent(parent, signal.SIGTERM)
    EngineHost(socket.socket(fileno=listener), Path(folder), preload, starter).run()


if __name__ == "__main__":
    _main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], preload="preload" in sys.argv[4:])
