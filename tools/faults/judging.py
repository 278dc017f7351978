"""A reward service and a reward function that misbehave if an answer asks for it: `[word]` in its text."""

from __future__ import annotations

import json
import os
import re
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from megarl.types import Rollout

NOTES = "MEGARL_FAULTS_NOTES"
"""Environment variable: the folder where the function records its calls."""
SLOW_S = 0.5
HUGE = 1_000_000_000
_CHUNK = bytes(1 << 16)


def asks(text: str) -> str:
    """Return the misbehaviour that an answer asks for; empty for none."""
    match = re.search(r"\[(\w+)\]", text)
    return match[1] if match else ""


def judge(rollout: Rollout) -> float:
    """The reward function; runs in a process of the pool, which it records."""
    word = asks(rollout.answer)
    if word in ("raise", "loop", "leave"):
        Path(os.environ[NOTES], word).write_text(str(os.getpid()))
    if word == "raise":
        raise RuntimeError("asked for by the answer")
    if word == "leave":
        os._exit(3)
    while word == "loop":
        time.sleep(1)
    return 0.0 if word == "flat" else float(len(rollout.answer) % 3)


class _Quiet(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_: Any) -> None:
        """Ignore the error: the client has hung up."""


class Service:
    """The service, in threads of this process, until `close`. asked: request times by answer. sent: bytes sent of the
    oversized body."""

    def __init__(self) -> None:
        self.asked: dict[str, list[float]] = {}
        self.sent = 0
        service = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._answer(200, b"there")

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                (conversation,) = body["conversations"]
                word, key = asks(conversation["answer"]), f"{conversation['id']} {conversation['answer']}"
                tries = service.asked.setdefault(key, [])
                tries.append(time.monotonic())
                if word == "error" or (word == "once" and len(tries) == 1):
                    self._answer(500, b"out of order")
                elif word == "hang":
                    service.over.wait(60)
                elif word == "huge":
                    self._huge()
                else:
                    time.sleep(SLOW_S if word == "slow" else 0)
                    bodies = {"malformed": b"[0.5", "nan": b"[NaN]", "text": b'["good"]'}
                    self._answer(200, bodies.get(word, b"[0.25]"))

            def _answer(self, status: int, body: bytes) -> None:
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def _huge(self) -> None:
                self.send_response(200)
                self.send_header("Transfer-Encoding", "identity")
                self.end_headers()
                try:
                    for _ in range(HUGE // len(_CHUNK)):
                        service.sent += self.wfile.write(_CHUNK)
                except OSError:
                    pass  # the client closed the connection
                self.close_connection = True

            def log_message(self, *_: Any) -> None:
                pass

        self.over = threading.Event()
        self._server = _Quiet(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/score"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self.over.set()
        self._server.shutdown()
        self._server.server_close()
