"""The line between a rank of the trainer and the engine's rank beside it, for as long as a push lasts.

One request opens it: the engine's loader connects to a socket in a folder that only this user may enter, and does what
it is told until the other side hangs up. So a round costs a message each way within the machine, and neither HTTP nor
SGLang's own processes nor the other ranks have part in it. Orders and answers are JSON, each after its length as 8
bytes, little-endian; data never go this way. What either process dies of, the other sees at once: the kernel hangs up.
"""

from __future__ import annotations

import json
import socket
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megarl.engine.engine_loss import EngineError
from megarl.processes.temp_folders import TempFolder

_LENGTH = struct.Struct("<q")
_POLL_S = 0.2


class EngineTimeout(EngineError):
    """Somebody who is there, as far as anybody knows, does not answer."""


def _send_json(line: socket.socket, content: dict[str, Any]) -> None:
    data = json.dumps(content).encode()
    line.sendall(_LENGTH.pack(len(data)) + data)


def _receive_bytes(line: socket.socket, count: int) -> bytearray:
    """Fewer than `count` where the other side has hung up."""
    found = bytearray()
    while len(found) < count and (part := line.recv(min(count - len(found), 1 << 20))):
        found += part
    return found


def _receive_json(line: socket.socket) -> dict[str, Any] | None:
    """None where the other side has hung up."""
    head = _receive_bytes(line, _LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack(head)
    data = _receive_bytes(line, length)
    return dict(json.loads(data)) if len(data) == length else None


def serve_orders(path: str, obey: Callable[[dict[str, Any]], dict[str, Any]]) -> int:
    """The engine's side: do what comes by the socket at `path`, in its order, and answer each, until the other side has
    hung up. Returns how many orders there were. `obey` does not raise."""
    with socket.socket(socket.AF_UNIX) as line:
        line.connect(path)
        orders = 0
        try:
            while (order := _receive_json(line)) is not None:
                _send_json(line, obey(order))
                orders += 1
        except (BrokenPipeError, ConnectionResetError):
            pass  # the trainer's rank is gone; whoever looks after it says so
        return orders


class WeightChannel:
    """The trainer's side. `path` is for the order that opens the session. patience: seconds that the engine's rank may
    take to connect, and to do an order."""

    def __init__(self, patience: float) -> None:
        self._folder = TempFolder("megarl-push-")
        self.path = str(Path(self._folder.path, "socket"))
        self.timeout = patience
        self._connection: socket.socket | None = None
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(self.path)
        self._listener.listen(1)

    def wait_connected(self, is_over: Callable[[], bool] = lambda: False) -> bool:
        """Whether the engine's rank has connected; False where `is_over` says first that it will not. Raises Late."""
        self._listener.settimeout(_POLL_S)
        deadline = time.monotonic() + self.timeout
        try:
            while self._connection is None:
                over = is_over()  # before the last look, for it may have connected since the one before
                try:
                    self._connection, _ = self._listener.accept()
                    self._connection.settimeout(self.timeout)
                except TimeoutError:
                    if over:
                        return False
                    if time.monotonic() > deadline:
                        raise EngineTimeout(
                            f"an engine's rank has not begun its push within {self.timeout:g} s"
                        ) from None
        finally:
            self._listener.close()
            self._folder.close()
        return True

    def send(self, order: dict[str, Any]) -> None:
        """Give an order; `answer` is to be called before the next one. Raises EngineError where nobody is there."""
        assert self._connection is not None
        try:
            _send_json(self._connection, order)
        except TimeoutError:
            raise EngineTimeout(f"an engine's rank has not taken its order within {self.timeout:g} s") from None
        except OSError as error:
            raise EngineError(f"an engine's rank has ended in the middle of a push ({error})") from None

    def receive(self) -> dict[str, Any]:
        """Wait for what the engine's rank says to the order. Raises EngineError where it is gone, or could not obey."""
        assert self._connection is not None
        try:
            answer = _receive_json(self._connection)
        except TimeoutError:
            raise EngineTimeout(f"an engine's rank has not answered its order within {self.timeout:g} s") from None
        except OSError as error:
            raise EngineError(f"an engine's rank has ended in the middle of a push ({error})") from None
        if answer is None:
            raise EngineError("an engine's rank has ended in the middle of a push")
        if "error" in answer:
            raise EngineError(f"an engine's rank could not obey its order: {answer['error']}")
        return answer

    def close(self) -> None:
        """The engine's rank, which has answered all that it was told, is done then. Safe to call twice."""
        self._listener.close()
        if self._connection is not None:
            self._connection.close()
        self._folder.close()
