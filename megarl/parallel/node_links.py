"""The ranks on this machine: found by opening each other's memory, and spoken to over sockets that carry descriptors.

Who is on the same machine is not asked of names, which two machines may share and containers change: each rank tries
to reach every other over a Unix socket and reads, in memory that it is handed there, a secret that it knows from the
group. A socket without a name in the file system has nothing to clean up, and closes when its process ends, however it
does. To be handed a descriptor takes neither a common process namespace nor a right to look into the other process.
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
_MAX_MESSAGE_BYTES = 1 << 16  # bytes of one letter
_MAX_DESCRIPTORS = 250  # descriptors in one letter; the kernel takes 253
_CONNECT_TIMEOUT_S = 10.0  # for a socket of this machine to answer, when ranks look for each other

Gather = Callable[[Any], list[Any]]


class NodeLinks:
    """Sockets to the other ranks on this machine. `machines`: the ranks of each machine, ascending, of all ranks."""

    def __init__(self, rank: int, gather: Gather, may_share: Callable[[int], bool]) -> None:
        """Collective over the ranks of `gather`, which brings every rank's value to all; with those for which
        `may_share` is false no sharing is tried."""
        self.sockets: dict[int, socket.socket] = {}
        secret, name = secrets.token_bytes(_SECRET_BYTES), b"\0megarl" + secrets.token_bytes(_SECRET_BYTES)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(name)
            listener.listen(4096)
            known = gather((name, secret))
            called = self._connect(rank, known, may_share)
            calling = [other for other, theirs in enumerate(gather(sorted(called))) if rank in theirs]
            self._accept(listener, rank, known, calling)
            for other in called:
                try:
                    proved = _has_secret(_receive(self.sockets[other])[1], known[other][1])
                except OSError:
                    proved = False
                if not proved:
                    self._disconnect(other)
        self.machines = _group_by_machine(gather(sorted([rank, *self.sockets])))
        mine = next(members for members in self.machines if rank in members)
        for other in set(self.sockets) - set(mine):
            self._disconnect(other)
        for connection in self.sockets.values():
            connection.setblocking(False)  # two threads use it, each with a patience of its own

    def _connect(self, rank: int, known: Sequence[tuple[bytes, bytes]], may_share: Callable[[int], bool]) -> list[int]:
        """Connect to those of lower rank that are to be reached, and hand each the memory with our secret."""
        for other, (name, theirs) in enumerate(known[:rank]):
            if not may_share(other):
                continue
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            connection.settimeout(_CONNECT_TIMEOUT_S)
            try:
                connection.connect(name)
                self.sockets[other] = connection
                self._send_secret(other, struct.pack("<q", rank) + theirs, known[rank][1])
            except OSError:
                self.sockets.pop(other, connection).close()
        return list(self.sockets)

    def _accept(
        self, listener: socket.socket, rank: int, known: Sequence[tuple[bytes, bytes]], calling: Sequence[int]
    ) -> None:
        """Take in the ranks of `calling`, who have connected, and nobody else."""
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
                said, descriptors = _receive(connection)
            except OSError:
                said, descriptors = b"", []
            other = struct.unpack("<q", said[:8])[0] if said[8:] == known[rank][1] else -1
            if other in missing and _has_secret(descriptors, known[other][1]):
                missing.remove(other)
                self.sockets[other] = connection
                self._send_secret(other, b"here", known[rank][1])
            else:
                connection.close()

    def _send_secret(self, other: int, said: bytes, secret: bytes) -> None:
        descriptor = shared_memory.create(_SECRET_BYTES)
        try:
            os.pwrite(descriptor, secret, 0)
            socket.send_fds(self.sockets[other], [said], [descriptor])
        finally:
            os.close(descriptor)

    def _disconnect(self, other: int) -> None:
        self.sockets.pop(other).close()

    def send(self, other: int, letter: Any, descriptors: Sequence[int], patience_s: float) -> None:
        """Hand a neighbour a small value that JSON can hold, and memory. Returns at once, unless hundreds of letters
        lie there unread."""
        said, until = json.dumps(letter).encode(), time.monotonic() + patience_s
        while True:
            try:
                socket.send_fds(self.sockets[other], [said], descriptors)
                return
            except BlockingIOError:
                self._wait(other, select.POLLOUT, until, f"rank {other} has read nothing for {patience_s:.0f} s")
            except OSError as error:
                if error.errno != errno.ETOOMANYREFS or time.monotonic() > until:
                    raise ConnectionError(f"rank {other} is gone: {error.strerror}") from None
                time.sleep(0.001)  # as many descriptors as this process may have open are on their way

    def receive(self, other: int, patience_s: float) -> tuple[Any, list[int]] | None:
        """The next value of a neighbour and descriptors of its memory; whoever asks closes them. With patience 0: None
        where there is nothing."""
        until = time.monotonic() + patience_s
        while True:
            try:
                said, descriptors, _, _ = socket.recv_fds(
                    self.sockets[other], _MAX_MESSAGE_BYTES, _MAX_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC
                )
                break
            except BlockingIOError:
                if not patience_s:
                    return None
                self._wait(other, select.POLLIN, until, f"rank {other} has sent nothing for {patience_s:.0f} s")
            except OSError as error:
                raise ConnectionError(f"rank {other} is gone: {error.strerror}") from None
        if not said:
            raise ConnectionError(f"rank {other} is gone: it has closed its socket")
        return json.loads(said), descriptors

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
    """Whether a process of this user has connected; another's would be waited for."""
    size = struct.calcsize("3i")
    _, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return bool(user == os.getuid())


def _receive(connection: socket.socket) -> tuple[bytes, list[int]]:
    """What lies in a socket. Not socket.recv_fds, which in Python 3.11 leaves out the flags that it is given."""
    said, ancillary, _, _ = connection.recvmsg(
        _MAX_MESSAGE_BYTES, socket.CMSG_SPACE(4 * _MAX_DESCRIPTORS), socket.MSG_CMSG_CLOEXEC
    )
    descriptors = array.array("i")
    for _, _, content in ancillary:
        descriptors.frombytes(content)
    return said, descriptors.tolist()


def _has_secret(descriptors: Sequence[int], secret: bytes) -> bool:
    """Whether the one memory that was handed over, which is closed, has a secret in it."""
    try:
        return len(descriptors) == 1 and bytes(shared_memory.attach(descriptors[0]).numpy()) == secret
    except OSError:
        return False
    finally:
        close_descriptors(descriptors)


def _group_by_machine(reached: Sequence[Sequence[int]]) -> list[list[int]]:
    """Machines: ranks that have all reached exactly each other; a rank of which that is not true is alone."""
    machines = []
    for rank, others in enumerate(reached):
        if all(list(reached[other]) == list(others) for other in others):
            if others[0] == rank:
                machines.append(list(others))
        else:
            machines.append([rank])
    return machines
