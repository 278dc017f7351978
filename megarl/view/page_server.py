"""Serve the page on loopback, with live metrics and the tokens of any rollout on demand.

Every request needs the secret key in its path. Requests whose Host header is not this machine are refused, so that a
foreign site cannot read the page by DNS rebinding.
"""

from __future__ import annotations

import hmac
import re
import secrets
import threading
import time
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from megarl.config import ConfigError
from megarl.view.page import SpanLoader, build_overview, find_divergences, load, render_block, render_page
from megarl.view.rollout_details import TokenDecoder, load_decoder, read_details
from megarl.view.rollout_files import Notes
from megarl.view.rollout_index import IndexReader
from megarl.view.run_data import RunData, read_texts

HOSTS = ("127.0.0.1", "localhost")
REFRESH_S = 5.0
"""Loaded runs are served from memory for this long."""
_PATH = re.compile(r"/([\w-]{20,100})/(?:(?:data/)([a-z0-9-]{1,80})\.js)?(?:\?\d{1,20})?")
_TOKENS = re.compile(r"tokens-(\d{1,3})-(\d{1,12})-(\d{1,9})")
_INDEX, _TEXTS = re.compile(r"index-(\d{1,3})"), re.compile(r"texts-(\d{1,3})")


class Server(ThreadingHTTPServer):
    """Serves these run folders. port: 0 for any free port. Raises ConfigError if the port is not available."""

    daemon_threads = True

    def __init__(self, paths: Sequence[Path], port: int = 0, load_spans: SpanLoader | None = None) -> None:
        self.key = secrets.token_urlsafe(24)
        self._paths, self._load_spans = list(paths), load_spans
        self._lock = threading.Lock()
        self._decoders: dict[int, TokenDecoder] = {}
        self._run_sizes: list[tuple[int, int]] | None = None
        self._readers = [IndexReader(path) for path in paths]
        self._load()
        try:
            super().__init__((HOSTS[0], port), Handler)
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ConfigError(f"--serve {port}: {reason}; name another port, or none for one that is free") from None

    def _load(self) -> None:
        runs = [load(path, self._load_spans, reader) for path, reader in zip(self._paths, self._readers, strict=True)]
        run_sizes = [(len(run.index), len(run.metrics)) for run in runs]
        if run_sizes != self._run_sizes:
            self._divergences, self._run_sizes = find_divergences(runs), run_sizes
        self._runs, self._loaded_at = runs, time.monotonic()

    @property
    def address(self) -> str:
        return f"http://{HOSTS[0]}:{self.server_address[1]}/{self.key}/"

    def get_runs(self) -> list[RunData]:
        """Return the runs, reloaded if they are older than `REFRESH_S`."""
        with self._lock:
            if time.monotonic() - self._loaded_at > REFRESH_S:
                self._load()
            return self._runs

    def overview(self) -> dict[str, Any]:
        return build_overview(self.get_runs(), self._divergences, live=True)

    def render_block(self, name: str) -> str | None:
        """Render the script that passes a block to the page; None if there is no such block."""
        if name == "overview":
            return render_block(name, self.overview())
        if (match := _INDEX.fullmatch(name)) and int(match[1]) < len(self._paths):
            return render_block(name, self.get_runs()[int(match[1])].index.to_dict())
        if (match := _TEXTS.fullmatch(name)) and int(match[1]) < len(self._paths):
            return render_block(name, read_texts(self._paths[int(match[1])]))
        if (match := _TOKENS.fullmatch(name)) and int(match[1]) < len(self._paths):
            run, step, number = map(int, match.groups())
            with self._lock:
                if run not in self._decoders:
                    self._decoders[run] = TokenDecoder(load_decoder(self._paths[run]))
                notes = Notes()
                details = list(read_details(self._paths[run], step, {number}, self._decoders[run], notes))
            error = "; ".join(notes) or f"there is no rollout {number} of step {step}"
            return render_block(name, details or {"error": error})
        return None

    def render_page(self) -> str:
        title = "MegaRL: " + ", ".join(run.name for run in self.get_runs())
        return render_page({"overview": self.overview()}, "data/", title)


class Handler(BaseHTTPRequestHandler):
    """Handles GET requests for the page and its blocks."""

    server: Server
    server_version, sys_version = "MegaRL", ""

    def do_GET(self) -> None:  # noqa: N802 - the name that http.server calls
        host = self.headers.get("Host", "").rpartition(":")
        if host[0] not in HOSTS or host[2] != str(self.server.server_address[1]):
            self._answer(421, "text/plain", "This host name is not served.\n")
            return
        match = _PATH.fullmatch(self.path)
        if match is None or not hmac.compare_digest(match[1], self.server.key):
            self._answer(404, "text/plain", "Not found; the terminal shows the address with its key.\n")
            return
        if match[2] is None:
            self._answer(200, "text/html", self.server.render_page())
        elif (text := self.server.render_block(match[2])) is not None:
            self._answer(200, "text/javascript", text)
        else:
            self._answer(404, "text/plain", "No such block.\n")

    def _answer(self, status: int, content_type: str, text: str) -> None:
        content = text.encode()
        self.send_response(status)
        for name, value in {
            "Content-Type": f"{content_type}; charset=utf-8",
            "Content-Length": str(len(content)),
            "Cache-Control": "no-store",
            "X-Content-Type-Options": "nosniff",
            "Cross-Origin-Resource-Policy": "same-origin",
            "Referrer-Policy": "no-referrer",
            "X-Frame-Options": "DENY",
        }.items():
            self.send_header(name, value)
        self.end_headers()
        try:
            self.wfile.write(content)
        except (BrokenPipeError, ConnectionResetError):
            pass  # the page has been closed

    def log_message(self, format: str, *arguments: object) -> None:
        """Log nothing: requests contain the key."""
