"""Alarms posted to a URL, as Slack and others take them: in the background, and never in the way of the run.

    {"text": "MegaRL runs/a on node7, step 12: ...", "run": "runs/a", "step": 12, "alarm": "...", "host": "node7"}

The URL is a secret, for whoever has it may post: it is in no log, no message and no copy of the configuration.
"""

from __future__ import annotations

import http.client
import json
import os
import queue
import re
import socket
import ssl
import threading
import time
from dataclasses import dataclass
from urllib.parse import SplitResult, urlsplit

from megarl.config import ConfigError
from megarl.utils.addresses import is_known_private, is_public

KEY = "track.webhook"
PRIVATE_ENV = "MEGARL_WEBHOOK_PRIVATE"
"""Environment variable; 1 where the webhook is on this machine or in a private network."""
ENV_PREFIX = "env:"
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,99}")
_QUEUE_SIZE = 32
"""Alarms that wait to be posted; further ones are left out."""
_TIMEOUT_S = 10.0
_CLOSE_TIMEOUT_S = 5.0
"""How long a run that ends waits for what was not posted yet."""


def check_webhook(setting: str) -> None:
    """Raise ConfigError, without the URL, for what is none, or may not be asked."""
    if setting:
        resolve_url(setting)


def resolve_url(setting: str) -> str:
    """The URL that `track.webhook` means, of this process. Raises ConfigError, without the URL, for what is none."""
    if setting.startswith(ENV_PREFIX):
        name = setting.removeprefix(ENV_PREFIX)
        if not _NAME.fullmatch(name):
            raise ConfigError(f"{KEY}: behind {ENV_PREFIX} must be the name of an environment variable")
        if not os.environ.get(name, "").strip():
            raise ConfigError(f"{KEY}: the environment variable {name} is not set; export it before the run")
        setting = os.environ[name].strip()
    parts = _parts(setting)
    if is_known_private(parts.hostname or "") and not _is_private_allowed():
        raise ConfigError(
            f"{KEY} is on this machine or in a private network: export {PRIVATE_ENV}=1 if it is one of yours"
        )
    return setting


def _parts(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        good = False
    if not good or not (url.isascii() and url.isprintable()) or " " in url:
        raise ConfigError(
            f"{KEY} is no address such as https://hooks.example.com/T1/x, and not {ENV_PREFIX}NAME of a variable with one"
        )
    return parts


def _is_private_allowed() -> bool:
    return os.environ.get(PRIVATE_ENV) == "1"


@dataclass(frozen=True)
class Alarm:
    text: str
    step: int


class Webhook:
    """Posts the alarms of a run, one after another, in a thread of its own. Nothing here raises or waits."""

    def __init__(self, url: str, run: str) -> None:
        self._url, self._run, self._host = url, run, socket.gethostname()
        self._queue: queue.Queue[Alarm | None] = queue.Queue(_QUEUE_SIZE)
        self._num_dropped = 0
        self._failure = ""
        self._thread: threading.Thread | None = None

    def post(self, text: str, step: int) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="webhook", daemon=True)
            self._thread.start()
        try:
            self._queue.put_nowait(Alarm(text, step))
        except queue.Full:
            self._num_dropped += 1

    def pop_failure(self) -> str:
        """What went wrong first, once, in a line without the URL; else nothing."""
        said, self._failure = self._failure, ""
        return said

    def close(self) -> None:
        """Wait a little for what was not posted yet."""
        if self._thread is None:
            return
        until = time.monotonic() + _CLOSE_TIMEOUT_S
        try:
            self._queue.put(None, timeout=_CLOSE_TIMEOUT_S)
        except queue.Full:
            return
        self._thread.join(max(0.0, until - time.monotonic()))

    def _serve(self) -> None:
        failed = False
        while (alarm := self._queue.get()) is not None:
            try:
                problem = self._send(alarm)
            except Exception as error:  # noqa: BLE001  whatever it is, the run goes on; a message may have the URL
                reason = error.strerror if isinstance(error, OSError) and error.strerror else ""
                problem = f"{type(error).__name__}{f': {reason}' if reason else ''}"
            if problem and not failed:
                failed = True
                self._failure = f"an alarm could not be posted to {KEY} ({problem}); it is tried again with the next"

    def _send(self, alarm: Alarm) -> str:
        """Returns what is wrong with the answer."""
        lost, self._num_dropped = self._num_dropped, 0
        left_out = f" ({lost} further alarms were left out)" if lost else ""
        body = {
            "text": f"MegaRL {self._run} on {self._host}, step {alarm.step}: {alarm.text}{left_out}",
            "run": self._run,
            "step": alarm.step,
            "alarm": alarm.text,
            "host": self._host,
        }
        parts = _parts(self._url)
        host = parts.hostname or ""
        port = parts.port or (443 if parts.scheme == "https" else 80)
        connection = http.client.HTTPConnection(host, port, timeout=_TIMEOUT_S)
        try:
            connection.sock = _connect(host, port)
            if parts.scheme == "https":
                connection.sock = ssl.create_default_context().wrap_socket(connection.sock, server_hostname=host)
            path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
            connection.request("POST", path, json.dumps(body).encode(), {"Content-Type": "application/json"})
            status = connection.getresponse().status
        finally:
            connection.close()
        return "" if 200 <= status < 300 else f"it answered with status {status}"


def _connect(host: str, port: int) -> socket.socket:
    """To an address that may be asked, which is looked at of the very one that is connected to."""
    problem: OSError = OSError(0, "there is no such host")
    for family, kind, protocol, _, place in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        if not _is_private_allowed() and not is_public(str(place[0])):
            problem = OSError(0, f"it is on this machine or in a private network; {PRIVATE_ENV}=1 allows it")
            continue
        made = socket.socket(family, kind, protocol)
        try:
            made.settimeout(_TIMEOUT_S)
            made.connect(place)
            return made
        except OSError as error:
            problem = error
            made.close()
    raise problem
