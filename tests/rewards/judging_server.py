"""A reward service on this machine: an answer's reward is the number of its words."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any

Answer = tuple[int, bytes]


def words(conversation: dict[str, Any]) -> Any:
    return {"reward": len(conversation["answer"].split()), "parts": {"style": 0.5}}


class Judging:
    """`answers`: instead of what it would say to the next requests, one after the other: a status and a body, or the
    seconds that it takes, or None, for a connection that is cut."""

    def __init__(self, judge: Callable[[dict[str, Any]], Any] = words) -> None:
        self.requests: list[tuple[str, str, Any]] = []
        self.answers: list[Answer | float | None] = []
        self.most = 0
        self._now, self._lock = 0, threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.requests.append(("GET", self.path, None))
                self.send_error(405)

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with outer._lock:
                    outer.requests.append(("POST", self.path, body))
                    outer._now += 1
                    outer.most = max(outer.most, outer._now)
                    answer = outer.answers.pop(0) if outer.answers else 0.0
                if isinstance(answer, float):
                    time.sleep(answer)
                    answer = 200, json.dumps([judge(one) for one in body["conversations"]]).encode()
                with outer._lock:
                    outer._now -= 1
                if answer is None:
                    self.connection.shutdown(socket.SHUT_RDWR)
                    return
                self.send_response(answer[0])
                self.send_header("Content-Length", str(len(answer[1])))
                self.end_headers()
                self.wfile.write(answer[1])

            def log_message(self, *arguments: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self._server.server_address[1]}"
        self.url = f"{self.address}/score"
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.gone = f"http://127.0.0.1:{probe.getsockname()[1]}/score"  # where nobody is

    def batches(self) -> list[list[dict[str, Any]]]:
        return [body["conversations"] for kind, _, body in self.requests if kind == "POST"]

    def __enter__(self) -> Judging:
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
