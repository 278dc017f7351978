"""A rank's view of the engine host (`engine_host.py`), the process that starts its engines."""

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
"""Variables to withhold from the engine: it has its own API key, and loads its model from a folder."""
_POLL_S = 0.2
_SELF_SUSPENDED_S = 10.0
"""A longer gap between two polls means that this process was itself stopped, and the host with it."""
_RESUME_AFTER_S = 10.0
"""A host that is stopped for this long is continued."""
_MIN_UPTIME_S, _MAX_EARLY_EXITS = 60.0, 3
"""A host that ends within `_MIN_UPTIME_S` more than `_MAX_EARLY_EXITS` times in a row is not restarted."""


def secret_variables(config: Config) -> set[str]:
    """Return the names of the variables that hold secrets according to the configuration."""
    options = [role.get("options") for role in config.roles.values() if isinstance(role, Mapping)]
    names = {str(option["auth_env"]) for option in options if isinstance(option, Mapping) and option.get("auth_env")}
    webhook = config.track.webhook
    return names | ({webhook.removeprefix("env:")} if webhook.startswith("env:") else set())


class HostProcess:
    """A host that this process started, and that ends with it. preload: the host imports SGLang and forks engines from
    itself.

    environment: added to this process's environment. Removed from that are torchrun's variables, since the engine's
    ranks would wait for torchrun's store, and whatever looks like a secret or is named in `hidden`.

    A thread supervises the host. If it ends, which ends its engines too, it is restarted on the same socket, where new
    connections wait for it meanwhile. If it is stopped (SIGSTOP), it is continued. A host that keeps ending is given
    up, and its socket is closed.
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
            started.set_exception(error)
            return
        started.set_result(None)
        started_at = last_poll = time.monotonic()
        stopped_since, early_exits = float("inf"), 0
        while not self._closing.wait(_POLL_S):
            now = time.monotonic()
            if not is_stopped(self.process.pid) or now - last_poll > _SELF_SUSPENDED_S:
                stopped_since = float("inf")
            last_poll = now
            if self.process.poll() is None:
                if is_stopped(self.process.pid):
                    stopped_since = min(stopped_since, now)
                    if now - stopped_since > _RESUME_AFTER_S:
                        _warn("was stopped (SIGSTOP), and is continued")
                        self.process.send_signal(signal.SIGCONT)
                continue
            early_exits = early_exits + 1 if now - started_at < _MIN_UPTIME_S else 1
            if early_exits > _MAX_EARLY_EXITS:
                _warn(f"ended {early_exits} times within {_MIN_UPTIME_S:g} s each, and is not started again")
                self._listener.close()
                os.unlink(self.path)
                break
            _warn(f"ended ({_describe_exit(self.process.returncode)}), and is started again")
            started_at = now
            with contextlib.suppress(OSError):  # the next poll finds it ended again
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
            start_new_session=True,  # Ctrl-C reaches only this process, which then ends the host
        )

    def _terminate(self) -> None:
        self.process.terminate()
        self.process.send_signal(signal.SIGCONT)  # a stopped process would not receive SIGTERM
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
    """A server run by a host. It ends when this object's connection to the host closes."""

    def __init__(self, path: str, log: Path, environment: Mapping[str, str], settings: Mapping[str, Any]) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._status: int | None = None
        self.is_abandoned = False
        """True if it ended without an exit status, because its supervisor or host was killed."""
        self._poll_lock = threading.Lock()  # the exit status can be read only once
        request = {"log": str(log.resolve()), "environment": dict(environment), "settings": dict(settings)}
        self._socket.connect(path)
        self._socket.sendall(json.dumps(request).encode() + b"\n")

    def poll(self) -> int | None:
        """Return None while it runs or is about to, else its exit status; -9 if nobody was left to report it."""
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
