"""Links between the ranks on one machine: Unix sockets that carry file descriptors.

Host names cannot tell which ranks share a machine: two machines may share a name, and containers change it. Instead,
each rank tries to connect to every lower one over an abstract Unix socket, which exists within one kernel only.
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

_SECRET_BYTES = 16
_MAX_MESSAGE_BYTES = 1 << 16  # bytes of one message
_MAX_DESCRIPTORS = 250  # descriptors in one message; the kernel's limit is 253
_CONNECT_TIMEOUT_S = 10.0  # for sockets of this machine to answer during discovery


class NodeLinks:
    """Sockets to the other ranks on this machine. machines: the ranks of each machine of the group, ascending."""

    def __init__(self, rank: int, gather: Callable[[Any], list[Any]], may_share: Callable[[int], bool]) -> None:
        """Discover the ranks on this machine. Collective over the ranks of `gather`, which all-gathers a value.

        Ranks for which `may_share` is false are not tried.
        """
        self.sockets: dict[int, socket.socket] = {}
        name, secret = b"\0megarl" + secrets.token_bytes(_SECRET_BYTES), secrets.token_bytes(_SECRET_BYTES)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(name)
            listener.listen(4096)
            for other, (other_name, other_secret) in enumerate(gather((name, secret))[:rank]):
                if may_share(other):
                    self._connect(other, other_name, struct.pack("<q", rank) + other_secret)
            connected = gather(sorted(self.sockets))
            self._accept(listener, {other for other, lower in enumerate(connected) if rank in lower}, secret)
        self.machines = _group_by_machine(gather(sorted([rank, *self.sockets])))
        local_members = next(members for members in self.machines if rank in members)
        for other in set(self.sockets) - set(local_members):
            self.sockets.pop(other).close()
        for connection in self.sockets.values():
            connection.setblocking(False)  # two threads use it, each with its own timeout

    def _connect(self, other: int, name: bytes, message: bytes) -> None:
        """Connect to a rank, if it can be reached, with a message that identifies this rank."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection.settimeout(_CONNECT_TIMEOUT_S)
        try:
            connection.connect(name)
            if _is_same_user(connection):
                connection.send(message)
                self.sockets[other] = connection
                return
        except OSError:
            pass
        connection.close()

    def _accept(self, listener: socket.socket, missing: set[int], secret: bytes) -> None:
        """Accept connections of the ranks in `missing`, which know our secret, and of nobody else."""
        listener.settimeout(_CONNECT_TIMEOUT_S)
        while missing:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            other = -1
            if _is_same_user(connection):  # others' messages are not waited for
                connection.settimeout(_CONNECT_TIMEOUT_S)
                try:
                    message = connection.recv(_MAX_MESSAGE_BYTES)
                except OSError:
                    message = b""
                if secrets.compare_digest(message[8:], secret):
                    (other,) = struct.unpack("<q", message[:8])
            if other in missing:
                missing.remove(other)
                self.sockets[other] = connection
            else:
                connection.close()

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

        With a timeout of 0, returns None if there is no message.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            try:  # socket.recv_fds of Python 3.11 ignores its flags
                content, ancillary, _, _ = self.sockets[other].recvmsg(
                    _MAX_MESSAGE_BYTES, socket.CMSG_SPACE(4 * _MAX_DESCRIPTORS), socket.MSG_CMSG_CLOEXEC
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
        return json.loads(content), array.array("i", b"".join(data for _, _, data in ancillary)).tolist()

    def _wait(self, other: int, event: int, until: float, problem: str) -> None:
        poll = select.poll()
        poll.register(self.sockets[other], event)
        if not poll.poll(max(0.0, until - time.monotonic()) * 1000):
            raise TimeoutError(problem)

    def close(self) -> None:
        while self.sockets:
            self.sockets.popitem()[1].close()


def close_descriptors(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def _is_same_user(connection: socket.socket) -> bool:
    """Return whether the process at the other end belongs to this user."""
    size = struct.calcsize("3i")
    _, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return bool(user == os.getuid())


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
