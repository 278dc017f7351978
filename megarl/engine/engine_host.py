"""Host process between a machine's ranks and its engines' servers.

    python -m megarl.engine.engine_host FD PARENT FOLDER [MODULE]

A server is a module: `preload()` imports what its processes need, and `main(settings)` runs it until it ends. Importing
SGLang takes ten seconds of a core. The host preloads MODULE once and forks all processes of its engines. Without
MODULE, because a process that has used CUDA cannot be forked, each server is a program of its own, which gets its
settings as JSON on stdin.

The host forks a supervisor for each connection of a rank, which carries one line of JSON {"server": module, "log":
path, "python": interpreter, "environment": {...}, "settings": {...}} and, when the server has ended, its exit status as
a line. The supervisor starts the server and ends it when the connection closes; for a killed rank the kernel closes it.
A rank must not be a server's parent, because SGLang kills its parent's whole process tree when a start fails. As
subreaper the supervisor inherits whatever the server leaves behind. The host ends, with all supervisors, at SIGTERM,
which the kernel sends when its starter dies.

Each supervisor has a scratch folder, named by its pid, within the host's folder, which the server finds in its settings
as "folder". The supervisor removes it together with the files that the server has listed in `LEFTOVERS`; if the
supervisor was killed, the host does. The host's starter removes the host's folder; if it is gone, the last of these
processes to end does. A host that was killed is started again with the same folder and socket.
"""

from __future__ import annotations

import contextlib
import gc
import glob
import importlib
import json
import os
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import IO, Any

from megarl.config import Config
from megarl.processes.children import die_with_parent, inherit_orphans, is_stopped, is_tracker, list_children
from megarl.processes.temp_folders import TempFolder

HOST_VARIABLE = "MEGARL_ENGINE_HOST"
"""Environment variable with the socket of a host that another process has started for all engines of this machine."""
LEFTOVERS = "leftovers"
"""File in a server's folder with the paths, or glob patterns, one per line, of files elsewhere that the server does not
remove itself."""
_TORCHRUN_VARIABLES = re.compile(
    r"TORCHELASTIC_|(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)$|LOCAL_WORLD_SIZE|ROLE_|MASTER_(ADDR|PORT)"
)
_SECRET = re.compile(r"(^|_)(TOKEN|KEY|SECRET|PASSWORD|PASSWD|CREDENTIAL|WEBHOOK)S?($|_)", re.I)
"""Variables to withhold from the engine: it has its own API key, and loads its model from a folder."""
_SELF_SUSPENDED_S = 10.0
"""A longer gap between two polls means that this process was itself stopped, and the host with it."""
_RESUME_AFTER_S = 10.0
"""A host that is stopped for this long is continued."""
_MIN_UPTIME_S, _MAX_EARLY_EXITS = 60.0, 3
"""A host that ends within `_MIN_UPTIME_S` more than `_MAX_EARLY_EXITS` times in a row is not restarted."""
_POLL_S, _SUPERVISION_POLL_S = 0.5, 0.2


def _reap() -> bool:
    """Reap ended children; return whether there were any."""
    has_reaped = False
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            has_reaped = True
    return has_reaped


def _kill_children(is_spared: Callable[[int], bool], grace: float) -> None:
    """Kill the children, and adopted orphans, until none is left; those that `is_spared` only after `grace` seconds."""
    deadline = time.monotonic() + grace
    while children := list_children():
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


def _remove_engine_files(folder: Path) -> None:
    """Remove a dead engine's folder, and the files that its server has listed in `LEFTOVERS`."""
    leftovers = []
    with contextlib.suppress(OSError):
        leftovers = os.fsdecode((folder / LEFTOVERS).read_bytes()).splitlines()
    for path in (path for pattern in leftovers for path in glob.glob(pattern)):
        with contextlib.suppress(OSError):
            Path(path).unlink()
    shutil.rmtree(folder, ignore_errors=True)


def remove_host_folder(path: str) -> None:
    """Remove the folder of a host, and what its engines have left."""
    _remove_engine_folders(Path(path))
    shutil.rmtree(path, ignore_errors=True)


def _remove_engine_folders(host_folder: Path, is_dead: Callable[[Path], bool] = lambda folder: True) -> None:
    with contextlib.suppress(OSError):
        for folder in host_folder.iterdir():
            if folder.is_dir() and is_dead(folder):
                _remove_engine_files(folder)


