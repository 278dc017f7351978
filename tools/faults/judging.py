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


def requested_fault(text: str) -> str:
    """Return the misbehaviour that an answer asks for; empty for none."""
    match = re.search(r"\[(\w+)\]", text)
    return match[1] if match else ""


def judge(rollout: Rollout) -> float:
    """The reward function; runs in a process of the pool, which it records."""
    fault = requested_fault(rollout.answer)
    if fault in ("raise", "loop", "leave"):
        Path(os.environ[NOTES], fault).write_text(str(os.getpid()))
    if fault == "raise":
        raise RuntimeError("asked for by the answer")
    if fault == "leave":
        os._exit(3)
    while fault == "loop":
        time.sleep(1)
    return 0.0 if fault == "flat" else float(len(rollout.answer) % 3)


class _QuietServer(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_: Any) -> None:
        """Ignore the error: the client has hung up."""


class Service:
    """The service, in threads of this process, until `close`. request_times: by answer. bytes_sent: of the
    oversized body."""

    def __init__(self) -> None:
        self.request_times: dict[str, list[float]] = {}
        self.bytes_sent = 0
        service = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._respond(200, b"there")

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                (conversation,) = body["conversations"]
                fault, key = requested_fault(conversation["answer"]), f"{conversation['id']} {conversation['answer']}"
                tries = service.request_times.setdefault(key, [])
                tries.append(time.monotonic())
                if fault == "error" or (fault == "once" and len(tries) == 1):
                    self._respond(500, b"out of order")
                elif fault == "hang":
                    service.stopped.wait(60)
                elif fault == "huge":
                    self._huge()
                else:
                    time.sleep(SLOW_S if fault == "slow" else 0)
                    bodies = {"malformed": b"[0.5", "nan": b"[NaN]", "text": b'["good"]'}
                    self._respond(200, bodies.get(fault, b"[0.25]"))

            def _respond(self, status: int, body: bytes) -> None:
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
                        service.bytes_sent += self.wfile.write(_CHUNK)
                except OSError:
                    pass  # the client closed the connection
                self.close_connection = True

            def log_message(self, *_: Any) -> None:
                pass

        self.stopped = threading.Event()
        self._server = _QuietServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/score"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self.stopped.set()
        self._server.shutdown()
        self._server.server_close()
