"""Channel between a trainer rank and the engine rank on the same device, for the duration of a weight sync.

One request opens it: the engine's loader connects to a socket in a folder that only this user may enter, and executes
orders until the other side hangs up. So a round costs one message each way within the machine, and involves neither
HTTP nor SGLang's other processes nor other ranks. Orders and answers are JSON, each after its length as 8 bytes,
little-endian; weights never take this way. If either process dies, the kernel hangs up and the other sees it at once.
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
    """The other side does not answer, although as far as known it still runs."""


def _send_json(connection: socket.socket, content: dict[str, Any]) -> None:
    data = json.dumps(content).encode()
    connection.sendall(_LENGTH.pack(len(data)) + data)


def _receive_bytes(connection: socket.socket, count: int) -> bytearray:
    """Receive `count` bytes; fewer if the other side hangs up."""
    data = bytearray()
    while len(data) < count and (chunk := connection.recv(min(count - len(data), 1 << 20))):
        data += chunk
    return data


def _receive_json(connection: socket.socket) -> dict[str, Any] | None:
    """Receive one message; None if the other side hangs up."""
    header = _receive_bytes(connection, _LENGTH.size)
    if len(header) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack(header)
    data = _receive_bytes(connection, length)
    return dict(json.loads(data)) if len(data) == length else None


def serve_orders(path: str, execute: Callable[[dict[str, Any]], dict[str, Any]]) -> int:
    """Engine side: execute orders from the socket at `path` in sequence and answer each, until the other side hangs up.

    Returns the number of orders. `execute` must not raise.
    """
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        orders = 0
        try:
            while (order := _receive_json(connection)) is not None:
                _send_json(connection, execute(order))
                orders += 1
        except (BrokenPipeError, ConnectionResetError):
            pass  # the trainer rank is gone; its own supervision reports that
        return orders


class WeightChannel:
    """Trainer side. Send `path` in the order that opens the session. timeout: seconds that the engine rank may take
    to connect, and to execute an order."""

    def __init__(self, timeout: float) -> None:
        self._folder = TempFolder("megarl-push-")
        self.path = str(Path(self._folder.path, "socket"))
        self.timeout = timeout
        self._connection: socket.socket | None = None
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(self.path)
        self._listener.listen(1)

    def wait_connected(self, is_over: Callable[[], bool] = lambda: False) -> bool:
        """Wait for the engine rank to connect; return False if `is_over` reports first that it will not. Raises
        EngineTimeout."""
        self._listener.settimeout(_POLL_S)
        deadline = time.monotonic() + self.timeout
        try:
            while self._connection is None:
                over = is_over()  # before accept: it may have connected just before it was over
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
        """Send an order; call `receive` before the next one. Raises EngineError if the engine rank is gone."""
        assert self._connection is not None
        try:
            _send_json(self._connection, order)
        except TimeoutError:
            raise EngineTimeout(f"an engine's rank has not taken its order within {self.timeout:g} s") from None
        except OSError as error:
            raise EngineError(f"an engine's rank has ended in the middle of a push ({error})") from None

    def receive(self) -> dict[str, Any]:
        """Wait for the answer to the order. Raises EngineError if the engine rank is gone, or could not execute the
        order."""
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
        """Hang up; the engine rank, which has answered all of its orders, then ends the session. Idempotent."""
        self._listener.close()
        if self._connection is not None:
            self._connection.close()
        self._folder.close()
