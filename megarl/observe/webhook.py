"""Post alarms to a URL in the background, in a format that Slack and others accept. Never blocks the run.

    {"text": "MegaRL runs/a on node7, step 12: ...", "run": "runs/a", "step": 12, "alarm": "...", "host": "node7"}

The URL is a secret, since anyone who has it may post: no log, message or copy of the configuration contains it.
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
from urllib.parse import SplitResult, urlsplit

from megarl.config import ConfigError
from megarl.utils.addresses import is_known_private, is_public

KEY = "track.webhook"
PRIVATE_ENV = "MEGARL_WEBHOOK_PRIVATE"
"""Environment variable; 1 allows a webhook on this machine or in a private network."""
ENV_PREFIX = "env:"
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,99}")
_QUEUE_SIZE = 32
"""Pending alarms; further ones are dropped while the queue is full."""
_TIMEOUT_S = 10.0
_CLOSE_TIMEOUT_S = 5.0
"""How long the end of a run waits for pending alarms."""


def resolve_webhook(setting: str) -> str:
    """Return the URL that `track.webhook` means in this process's environment; empty if it is not set.

    Raises ConfigError, without the URL in its text, for a URL that is invalid or not allowed.
    """
    if not setting:
        return ""
    if setting.startswith(ENV_PREFIX):
        name = setting.removeprefix(ENV_PREFIX)
        if not _NAME.fullmatch(name):
            raise ConfigError(f"{KEY}: what follows {ENV_PREFIX} must be the name of an environment variable")
        if not os.environ.get(name, "").strip():
            raise ConfigError(f"{KEY}: the environment variable {name} is not set; export it before the run")
        setting = os.environ[name].strip()
    if is_known_private(_parse_url(setting).hostname or "") and os.environ.get(PRIVATE_ENV) != "1":
        raise ConfigError(f"{KEY} is on this machine or in a private network: export {PRIVATE_ENV}=1 if it is yours")
    return setting


def _parse_url(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        is_valid = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        is_valid = False
    if not is_valid or not (url.isascii() and url.isprintable()) or " " in url:
        raise ConfigError(
            f"{KEY} is not a URL such as https://hooks.example.com/T1/x, and not {ENV_PREFIX}NAME of a variable with "
            "one"
        )
    return parts


class Webhook:
    """Posts the alarms of a run one by one in a background thread. `post` neither raises nor blocks."""

    def __init__(self, url: str, run: str) -> None:
        self._url, self._run, self._host = url, run, socket.gethostname()
        self._queue: queue.Queue[tuple[str, int] | None] = queue.Queue(_QUEUE_SIZE)
        self._num_dropped = 0
        self._failure = ""
        self._thread: threading.Thread | None = None

    def post(self, text: str, step: int) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="webhook", daemon=True)
            self._thread.start()
        try:
            self._queue.put_nowait((text, step))
        except queue.Full:
            self._num_dropped += 1

    def pop_failure(self) -> str:
        """Return a message on the first failure, once and without the URL; else an empty string."""
        message, self._failure = self._failure, ""
        return message

    def close(self) -> None:
        """Wait up to `_CLOSE_TIMEOUT_S` for pending alarms."""
        if self._thread is None:
            return
        deadline = time.monotonic() + _CLOSE_TIMEOUT_S
        try:
            self._queue.put(None, timeout=_CLOSE_TIMEOUT_S)
        except queue.Full:
            return
        self._thread.join(max(0.0, deadline - time.monotonic()))

    def _serve(self) -> None:
        has_failed = False
        while (alarm := self._queue.get()) is not None:
            try:
                problem = self._send(*alarm)
            except Exception as error:  # noqa: BLE001  the run goes on; messages are dropped: one may have the URL
                reason = error.strerror if isinstance(error, OSError) else ""
                problem = f"{type(error).__name__}: {reason}" if reason else type(error).__name__
            if problem and not has_failed:
                has_failed = True
                self._failure = f"an alarm could not be posted to {KEY} ({problem}); it is retried with the next one"

    def _send(self, alarm: str, step: int) -> str:
        """Post an alarm. Return what is wrong with the response, empty if it was accepted."""
        num_dropped, self._num_dropped = self._num_dropped, 0
        dropped_note = f" ({num_dropped} further alarms were dropped)" if num_dropped else ""
        text = f"MegaRL {self._run} on {self._host}, step {step}: {alarm}{dropped_note}"
        body = {"text": text, "run": self._run, "step": step, "alarm": alarm, "host": self._host}
        parts = _parse_url(self._url)
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
    """Connect to an allowed address of `host`. The check and the connection use the same resolved address."""
    problem: OSError = OSError(0, "no such host")
    for family, sock_type, protocol, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        if os.environ.get(PRIVATE_ENV) != "1" and not is_public(str(address[0])):
            problem = OSError(0, f"it is on this machine or in a private network; {PRIVATE_ENV}=1 allows it")
            continue
        connection = socket.socket(family, sock_type, protocol)
        try:
            connection.settimeout(_TIMEOUT_S)
            connection.connect(address)
            return connection
        except OSError as error:
            problem = error
            connection.close()
    raise problem
