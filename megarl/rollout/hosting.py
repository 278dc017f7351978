"""A rank's view of the process that its engines come from, see `engine_host.py`."""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from megarl.config import Config

SHARED = "MEGARL_ENGINE_HOST"
"""Environment variable with the socket of a host that another process has started for all engines of this machine."""
_OF_TORCHRUN = re.compile(
    r"TORCHELASTIC_|(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)$|LOCAL_WORLD_SIZE|ROLE_|MASTER_(ADDR|PORT)"
)
_SECRET = re.compile(r"(^|_)(TOKEN|KEY|SECRET|PASSWORD|PASSWD|CREDENTIAL|WEBHOOK)S?($|_)", re.I)
"""Names of what an engine has no use for: it has a key of its own, and its model lies in a folder."""


def secret_variables(config: Config) -> set[str]:
    """Names of the variables in which a configuration says that there are secrets."""
    options = [role.get("options") for role in config.roles.values() if isinstance(role, Mapping)]
    found = {str(given["auth_env"]) for given in options if isinstance(given, Mapping) and given.get("auth_env")}
    hook = config.track.webhook
    return found | ({hook.removeprefix("env:")} if hook.startswith("env:") else set())


class Host:
    """A host that this process started and that ends with it. preload: have it import SGLang, and fork engines from it.

    environment: is added to this process's, without what torchrun has put there, with whose variables the engine's
    ranks would wait for a store that torchrun keeps, and without what looks like a secret or is `hidden`, by its name.
    """

    def __init__(self, environment: Mapping[str, str], preload: bool, hidden: Collection[str] = ()) -> None:
        # A folder that only this user may enter. The name of a socket has at most 107 bytes, and TMPDIR may be long.
        # The host removes it, also when this process has been killed; and this process, also when the host has been.
        place = tempfile.gettempdir()
        self._folder = tempfile.mkdtemp(prefix="megarl-engines-", dir=place if len(place) < 50 else "/tmp")
        self.path = str(Path(self._folder, "socket"))
        inherited = {
            name: value
            for name, value in os.environ.items()
            if not (_OF_TORCHRUN.match(name) or _SECRET.search(name) or name in hidden)
        }
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(self.path)
            listener.listen()
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "megarl.rollout.engine_host"),
                    *(str(listener.fileno()), str(os.getpid()), self._folder, "preload" if preload else ""),
                ],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[listener.fileno()],
                env={**inherited, **environment},
                start_new_session=True,  # Ctrl-C reaches this process only, which then ends the host
            )

    def close(self) -> None:
        """End it and all of its engines."""
        self.process.terminate()
        try:
            self.process.wait(timeout=15)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)


class Hosted:
    """A server in the care of a host; it lives no longer than this object's connection to it."""

    def __init__(self, path: str, log: Path, environment: Mapping[str, str], settings: Mapping[str, Any]) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._status: int | None = None
        self._asking = threading.Lock()  # only one is told
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
        with self._asking:
            if self._status is None and select.select([self._socket], [], [], seconds)[0]:
                try:
                    line = self._socket.recv(64)
                except ConnectionError:
                    line = b""
                self._status = int(line) if line else -9
            return self._status