class EngineHost:
    """Accepts connections of ranks, and forks a supervisor for each.

    listener: socket in the host's `folder` where ranks connect. preloaded: module of a server to preload, or empty.
    starter: pidfd of the process that started the host.
    """

    def __init__(self, listener: socket.socket, folder: Path, preloaded: str, starter: int) -> None:
        self._listener, self._folder = listener, folder
        self._preloaded, self._starter = preloaded, starter
        self._pid = os.getpid()
        self._import_log = tempfile.TemporaryFile()  # noqa: SIM115  output of the import, copied to each engine's log
        self._has_import_failed = False

    def run(self) -> None:
        """Serve until SIGTERM."""
        inherit_orphans()
        self._remove_dead_folders()  # left by a previous host
        if self._preloaded:
            self._preload()
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
            for pid in list_children():
                os.kill(pid, signal.SIGTERM)
            _kill_children(lambda pid: True, grace=10.0)
            self._clean_up()
            os._exit(0)  # tearing down preloaded modules would take two seconds

    def _remove_dead_folders(self) -> None:
        """Remove the folders of supervisors that were killed."""
        _remove_engine_folders(self._folder, lambda folder: not Path(f"/proc/{folder.name}").exists())

    def _clean_up(self) -> None:
        """Remove dead supervisors' folders, and the host's if its starter is gone and no supervisor uses it."""
        self._remove_dead_folders()
        with contextlib.suppress(OSError):
            if _has_ended(self._starter) and not any(path.is_dir() for path in self._folder.iterdir()):
                shutil.rmtree(self._folder, ignore_errors=True)

    def _preload(self) -> None:
        _print_to(self._import_log)
        try:
            importlib.import_module(self._preloaded).preload()
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
        is_preloaded = request["server"] == self._preloaded
        with open(request["log"], "ab") as log:
            if is_preloaded:
                self._import_log.seek(0)
                shutil.copyfileobj(self._import_log, log)
            _print_to(log)
        if is_preloaded and self._has_import_failed:
            connection.sendall(b"1\n")
            return
        inherit_orphans()
        scratch = self._folder / str(os.getpid())
        scratch.mkdir(mode=0o700)
        os.environ.update(request["environment"], TMPDIR=str(scratch))
        tempfile.tempdir = None
        settings = {**request["settings"], "folder": str(scratch)}
        try:
            server = _fork(lambda: self._serve(connection, request, settings, os.getppid()))
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

    def _serve(
        self, connection: socket.socket, request: Mapping[str, Any], settings: dict[str, Any], supervisor: int
    ) -> None:
        module, python = request["server"], request["python"]
        connection.close()
        os.setsid()
        die_with_parent(supervisor)
        if module == self._preloaded:
            importlib.import_module(module).main(settings)
            return
        with tempfile.TemporaryFile() as settings_file:  # for stdin: a command line would show the API key to others
            settings_file.write(json.dumps(settings).encode())
            settings_file.seek(0)
            os.dup2(settings_file.fileno(), 0)
        os.execv(python, [python, "-m", module])


def _print_to(file: IO[bytes]) -> None:
    os.dup2(file.fileno(), 1)
    os.dup2(file.fileno(), 2)


def _has_ended(pidfd: int) -> bool:
    """Return whether the process of this pidfd has ended."""
    return bool(select.select([pidfd], [], [], 0)[0])


def _main(listener: int, parent: int, folder: str, preloaded: str) -> None:
    starter = os.pidfd_open(os.getppid())
    if os.getppid() != parent:  # the parent was killed before this process began
        shutil.rmtree(folder, ignore_errors=True)
        return

    def exit_early(*_: object) -> None:
        if _has_ended(starter):
            shutil.rmtree(folder, ignore_errors=True)
        os._exit(0)

    signal.signal(signal.SIGTERM, exit_early)
    die_with_parent(parent, signal.SIGTERM)
    EngineHost(socket.socket(fileno=listener), Path(folder), preloaded, starter).run()


def secret_variables(config: Config) -> set[str]:
    """Return the names of the variables that hold secrets according to the configuration."""
    options = [role.get("options") for role in config.roles.values() if isinstance(role, Mapping)]
    names = {str(option["auth_env"]) for option in options if isinstance(option, Mapping) and option.get("auth_env")}
    webhook = config.track.webhook
    return names | ({webhook.removeprefix("env:")} if webhook.startswith("env:") else set())


