"""Links between the ranks on one machine: Unix sockets that carry file descriptors.

Host names cannot tell which ranks share a machine: two machines may share a name, and containers change it. Instead,
each rank tries to reach every other over a Unix socket and to read, from memory passed over it, a secret that it knows
from the group. Abstract sockets leave no file behind and close however their process ends. Receiving a descriptor needs
neither a common PID namespace nor permission to inspect the other process.
"""

from __future__ import annotations

import array
import errno
import json
import os
import secrets
import select
import socket
import struct
import time
from collections.abc import Callable, Sequence
from typing import Any

from megarl.parallel import shared_memory

_SECRET_BYTES = 16
_MAX_MESSAGE_BYTES = 1 << 16  # bytes of one message
_MAX_DESCRIPTORS = 250  # descriptors in one message; the kernel's limit is 253
_CONNECT_TIMEOUT_S = 10.0  # for sockets of this machine to answer during discovery

Gather = Callable[[Any], list[Any]]


class NodeLinks:
    """Sockets to the other ranks on this machine. machines: the ranks of each machine of the group, ascending."""

    def __init__(self, rank: int, gather: Gather, may_share: Callable[[int], bool]) -> None:
        """Discover the ranks on this machine. Collective over the ranks of `gather`, which all-gathers a value.

        Ranks for which `may_share` is false are not tried.
        """
        self.sockets: dict[int, socket.socket] = {}
        secret, name = secrets.token_bytes(_SECRET_BYTES), b"\0megarl" + secrets.token_bytes(_SECRET_BYTES)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(name)
            listener.listen(4096)
            peers = gather((name, secret))
            connected = self._connect(rank, peers, may_share)
            calling = [
                other for other, peers_of_other in enumerate(gather(sorted(connected))) if rank in peers_of_other
            ]
            self._accept(listener, rank, peers, calling)
            for other in connected:
                try:
                    is_verified = _has_secret(_receive(self.sockets[other])[1], peers[other][1])
                except OSError:
                    is_verified = False
                if not is_verified:
                    self._disconnect(other)
        self.machines = _group_by_machine(gather(sorted([rank, *self.sockets])))
        local_members = next(members for members in self.machines if rank in members)
        for other in set(self.sockets) - set(local_members):
            self._disconnect(other)
        for connection in self.sockets.values():
            connection.setblocking(False)  # two threads use it, each with its own timeout

    def _connect(
        self, rank: int, addresses: Sequence[tuple[bytes, bytes]], may_share: Callable[[int], bool]
    ) -> list[int]:
        """Connect to lower ranks that can be reached, and pass each the memory with our secret."""
        for other, (name, peer_secret) in enumerate(addresses[:rank]):
            if not may_share(other):
                continue
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            connection.settimeout(_CONNECT_TIMEOUT_S)
            try:
                connection.connect(name)
                self.sockets[other] = connection
                self._send_secret(other, struct.pack("<q", rank) + peer_secret, addresses[rank][1])
            except OSError:
                self.sockets.pop(other, connection).close()
        return list(self.sockets)

    def _accept(
        self, listener: socket.socket, rank: int, addresses: Sequence[tuple[bytes, bytes]], calling: Sequence[int]
    ) -> None:
        """Accept connections of the ranks in `calling`, and of nobody else."""
        listener.settimeout(_CONNECT_TIMEOUT_S)
        missing = set(calling)
        while missing:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            if not _is_same_user(connection):
                connection.close()
                continue
            connection.settimeout(_CONNECT_TIMEOUT_S)
            try:
                content, descriptors = _receive(connection)
            except OSError:
                content, descriptors = b"", []
            other = struct.unpack("<q", content[:8])[0] if content[8:] == addresses[rank][1] else -1
            if other in missing and _has_secret(descriptors, addresses[other][1]):
                missing.remove(other)
                self.sockets[other] = connection
                self._send_secret(other, b"here", addresses[rank][1])
            else:
                connection.close()

    def _send_secret(self, other: int, message: bytes, secret: bytes) -> None:
        descriptor = shared_memory.create(_SECRET_BYTES)
        try:
            os.pwrite(descriptor, secret, 0)
            socket.send_fds(self.sockets[other], [message], [descriptor])
        finally:
            os.close(descriptor)

    def _disconnect(self, other: int) -> None:
        self.sockets.pop(other).close()

    def send(self, other: int, message: Any, descriptors: Sequence[int], timeout_s: float) -> None:
        """Send a neighbor a small JSON value and memory descriptors. Blocks only if hundreds of messages lie unread."""
        content, deadline = json.dumps(message).encode(), time.monotonic() + timeout_s
        while True:
            try:
                socket.send_fds(self.sockets[other], [content], descriptors)
                return
            except BlockingIOError:
                self._wait(other, select.POLLOUT, deadline, f"rank {other} read nothing for {timeout_s:.0f} s")
            except OSError as error:
                if error.errno != errno.ETOOMANYREFS or time.monotonic() > deadline:
                    raise ConnectionError(f"rank {other} disconnected: {error.strerror}") from None
                time.sleep(0.001)  # ETOOMANYREFS: too many descriptors of this process are in flight

    def receive(self, other: int, timeout_s: float) -> tuple[Any, list[int]] | None:
        """Return a neighbor's next message and its descriptors, which the caller closes.

        With a patience of 0, returns None if there is no message.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                content, descriptors, _, _ = socket.recv_fds(
                    self.sockets[other], _MAX_MESSAGE_BYTES, _MAX_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC
                )
                break
            except BlockingIOError:
                if not timeout_s:
                    return None
                self._wait(other, select.POLLIN, deadline, f"rank {other} sent nothing for {timeout_s:.0f} s")
            except OSError as error:
                raise ConnectionError(f"rank {other} disconnected: {error.strerror}") from None
        if not content:
            raise ConnectionError(f"rank {other} disconnected: it closed its socket")
        return json.loads(content), descriptors

    def _wait(self, other: int, event: int, until: float, problem: str) -> None:
        poll = select.poll()
        poll.register(self.sockets[other], event)
        if not poll.poll(max(0.0, until - time.monotonic()) * 1000):
            raise TimeoutError(problem)

    def close(self) -> None:
        for other in list(self.sockets):
            self._disconnect(other)


def close_descriptors(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def _is_same_user(connection: socket.socket) -> bool:
    """Return whether a process of this user has connected; others' messages would be waited for."""
    size = struct.calcsize("3i")
    _, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return bool(user == os.getuid())


def _receive(connection: socket.socket) -> tuple[bytes, list[int]]:
    """Read one message. socket.recv_fds of Python 3.11 ignores its flags, so it cannot be used."""
    message, ancillary, _, _ = connection.recvmsg(
        _MAX_MESSAGE_BYTES, socket.CMSG_SPACE(4 * _MAX_DESCRIPTORS), socket.MSG_CMSG_CLOEXEC
    )
    descriptors = array.array("i")
    for _, _, content in ancillary:
        descriptors.frombytes(content)
    return message, descriptors.tolist()


def _has_secret(descriptors: Sequence[int], secret: bytes) -> bool:
    """Return whether the single passed memory holds the secret, and close it."""
    try:
        return len(descriptors) == 1 and bytes(shared_memory.attach(descriptors[0]).numpy()) == secret
    except OSError:
        return False
    finally:
        close_descriptors(descriptors)


def _group_by_machine(reached: Sequence[Sequence[int]]) -> list[list[int]]:
    """Group ranks that have all reached exactly each other; any other rank is a machine of its own."""
    machines = []
    for rank, others in enumerate(reached):
        if all(list(reached[other]) == list(others) for other in others):
            if others[0] == rank:
                machines.append(list(others))
        else:
            machines.append([rank])
    return machines
