"""Files that ranks of different nodes send to and fetch from each other, outside of collectives.

A rank that other nodes may reach runs a `FileServer`, whose threads need nothing from training. One connection carries
one file. Requests and answers have the job's keyed hash (`parallel/job_secret.py`) and a number that the server draws
for each connection; contents are checked against their SHA-256.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import secrets
import socket
import socketserver
import struct
import threading
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any

from megarl.checkpoint.manifest import Entry
from megarl.parallel import ranks
from megarl.parallel.job_secret import ForgedError, seal, unseal
from megarl.parallel.rendezvous import check_private

Address = tuple[str, int]

STALL_TIMEOUT_S = 60.0
"""Seconds without a byte after which a transfer fails: the other node is gone."""
ANSWER_TIMEOUT_S = 900.0
"""Seconds in which the receiver has to bring a file to its disk and verify it."""
_CHUNK_BYTES = 4 << 20
_MAX_MESSAGE_BYTES = 1 << 16
_NONCE_BYTES = 16
_NICENESS = 10
_SIOCGIFADDR = 0x8915
"""Linux's request for the IPv4 address of an interface."""


class FileServer:
    """Serve the files of a folder to the job's other ranks, and receive files from them, in threads.

    address: of this node. accepts: the subfolder that may be written, None for none; set by the owner.
    """

    def __init__(self, folder: Path, address: str) -> None:
        self._folder = folder
        self.accepts: str | None = None
        owner = self

        class Handler(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                owner._answer(self.request)

        class Server(socketserver.ThreadingTCPServer):
            address_family = socket.AF_INET6 if ":" in address else socket.AF_INET
            daemon_threads, block_on_close, request_queue_size = True, False, 1024

            def handle_error(self, request: Any, client_address: Any) -> None:
                """Say nothing: the other end reports a broken transfer, and strangers are of no interest."""

        self._server = Server((address, 0), Handler)
        self.address: Address = (address, int(self._server.server_address[1]))
        threading.Thread(target=self._server.serve_forever, name="checkpoint server", daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _answer(self, connection: socket.socket) -> None:
        thread_id = threading.get_native_id()  # of this connection's thread
        os.setpriority(os.PRIO_PROCESS, thread_id, min(19, os.getpriority(os.PRIO_PROCESS, thread_id) + _NICENESS))
        connection.settimeout(STALL_TIMEOUT_S)
        nonce = secrets.token_bytes(_NONCE_BYTES)
        connection.sendall(nonce)
        request = _receive_message(connection, f"request {nonce.hex()}")
        answer = f"answer {nonce.hex()}"
        try:
            path = self._resolve(request["name"])
            if request["is_put"]:
                self._check_accepts(request["name"])
                _receive_file(connection, path, Entry(request["bytes"], request["sha256"]))
                _send_message(connection, {}, answer)
                return
            stream = path.open("rb")
        except OSError as error:
            _send_message(connection, {"error": error.strerror or str(error)}, answer)
            while connection.recv(_CHUNK_BYTES):  # the other end may read the answer only once it has sent all
                pass
            return
        with stream:
            _send_message(connection, {"bytes": os.fstat(stream.fileno()).st_size}, answer)
            while chunk := stream.read(_CHUNK_BYTES):
                connection.sendall(chunk)

    def _resolve(self, name: str) -> Path:
        """Return the path of a file in the folder. Raises OSError for a name that leads out of it."""
        parts = PurePosixPath(name).parts
        if len(parts) < 2 or parts[0] == "/" or ".." in parts:
            raise OSError(f"{name!r} is no file of a checkpoint")
        return self._folder / name

    def _check_accepts(self, name: str) -> None:
        if PurePosixPath(name).parts[0] != self.accepts:
            raise OSError(f"{name} is of no checkpoint that is being written")


def find_address() -> str:
    """Return the address of this node for transfers: that of gloo's interface, or else of the one towards MASTER_ADDR.

    Raises ConfigError for a public address.
    """
    name = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        if name:
            request = struct.pack("256s", name.encode()[:15])
            address = socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)[20:24])
            check_private("the address of GLOO_SOCKET_IFNAME", address)
            return address
    return ranks.node_address()  # also if that interface has no IPv4 address