class HostProcess:
    """A host that this process started, and that ends with it.

    environment: added to this process's environment. Removed from that are torchrun's variables, since the engine's
    ranks would wait for torchrun's store, and whatever looks like a secret or is named in `hidden`. preloaded: module
    of a server, which the host preloads and forks its engines from; empty for none. python: the host's interpreter.

    A thread supervises the host. If it ends, which ends its engines too, it is restarted on the same socket, where new
    connections wait for it meanwhile. If it is stopped (SIGSTOP), it is continued. A host that keeps ending is given
    up, and its socket is closed.

    Raises OSError if the interpreter cannot be started.
    """

    def __init__(
        self,
        environment: Mapping[str, str],
        preloaded: str = "",
        hidden: Collection[str] = (),
        python: str = sys.executable,
    ) -> None:
        self._folder = TempFolder("megarl-engines-", remove_host_folder)
        self.path = str(Path(self._folder.path, "socket"))
        inherited = {
            name: value
            for name, value in os.environ.items()
            if not (_TORCHRUN_VARIABLES.match(name) or _SECRET.search(name) or name in hidden)
        }
        self._environment = {**inherited, **environment}
        self._preloaded, self._python = preloaded, python
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(self.path)
        self._listener.listen()
        self._closing = threading.Event()
        self.process: subprocess.Popen[bytes]
        """The current host."""
        started = Future[None]()
        self._thread = threading.Thread(target=self._run, args=(started,), name="engine host", daemon=True)
        self._thread.start()
        started.result()

    def close(self) -> None:
        """End the host and all of its engines."""
        self._closing.set()
        self._thread.join()
        self._listener.close()
        self._folder.close()

    # --- run in the supervising thread; the host dies with the thread that started it

    def _run(self, started: Future[None]) -> None:
        try:
            self._start()
        except BaseException as error:  # noqa: B036  re-raised by the constructor
            self._listener.close()
            self._folder.close()
            started.set_exception(error)
            return
        started.set_result(None)
        started_at = last_poll = time.monotonic()
        stopped_since, early_exits = float("inf"), 0
        while not self._closing.wait(_SUPERVISION_POLL_S):
            now = time.monotonic()
            if not is_stopped(self.process.pid) or now - last_poll > _SELF_SUSPENDED_S:
                stopped_since = float("inf")
            last_poll = now
            if self.process.poll() is None:
                if is_stopped(self.process.pid):
                    stopped_since = min(stopped_since, now)
                    if now - stopped_since > _RESUME_AFTER_S:
                        _warn("was stopped (SIGSTOP) and was sent SIGCONT")
                        self.process.send_signal(signal.SIGCONT)
                continue
            early_exits = early_exits + 1 if now - started_at < _MIN_UPTIME_S else 1
            if early_exits > _MAX_EARLY_EXITS:
                _warn(f"ended {early_exits} times within {_MIN_UPTIME_S:g} s each, and is not restarted")
                self._listener.close()
                os.unlink(self.path)
                break
            code = self.process.returncode
            reason = f"exit status {code}" if code >= 0 else signal.Signals(-code).name
            _warn(f"ended ({reason}) and is restarted")
            started_at = now
            with contextlib.suppress(OSError):  # the next poll finds it ended again
                self._start()
        self._closing.wait()
        self.process.terminate()
        self.process.send_signal(signal.SIGCONT)  # a stopped process would not receive SIGTERM
        try:
            self.process.wait(timeout=15)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def _start(self) -> None:
        self.process = subprocess.Popen(
            [
                *(self._python, "-m", "megarl.engine.engine_host"),
                *(str(self._listener.fileno()), str(os.getpid()), self._folder.path),
                self._preloaded,
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=[self._listener.fileno(), self._folder.lock],
            env=self._environment,
            start_new_session=True,  # Ctrl-C reaches only this process, which then ends the host
        )


def _warn(text: str) -> None:
    print(f"the engine host process {text}", file=sys.stderr, flush=True)


class HostedServer:
    """A server run by a host. It ends when this object's connection to the host closes.

    path: the host's socket. module: the server. log: file for its output. environment: added to the host's. settings:
    of the server's `main`. python: interpreter of a server that the host has not preloaded.
    """

    def __init__(
        self,
        path: str,
        module: str,
        log: Path,
        environment: Mapping[str, str],
        settings: Mapping[str, Any],
        python: str = sys.executable,
    ) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._status: int | None = None
        self.is_abandoned = False
        """True if it ended without an exit status, because its supervisor or host was killed."""
        self._poll_lock = threading.Lock()  # the exit status can be read only once
        files = {"server": module, "log": str(log.resolve()), "python": python}
        request = {**files, "environment": dict(environment), "settings": dict(settings)}
        self._socket.connect(path)
        self._socket.sendall(json.dumps(request).encode() + b"\n")

    def poll(self, timeout: float = 0.0) -> int | None:
        """Return None while it runs or is about to, else its exit status; -9 if nobody was left to report it."""
        with self._poll_lock:
            if self._status is None and select.select([self._socket], [], [], timeout)[0]:
                try:
                    line = self._socket.recv(64)
                except ConnectionError:
                    line = b""
                self._status, self.is_abandoned = (int(line), False) if line else (-9, True)
            return self._status

    def close(self) -> None:
        """End it, and return when all of its processes are gone, or after 15 seconds."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)
        self.poll(timeout=15.0)
        self._socket.close()


if __name__ == "__main__":
    _main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4])
