"""The connection between a rank and an engine that was started outside of the job: TCP, authenticated, not encrypted.

Both ends know a secret (`job_secret.external_key`). Each connection starts with a random number from either end, from
which both derive its key. Every message is a length of 8 bytes and a value of `parallel.encoding`, sealed with that key
for its direction and its number, so that nobody can forge, repeat or reorder messages. Weights follow their order,
which has their hash, unless they are in a file (`external_files.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import secrets
import socket
import struct
import time
from typing import Any

import torch

from megarl.config import ConfigError
from megarl.parallel import encoding, job_secret
from megarl.parallel.job_secret import ForgedError
from megarl.parallel.rendezvous import PUBLIC_NETWORK_ENV
from megarl.utils.addresses import is_public

_NONCE_BYTES = 32
_LENGTH = struct.Struct("<Q")
_MAX_HELLO_BYTES, _MAX_BYTES = 1 << 20, 1 << 34
"""Largest message of a peer that has not proven that it knows the secret, and of one that has."""
CONNECT_TIMEOUT_S = 10.0
"""Seconds for a connection, and from there to the end of the first message that arrives."""
_TCP_OPTIONS = {
    socket.TCP_KEEPIDLE: 30,
    socket.TCP_KEEPINTVL: 10,
    socket.TCP_KEEPCNT: 3,
    socket.TCP_USER_TIMEOUT: 60_000,  # milliseconds
}
"""A machine that has vanished is noticed within a minute."""


class WireError(RuntimeError):
    """The connection is broken, or the other end does not know the secret."""


class WireBroken(WireError):
    """The connection is broken. The other end may have hung up because of another connection."""


def parse_address(text: str) -> tuple[str, int]:
    """Return host and port of `HOST:PORT`, or `[IPV6]:PORT`. Raises ValueError."""
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    try:
        is_name = bool(host.encode("idna")) and "\0" not in host
    except UnicodeError:  # such as two dots in a row
        is_name = False
    if not is_name or not (port.isascii() and port.isdecimal()) or not 0 < int(port) < 1 << 16:
        raise ValueError(f"{text[:80]!r} is not HOST:PORT")
    return host, int(port)


def check_peer(address: str, connection: socket.socket) -> None:
    """Raise WireError if a connection to `address` goes to the public internet, unless a firewall protects it."""
    peer = str(connection.getpeername()[0])
    if is_public(peer) and os.environ.get(PUBLIC_NETWORK_ENV) != "1":
        raise WireError(
            f"{address} is {peer}, an address of the public internet, and weights are sent there unencrypted; export "
            f"{PUBLIC_NETWORK_ENV}=1 if a firewall protects it"
        )


class Wire:
    """One end of a connection. Not thread-safe. Every method raises WireError; those that encode a value also raise
    EncodingError, if it is not plain data.

    Before `open_streams` use the blocking calls, after it `send_async` and `receive_async`.
    """

    def __init__(self, connection: socket.socket, is_server: bool) -> None:
        """Exchange random numbers. The first message that arrives proves that the other end knows the secret."""
        self._connection = connection
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._timeout: float | None = CONNECT_TIMEOUT_S
        self._first_deadline: float | None = time.monotonic() + CONNECT_TIMEOUT_S
        nonce = secrets.token_bytes(_NONCE_BYTES)
        other = bytearray(_NONCE_BYTES)
        self._is_server, self._sent, self._received = is_server, 0, 0
        try:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            if connection.family in (socket.AF_INET, socket.AF_INET6):
                for option, value in _TCP_OPTIONS.items():
                    connection.setsockopt(socket.IPPROTO_TCP, option, value)
            secret = job_secret.external_key()
            self._send(nonce)
            self._receive_into(memoryview(other), self._first_deadline)
        except ConfigError as error:
            raise WireError(str(error)) from None
        except OSError as error:
            raise WireBroken(f"the connection failed: {error}") from None
        both = bytes(other) + nonce if is_server else nonce + bytes(other)
        self._key = hashlib.blake2b(both, key=secret, digest_size=32).digest()

    @staticmethod
    def connect(address: str) -> Wire:
        """Connect to a server at HOST:PORT, unless that is a name for an address of the public internet."""
        try:
            connection = socket.create_connection(parse_address(address), CONNECT_TIMEOUT_S)
        except OSError as error:
            raise WireError(f"nothing answers at {address} ({error.strerror or error})") from None
        except ValueError as error:
            raise WireError(str(error)) from None
        try:
            check_peer(address, connection)
            return Wire(connection, is_server=False)
        except (WireError, OSError) as error:
            connection.close()
            raise WireError(str(error)) from None

    def set_timeout(self, seconds: float | None) -> None:
        """Set how long each blocking call may take; None for ever."""
        self._timeout, self._first_deadline = seconds, None

    def close(self) -> None:
        """Hang up. Idempotent, and callable from any thread: a call that waits in another one fails.

        A connection in an event loop belongs to that, and must be closed there with `close_streams`, too.
        """
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        if self._writer is None:
            self._connection.close()

    # --- blocking

    def send(self, value: Any, data: torch.Tensor | None = None) -> None:
        """Send a value, and the bytes of `data`, [n] uint8 on the host."""
        self.send_encoded(self.encode(value), data)

    def send_encoded(self, message: bytes, data: torch.Tensor | None = None) -> None:
        """Send a message of `encode`."""
        try:
            self._send(message)
            if data is not None:
                self._send(data.numpy().data)
        except OSError as error:
            raise WireBroken(f"the connection failed: {error}") from None

    def receive(self) -> Any:
        """Return the next value."""
        head = bytearray(_LENGTH.size)
        deadline = self._next_deadline
        try:
            self._receive_into(memoryview(head), deadline)
            content = bytearray(self._check_length(head))
            self._receive_into(memoryview(content), deadline)
        except OSError as error:
            raise WireBroken(f"the connection failed: {error}") from None
        return self._decode(content)

    def receive_data(self, target: torch.Tensor) -> None:
        """Receive the bytes that follow a value into `target`, [n] uint8 on the host."""
        try:
            self._receive_into(target.numpy().data, self._next_deadline)
        except OSError as error:
            raise WireBroken(f"the connection failed: {error}") from None

    @property
    def _next_deadline(self) -> float | None:
        """When a message must be complete that is awaited now, however slowly its bytes come; by time.monotonic."""
        if self._first_deadline is not None and not self._received:
            return self._first_deadline
        return None if self._timeout is None else time.monotonic() + self._timeout

    def _send(self, data: bytes | memoryview) -> None:
        self._connection.settimeout(self._timeout)  # of `sendall`, for all of the data
        self._connection.sendall(data)

    def _receive_into(self, view: memoryview, deadline: float | None) -> None:
        while len(view):
            seconds = None if deadline is None else deadline - time.monotonic()
            if seconds is not None and seconds <= 0:
                raise TimeoutError("timed out")
            self._connection.settimeout(seconds)
            if not (count := self._connection.recv_into(view)):
                raise ConnectionResetError("the other end has hung up")
            view = view[count:]

    # --- in an event loop

    async def open_streams(self) -> None:
        """Continue this connection in the running event loop."""
        self._connection.setblocking(False)
        self._reader, self._writer = await asyncio.open_connection(sock=self._connection)

    async def send_async(self, value: Any) -> None:
        """Send a value; calls may overlap."""
        assert self._writer is not None
        try:
            self._writer.write(self.encode(value))
            await self._writer.drain()
        except OSError as error:
            raise WireBroken(f"the connection failed: {error}") from None

    async def receive_async(self) -> Any:
        """Return the next value."""
        assert self._reader is not None
        try:
            head = await self._reader.readexactly(_LENGTH.size)
            content = await self._reader.readexactly(self._check_length(head))
        except (OSError, asyncio.IncompleteReadError) as error:
            raise WireBroken(f"the connection failed: {error}") from None
        return self._decode(content)

    def close_streams(self) -> None:
        """Hang up, in the event loop."""
        if self._writer is not None:
            self._writer.close()

    # --- messages

    def encode(self, value: Any) -> bytes:
        """Return the next message to send. Raises EncodingError, which leaves the connection as it was."""
        encoded = encoding.encode(value)
        purpose, self._sent = f"external {self._is_server} {self._sent}", self._sent + 1
        content = job_secret.seal(encoded, purpose, self._key)
        return _LENGTH.pack(len(content)) + content

    def _check_length(self, head: bytes | bytearray) -> int:
        length: int = _LENGTH.unpack(head)[0]
        if length > (_MAX_BYTES if self._received else _MAX_HELLO_BYTES):
            raise WireError(f"the other end announces a message of {length} bytes")
        return length

    def _decode(self, content: bytes | bytearray) -> Any:
        purpose, self._received = f"external {not self._is_server} {self._received}", self._received + 1
        try:
            return encoding.decode(job_secret.unseal(content, purpose, self._key))
        except ForgedError:
            raise WireError(
                f"the other end does not know the secret of this one: start both as the same user, or with the same "
                f"{job_secret.EXTERNAL_SECRET_ENV}"
            ) from None
        except encoding.EncodingError as error:
            raise WireError(str(error)) from None
