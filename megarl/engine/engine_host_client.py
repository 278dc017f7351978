"""A rank's view of the process that its engines come from, see `engine_host.py`."""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from megarl.config import Config
from megarl.engine import engine_host
from megarl.processes.children import is_stopped
from megarl.processes.temp_folders import TempFolder

HOST_VARIABLE = "MEGARL_ENGINE_HOST"
"""Environment variable with the socket of a host that another process has started for all engines of this machine."""
_TORCHRUN_VARIABLES = re.compile(
    r"TORCHELASTIC_|(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)$|LOCAL_WORLD_SIZE|ROLE_|MASTER_(ADDR|PORT)"
)
_SECRET = re.compile(r"(^|_)(TOKEN|KEY|SECRET|PASSWORD|PASSWD|CREDENTIAL|WEBHOOK)S?($|_)", re.I)
"""Names of what an engine has no use for: it has a key of its own, and its model lies in a folder."""
_POLL_S = 0.2
_SELF_SUSPENDED_S = 10.0
"""Between two looks: this process was stopped itself, and the host with it."""
_RESUME_AFTER_S = 10.0
"""After so long a host that is stopped is continued."""
_MIN_UPTIME_S, _MAX_EARLY_EXITS = 60.0, 3
"""A host that ends before so many seconds, so often in a row, is not started again."""


def secret_variables(config: Config) -> set[str]:
    """Names of the variables in which a configuration says that there are secrets."""
    options = [role.get("options") for role in config.roles.values() if isinstance(role, Mapping)]
    found = {str(given["auth_env"]) for given in options if isinstance(given, Mapping) and given.get("auth_env")}
    hook = config.track.webhook
    return found | ({hook.removeprefix("env:")} if hook.startswith("env:") else set())


class HostProcess:
    """A host that this process started and that ends with it. preload: have it import SGLang, and fork engines from it.

    environment: is added to this process's, without what torchrun has put there, with whose variables the engine's
    ranks would wait for a store that torchrun keeps, and without what looks like a secret or is `hidden`, by its name.

    A thread looks after it. A host that has ended, which has ended its engines too, is started again at the same
    socket, where what has connected meanwhile waits for it; one that is stopped (SIGSTOP) is continued. Where it ends
    time and again nobody listens there any more.
    """

    def __init__(self, environment: Mapping[str, str], preload: bool, hidden: Collection[str] = ()) -> None:
        self._folder = TempFolder("megarl-engines-", engine_host.remove_host_folder)
        self.path = str(Path(self._folder.path, "socket"))
        inherited = {
            name: value
            for name, value in os.environ.items()
            if not (_TORCHRUN_VARIABLES.match(name) or _SECRET.search(name) or name in hidden)
        }
        self._environment = {**inherited, **environment}
        self._preload = preload
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(self.path)
        self._listener.listen()
        self._closing = threading.Event()
        self.process: subprocess.Popen[bytes]
        """The host that there is now."""
        started = Future[None]()
        self._thread = threading.Thread(target=self._run, args=(started,), name="engine host", daemon=True)
        self._thread.start()
        started.result()

    def close(self) -> None:
        """End it and all of its engines."""
        self._closing.set()
        self._thread.join()
        self._listener.close()
        self._folder.close()

    # --- in the thread, whose end would be the host's as well

    def _run(self, started: Future[None]) -> None:
        try:
            self._start()
        except BaseException as error:  # noqa: B036  raised where a host is asked for
            started.set_exception(error)
            return
        started.set_result(None)
        began = looked = time.monotonic()
        stopped_since, ended = float("inf"), 0
        while not self._closing.wait(_POLL_S):
            now = time.monotonic()
            if not is_stopped(self.process.pid) or now - looked > _SELF_SUSPENDED_S:
                stopped_since = float("inf")
            looked = now
            if self.process.poll() is None:
                if is_stopped(self.process.pid):
                    stopped_since = min(stopped_since, now)
                    if now - stopped_since > _RESUME_AFTER_S:
                        _warn("was stopped (SIGSTOP), and is continued")
                        self.process.send_signal(signal.SIGCONT)
                continue
            ended = ended + 1 if now - began < _MIN_UPTIME_S else 1
            if ended > _MAX_EARLY_EXITS:
                _warn(f"ended {ended} times within {_MIN_UPTIME_S:g} s each, and is not started again")
                self._listener.close()
                os.unlink(self.path)
                break
            _warn(f"ended ({_describe_exit(self.process.returncode)}), and is started again")
            began = now
            with contextlib.suppress(OSError):  # then it is found ended, as before
                self._start()
        self._closing.wait()
        self._terminate()

    def _start(self) -> None:
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "megarl.engine.engine_host"),
                *(str(self._listener.fileno()), str(os.getpid()), self._folder.path),
                "preload" if self._preload else "",
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=[self._listener.fileno(), self._folder.lock],
            env=self._environment,
            start_new_session=True,  # Ctrl-C reaches this process only, which then ends the host
        )

    def _terminate(self) -> None:
        self.process.terminate()
        self.process.send_signal(signal.SIGCONT)  # one that is stopped would not hear it
        try:
            self.process.wait(timeout=15)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def _warn(text: str) -> None:
    print(f"the process that engines are started from {text}", file=sys.stderr, flush=True)


def _describe_exit(code: int) -> str:
    return f"exit status {code}" if code >= 0 else signal.Signals(-code).name


class HostedServer:
    """A server in the care of a host; it lives no longer than this object's connection to it."""

    def __init__(self, path: str, log: Path, environment: Mapping[str, str], settings: Mapping[str, Any]) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._status: int | None = None
        self.is_abandoned = False
        """Whether it has ended with whoever was to tell how: its supervisor or the host."""
        self._poll_lock = threading.Lock()  # only one is told
        order = {"log": str(log.resolve()), "environment": dict(environment), "settings": dict(settings)}
        self._socket.connect(path)
        self._socket.sendall(json.dumps(order).encode() + b"\n")

    def poll(self) -> int | None:
        """None while it runs or is about to, else its exit status; -9 where nobody was left to tell it."""
        return self._wait(0.0)

    def close(self) -> None:
        """End it, and return when all of its processes are gone, or after 15 seconds."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)
        self._wait(15.0)
        self._socket.close()

    def _wait(self, seconds: float) -> int | None:
        with self._poll_lock:
            if self._status is None and select.select([self._socket], [], [], seconds)[0]:
                try:
                    line = self._socket.recv(64)
                except ConnectionError:
                    line = b""
                self._status, self.is_abandoned = (int(line), False) if line else (-9, True)
            return self._status
