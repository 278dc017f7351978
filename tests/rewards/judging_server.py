"""A reward service on this machine: an answer's reward is the number of its words. Or a judge, by what it replies."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any

Answer = tuple[int, bytes] | tuple[int, bytes, dict[str, str]]


def words(conversation: dict[str, Any]) -> Any:
    return {"reward": len(conversation["answer"].split()), "parts": {"style": 0.5}}


def says(text: Any, **about: Any) -> dict[str, Any]:
    """What a server with OpenAI's API answers."""
    return {
        "choices": [{"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop", **about}]
    }


class Judging:
    """`reply`: what it answers to the whole of a request; without it what `judge` says of each conversation.

    `answers`: instead of what it would say to the next requests, one after the other: a status, a body and headers, or
    the seconds that it takes, or None, for a connection that is cut."""

    def __init__(
        self, judge: Callable[[dict[str, Any]], Any] = words, reply: Callable[[dict[str, Any]], Any] | None = None
    ) -> None:
        self.requests: list[tuple[str, str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.answers: list[Answer | float | None] = []
        self.most = 0
        self._now, self._lock = 0, threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.requests.append(("GET", self.path, None))
                outer.headers.append(dict(self.headers))
                self.send_error(405)

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with outer._lock:
                    outer.requests.append(("POST", self.path, body))
                    outer.headers.append(dict(self.headers))
                    outer._now += 1
                    outer.most = max(outer.most, outer._now)
                    answer = outer.answers.pop(0) if outer.answers else 0.0
                if isinstance(answer, float):
                    time.sleep(answer)
                    said = reply(body) if reply else [judge(item) for item in body["conversations"]]
                    answer = 200, json.dumps(said).encode()
                with outer._lock:
                    outer._now -= 1
                if answer is None:
                    self.connection.shutdown(socket.SHUT_RDWR)
                    return
                self.send_response(answer[0])
                self.send_header("Content-Length", str(len(answer[1])))
                for name, value in answer[2].items() if len(answer) > 2 else ():
                    self.send_header(name, value)
                self.end_headers()
                with suppress(OSError):  # who asked may have had enough
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
        return [body["conversations"] for _, _, body in self.requests if body and "conversations" in body]

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
