"""Host process between a machine's ranks and its SGLang servers.

    python -m megarl.engine.engine_host FD PARENT FOLDER [preload]

Importing SGLang takes ten seconds of a core. With `preload` the host imports it once and all processes of all engines
are forked from the host. Without, because a process that has used CUDA cannot be forked, each server is a program of
its own. `engine_host_client.py` is the ranks' side.

The host forks a supervisor for each connection. A rank must not be a server's parent, because SGLang kills its parent's
whole process tree when a start fails; and a server must not outlive its rank, however the rank dies. So the supervisor
starts the server and ends it when the connection closes; for a killed rank the kernel closes it. As subreaper the
supervisor inherits whatever the server leaves behind, so no process escapes. The host ends, with all supervisors, at
SIGTERM, which the kernel sends when the process that started it dies.

Each supervisor has a scratch folder for its engine, named by its pid, within the host's folder. The supervisor removes
it together with what SGLang has left in shared memory; if the supervisor was killed, the host does. The process that
started the host removes the host's folder; if that is gone, the last of these processes to end does. A host that was
killed is started again with the same folder and socket.

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
    """Reap ended children; return whether there were any."""
    has_reaped = False
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            has_reaped = True
    return has_reaped


def _kill_children(is_spared: Callable[[int], bool], grace: float) -> None:
    """Kill the children, and their orphans as these are reparented, until none is left; spare the `is_spared` for
    `grace` seconds."""
    deadline = time.monotonic() + grace
    while children := _children():
        for pid in children:
            if time.monotonic() > deadline or not is_spared(pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        _reap()
        time.sleep(0.01)


def _fork(target: Callable[[], None]) -> int:
    """Fork a child that runs `target` and exits, with status 1 if it raised; return the child's pid."""
    if pid := os.fork():
        return pid
    status = 1
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        target()
        status = 0
    except SystemExit as exit_request:
        status = exit_request.code if isinstance(exit_request.code, int) else int(exit_request.code is not None)
    except BaseException:  # noqa: B036  the child must never continue as its parent
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def _instance_id(folder: Path) -> str:
    """Return SGLang's instance id for the engine with this folder."""
    return hashlib.blake2s(bytes(folder), digest_size=6).hexdigest()


def _remove_engine_files(folder: Path) -> None:
    """Remove what a dead engine has left: its folder, and the shared-memory file by which its processes report their
    load.

    SGLang never removes that file; its name is as in `sglang.srt.managers.load_snapshot`.
    """
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
    """Accepts connections of ranks, and forks a supervisor for each.

    listener: socket where ranks connect, bound by the process that started the host. folder: the host's folder, which
    contains the listener's socket. preload: import SGLang here, for all engines. starter: pidfd of the process that
    started the host.
    """

    def __init__(self, listener: socket.socket, folder: Path, preload: bool, starter: int) -> None:
        self._listener = listener
        self._folder = folder
        self._preload = preload
        self._starter = starter
        self._pid = os.getpid()
        self._import_log = tempfile.TemporaryFile()  # noqa: SIM115  output of the import, copied to each engine's log
        self._has_import_failed = False

    def run(self) -> None:
        """Serve until SIGTERM."""
        inherit_orphans()
        self._remove_dead_folders()  # left by a previous host
        if self._preload:
            self._import_sglang()
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # before, there were no children to end
        try:
            while True:
                if select.select([self._listener], [], [], _POLL_S)[0]:
                    connection, _ = self._listener.accept()
                    with connection:
                        _fork(lambda: self._supervise(connection))  # noqa: B023  the child uses it immediately
                if _reap():
                    self._remove_dead_folders()
        finally:
            for pid in _children():
                os.kill(pid, signal.SIGTERM)
            _kill_children(lambda pid: True, grace=10.0)
            self._clean_up()
            os._exit(0)  # tearing down SGLang's modules would take two seconds

    def _remove_dead_folders(self) -> None:
        """Remove the folders of supervisors that were killed."""
        with contextlib.suppress(OSError):
            for folder in self._folder.iterdir():
                if folder.is_dir() and not Path(f"/proc/{folder.name}").exists():
                    _remove_engine_files(folder)

    def _clean_up(self) -> None:
        """Remove the folders of dead supervisors; also the host's own if its starter is gone and no supervisor uses
        it."""
        self._remove_dead_folders()
        with contextlib.suppress(OSError):
            if _has_ended(self._starter) and not any(path.is_dir() for path in self._folder.iterdir()):
                shutil.rmtree(self._folder, ignore_errors=True)

    def _import_sglang(self) -> None:
        _print_to(self._import_log)
        try:
            from megarl.engine import engine_server

            engine_server.import_sglang()
        except BaseException:  # noqa: B036  reported to each rank that asks for an engine
            traceback.print_exc()
            self._has_import_failed = True
        sys.stdout.flush()
        sys.stderr.flush()
        gc.freeze()  # otherwise garbage collection would copy these pages in each process

    def _supervise(self, connection: socket.socket) -> None:
        self._listener.close()
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
        with connection.makefile("rb") as lines:
            request = json.loads(lines.readline())
        with open(request["log"], "ab") as log:
            self._import_log.seek(0)
            shutil.copyfileobj(self._import_log, log)
            _print_to(log)
        if self._has_import_failed:
            connection.sendall(b"1\n")
            return
        inherit_orphans()
        scratch = self._folder / str(os.getpid())
        scratch.mkdir(mode=0o700)
        os.environ.update(request["environment"], TMPDIR=str(scratch))
        tempfile.tempdir = None
        settings = {**request["settings"], "instance": _instance_id(scratch)}
        try:
            server = _fork(lambda: self._serve(connection, settings, os.getppid()))
            while not (wait_result := os.waitpid(server, os.WNOHANG))[0]:
                closed, _, _ = select.select([connection], [], [], _POLL_S)
                if closed or os.getppid() != self._pid:
                    return
            time.sleep(0.2)  # let the server's last lines reach the log
            connection.sendall(b"%d\n" % os.waitstatus_to_exitcode(wait_result[1]))
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
        with (
            tempfile.TemporaryFile() as settings_file
        ):  # on stdin: other users could read the API key from a command line
            settings_file.write(json.dumps(settings).encode())
            settings_file.seek(0)
            os.dup2(settings_file.fileno(), 0)
        os.execv(sys.executable, [sys.executable, "-m", "megarl.engine.engine_server"])


def _print_to(file: IO[bytes]) -> None:
    os.dup2(file.fileno(), 1)
    os.dup2(file.fileno(), 2)


def _has_ended(pidfd: int) -> bool:
    """Return whether the process of this pidfd has ended."""
    return bool(select.select([pidfd], [], [], 0)[0])


def _exit_early(folder: str, starter: int) -> None:
    if _has_ended(starter):
        shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)


def _main(listener: int, parent: int, folder: str, preload: bool) -> None:
    starter = os.pidfd_open(os.getppid())
    if os.getppid() != parent:  # the parent was killed before this process began
        shutil.rmtree(folder, ignore_errors=True)
        return
    signal.signal(signal.SIGTERM, lambda *_: _exit_early(folder, starter))
    die_with_parent(parent, signal.SIGTERM)
    EngineHost(socket.socket(fileno=listener), Path(folder), preload, starter).run()


if __name__ == "__main__":
    _main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], preload="preload" in sys.argv[4:])
