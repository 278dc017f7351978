"""A local reward service, which counts the words of an answer, or a judge that replies as a test asks."""

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


def count_words(conversation: dict[str, Any]) -> Any:
    return {"reward": len(conversation["answer"].split()), "parts": {"style": 0.5}}


def chat_completion(text: Any, **fields: Any) -> dict[str, Any]:
    """Return a response of OpenAI's chat completions API."""
    return {
        "choices": [{"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop", **fields}]
    }


class RewardServer:
    """Answer each request with `reply(body)`, or without it with `judge(conversation)` of each conversation.

    `answers` override the next responses in order: a status, a body and headers; the seconds that the usual response
    takes; or None to drop the connection.
    """

    def __init__(
        self, judge: Callable[[dict[str, Any]], Any] = count_words, reply: Callable[[dict[str, Any]], Any] | None = None
    ) -> None:
        self.requests: list[tuple[str, str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.answers: list[Answer | float | None] = []
        self.max_concurrent = 0
        self._concurrent, self._lock = 0, threading.Lock()
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                server.requests.append(("GET", self.path, None))
                server.headers.append(dict(self.headers))
                self.send_error(405)

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with server._lock:
                    server.requests.append(("POST", self.path, body))
                    server.headers.append(dict(self.headers))
                    server._concurrent += 1
                    server.max_concurrent = max(server.max_concurrent, server._concurrent)
                    answer = server.answers.pop(0) if server.answers else 0.0
                if isinstance(answer, float):
                    time.sleep(answer)
                    result = reply(body) if reply else [judge(item) for item in body["conversations"]]
                    answer = 200, json.dumps(result).encode()
                with server._lock:
                    server._concurrent -= 1
                if answer is None:
                    self.connection.shutdown(socket.SHUT_RDWR)
                    return
                self.send_response(answer[0])
                self.send_header("Content-Length", str(len(answer[1])))
                for name, value in answer[2].items() if len(answer) > 2 else ():
                    self.send_header(name, value)
                self.end_headers()
                with suppress(OSError):  # the client may have hung up
                    self.wfile.write(answer[1])

            def log_message(self, *arguments: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self._server.server_address[1]}"
        self.url = f"{self.address}/score"
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.unreachable_url = f"http://127.0.0.1:{probe.getsockname()[1]}/score"  # nothing listens here

    def batches(self) -> list[list[dict[str, Any]]]:
        return [body["conversations"] for _, _, body in self.requests if body and "conversations" in body]

    def __enter__(self) -> RewardServer:
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
