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
from megarl.observe.rollout_log import evaluation_folder
from megarl.view.page import (
    RunReaders,
    SpanLoader,
    build_overview,
    find_divergences,
    load,
    render_block,
    render_page,
)
from megarl.view.prompt_texts import PromptTexts
from megarl.view.query import parse_condition
from megarl.view.rollout_details import TokenDecoder, load_decoder, read_details
from megarl.view.rollout_files import Notes
from megarl.view.rollout_index import Index
from megarl.view.run_data import RunData, read_texts
from megarl.view.text_search import read_newest, search

HOSTS = ("127.0.0.1", "localhost")
REFRESH_S = 5.0
"""Loaded runs are served from memory for this long."""
_PATH = re.compile(r"/([\w-]{20,100})/(?:(?:data/)([a-z0-9-]{1,12000})\.js)?(?:\?\d{1,20})?")
_BLOCK = re.compile(r"(eval-)?(index|texts|prompts|newest|tokens|search)-(\d{1,3})(?:-(.+))?")
_TOKENS = re.compile(r"(\d{1,12})-(\d{1,9})")
_SEARCH = re.compile(r"t((?:[0-9a-f]{2}){1,800})-c((?:[0-9a-f]{2}){0,4000})(?:-(\d{1,12})-(\d{1,9}))?")
"""Text and condition, UTF-8 in hexadecimal, and where the previous page has ended."""


class Server(ThreadingHTTPServer):
    """Serves these run folders. port: 0 for any free port. Raises ConfigError if the port is not available."""

    daemon_threads = True

    def __init__(self, paths: Sequence[Path], port: int = 0, load_spans: SpanLoader | None = None) -> None:
        self.key = secrets.token_urlsafe(24)
        self._paths, self._load_spans = list(paths), load_spans
        self._lock = threading.Lock()
        self._decoders: dict[int, TokenDecoder] = {}
        self._run_sizes: list[tuple[int, int]] | None = None
        self._readers = [RunReaders.create(path) for path in paths]
        self._prompts = [PromptTexts(path) for path in paths]
        self._load()
        try:
            super().__init__((HOSTS[0], port), Handler)
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ConfigError(f"--follow {port}: {reason}; name another port, or none for one that is free") from None

    def _load(self) -> None:
        runs = [load(path, self._load_spans, readers) for path, readers in zip(self._paths, self._readers, strict=True)]
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
        match = _BLOCK.fullmatch(name)
        if match is None or int(match[3]) >= len(self._paths):
            return None
        prefix, kind, rest, run_index = match[1] or "", match[2], match[4] or "", int(match[3])
        path = self._paths[run_index]
        run_dir = evaluation_folder(path) if prefix else path
        if kind == "texts" and not prefix and not rest:
            return render_block(name, read_texts(path))
        if kind == "tokens" and (tokens := _TOKENS.fullmatch(rest)):
            return render_block(name, self._read_tokens(run_index, run_dir, int(tokens[1]), int(tokens[2])))
        run = self.get_runs()[run_index]
        index = run.evaluations if prefix else run.index
        if kind == "index" and not rest:
            return render_block(name, index.to_dict())
        if kind == "prompts" and not prefix and not rest:
            with self._lock:
                return render_block(name, self._prompts[run_index].read(index))
        if kind == "newest" and not prefix and not rest:
            return render_block(name, read_newest(run_dir, index))
        if kind == "search" and (query := _SEARCH.fullmatch(rest)):
            return render_block(name, _search(run_dir, index, query))
        return None

    def _read_tokens(self, run_index: int, run_dir: Path, step: int, number: int) -> Any:
        with self._lock:
            if run_index not in self._decoders:
                self._decoders[run_index] = TokenDecoder(load_decoder(self._paths[run_index]))
            notes = Notes()
            details = list(read_details(run_dir, step, {number}, self._decoders[run_index], notes))
        return details or {"error": "; ".join(notes) or f"there is no rollout {number} of step {step}"}

    def render_page(self) -> str:
        title = "MegaRL: " + ", ".join(run.name for run in self.get_runs())
        return render_page({"overview": self.overview()}, "data/", title)


def _search(run_dir: Path, index: Index, query: re.Match[str]) -> dict[str, Any]:
    try:
        text, condition = (bytes.fromhex(query[group]).decode() for group in (1, 2))
        matches = parse_condition(condition, "filter") if condition.strip() else None
    except (UnicodeDecodeError, ConfigError) as error:
        return {"error": str(error)}
    return search(run_dir, index, text, matches, None if query[3] is None else (int(query[3]), int(query[4])))


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