def send_file(address: Address, path: Path, name: str, entry: Entry, ended: Callable[[], bool]) -> None:
    """Send a file to another rank, which stores it as `name`; return once it has verified it.

    ended: polled between chunks; if it returns True, raises InterruptedError. Raises OSError if the transfer fails.
    """
    with _connect(address) as connection, path.open("rb") as stream:
        nonce = _receive_exactly(connection, _NONCE_BYTES)
        request = {"is_put": True, "name": name, **entry._asdict()}
        _send_message(connection, request, f"request {nonce.hex()}")
        while chunk := stream.read(_CHUNK_BYTES):
            if ended():
                raise InterruptedError("the run has ended")
            connection.sendall(chunk)
        connection.settimeout(ANSWER_TIMEOUT_S)
        try:
            answer = _receive_message(connection, f"answer {nonce.hex()}")
        except TimeoutError:
            raise OSError(f"{address[0]} has not confirmed {name} within {ANSWER_TIMEOUT_S:g} s") from None
        _raise_refusal(answer)


def fetch_file(address: Address, name: str, path: Path, entry: Entry) -> None:
    """Fetch a file from another rank and verify it. Raises OSError if it is missing there, differs or breaks off."""
    with _connect(address) as connection:
        nonce = _receive_exactly(connection, _NONCE_BYTES)
        _send_message(connection, {"is_put": False, "name": name}, f"request {nonce.hex()}")
        answer = _receive_message(connection, f"answer {nonce.hex()}")
        _raise_refusal(answer)
        if answer["bytes"] != entry.bytes:
            raise OSError(f"{name} has {answer['bytes']} bytes on {address[0]}, instead of {entry.bytes}")
        _receive_file(connection, path, entry)


def _connect(address: Address) -> socket.socket:
    try:
        return socket.create_connection(address, STALL_TIMEOUT_S)
    except OSError as error:
        raise OSError(f"{address[0]}:{address[1]} cannot be reached: {error.strerror or error}") from None


def _raise_refusal(answer: dict[str, Any]) -> None:
    if text := answer.get("error"):
        raise OSError(text)


def _receive_file(connection: socket.socket, path: Path, entry: Entry) -> None:
    """Receive the contents of a file, which gets its name once they are complete and verified."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{secrets.token_hex(4)}.part")
    digest, missing, buffer = hashlib.sha256(), entry.bytes, memoryview(bytearray(_CHUNK_BYTES))
    try:
        with partial.open("wb") as stream:
            while missing:
                count = connection.recv_into(buffer, min(missing, _CHUNK_BYTES))
                if not count:
                    raise OSError(f"{path.name} broke off {missing} bytes before its end")
                stream.write(buffer[:count])
                digest.update(buffer[:count])
                missing -= count
            stream.flush()
            os.fsync(stream.fileno())
        if digest.hexdigest() != entry.sha256:
            raise OSError(f"{path.name} differs from its checksum after the transfer")
        partial.replace(path)
    finally:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)


def _send_message(connection: socket.socket, message: dict[str, Any], purpose: str) -> None:
    sealed = seal(json.dumps(message).encode(), purpose)
    connection.sendall(struct.pack("<I", len(sealed)) + sealed)


def _receive_message(connection: socket.socket, purpose: str) -> dict[str, Any]:
    """Receive a message of a rank of this job. Raises OSError for anything else."""
    (size,) = struct.unpack("<I", _receive_exactly(connection, 4))
    if size > _MAX_MESSAGE_BYTES:
        raise OSError("refused a message that was not sent by a rank of this job")
    try:
        message: dict[str, Any] = json.loads(bytes(unseal(_receive_exactly(connection, size), purpose)))
        return message
    except ForgedError as error:
        raise OSError(str(error)) from None


def _receive_exactly(connection: socket.socket, size: int) -> bytes:
    content = b""
    while len(content) < size:
        more = connection.recv(size - len(content))
        if not more:
            raise OSError("the other end closed the connection")
        content += more
    return content
