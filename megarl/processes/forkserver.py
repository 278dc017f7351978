"""Forks processes that run somebody else's code: `python -m megarl.processes.forkserver FD PARENT MODULE:SERVE GIVEN`.

What they need is imported here, once, so that one that has to be replaced is there at once: the module of SERVE, which
is called in each as `serve(wire, given, order)`, and loads the user's own, for not all that a module does when it is
imported survives a fork. GIVEN is JSON, the same for all: {"memory_mb"} and whatever `serve` wants. FD is a socket, on
which {"number", "order"} comes with the end of another that the process is to serve; {"number", "status"} goes back
when it has ended.

Each is two processes: one that watches over the one that it forks, in which the code is. As subreaper the first
inherits whatever is left behind, daemons with a session of their own included. When the other end of the socket is
closed, which the kernel does for a rank that was killed, or when the inner process ends, all of that is killed before
the first is gone. What they print goes through it into the log, so much at most of each.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

from megarl.config import plugins
from megarl.processes.children import die_with_parent, inherit_orphans, is_tracker
from megarl.processes.process_limits import apply_limits

ServeFunction = Callable[[socket.socket, dict[str, Any], dict[str, Any]], None]
MAX_OUTPUT_BYTES, OUTPUT_BYTES_PER_S = 1 << 18, 1 << 12
"""Bytes of what a process prints that are kept, and those that it may print for each second that it lives besides."""
_LOOK_MS = 50
_END_LIMIT_S = 5.0
_TRACKER_GRACE_S = 2.0


def main(orders: socket.socket, parent: int, serve: ServeFunction, given: dict[str, Any]) -> None:
    inherit_orphans()
    signal.signal(signal.SIGTERM, _ignore_signal)  # Slurm sends it to all; the rank says when this is over
    children: dict[int, int] = {}  # the number of each, by its pid
    poll = select.poll()
    poll.register(orders, select.POLLIN)
    # No signal at the rank's death, which might come in the middle of killing what the processes have left behind.
    while os.getppid() == parent:
        if poll.poll(_LOOK_MS):
            order, files, _, _ = socket.recv_fds(orders, 1 << 16, 1)
            if not order:
                break
            said = json.loads(order)
            wire = socket.socket(fileno=files[0])
            wire.set_inheritable(False)
            pid = os.fork()
            if pid == 0:
                orders.close()
                _supervise(wire, serve, given, said["order"])
            wire.close()
            children[pid] = said["number"]
        for pid, status in _reap():
            if pid in children:
                _kill(_drop_trackers(set(_list_children()) - children.keys()))  # left by one that was killed itself
                with contextlib.suppress(OSError):
                    orders.send(json.dumps({"number": children.pop(pid), "status": status}).encode())
    _end_all(_END_LIMIT_S)
    os._exit(0)  # without the second that tearing down what was imported takes


def _supervise(wire: socket.socket, serve: ServeFunction, given: dict[str, Any], order: dict[str, Any]) -> None:
    """Never comes back."""
    code = 1
    try:
        inherit_orphans()
        own = os.getpid()
        reading, writing = os.pipe()
        worker = os.fork()
        if worker == 0:
            os.close(reading)
            _run_worker(wire, serve, given, order, own, writing)
        os.close(writing)
        os.set_blocking(reading, False)
        end = os.pidfd_open(worker)
        poll = select.poll()
        poll.register(wire, 0)  # that the other end was closed
        poll.register(end, select.POLLIN)
        poll.register(reading, select.POLLIN)
        printed = _OutputForwarder(reading)
        while True:
            found = dict(poll.poll())
            if reading in found and not printed.forward():
                poll.unregister(reading)
            if end in found or wire.fileno() in found:
                break
        for _ in range(4):  # what is in the pipe yet; a daemon may go on filling it
            printed.forward()
        code = dict(_reap()).get(worker, 0)
    except BaseException:  # noqa: B036  whatever it is, this must not go on as its parent
        traceback.print_exc()
    finally:
        _end_all(_END_LIMIT_S)
        os._exit(code)


class _OutputForwarder:
    """What a process prints, from a pipe into the log."""

    def __init__(self, reading: int) -> None:
        self._reading, self._began, self._written, self._is_complete = reading, time.monotonic(), 0, True

    def forward(self) -> bool:
        """The next part; False where whoever could print has closed it."""
        try:
            part = os.read(self._reading, 1 << 16)
        except BlockingIOError:
            return True
        allowed = MAX_OUTPUT_BYTES + int(OUTPUT_BYTES_PER_S * (time.monotonic() - self._began)) - self._written
        own = part[: max(0, allowed)]
        with contextlib.suppress(OSError):  # a disk that is full
            if own:
                os.write(2, own)
            if self._is_complete and len(own) < len(part):
                os.write(2, b"\n--- it prints too much: this is not all of it\n")
        self._written += len(own)
        self._is_complete = len(own) == len(part)
        return bool(part)


def _run_worker(
    wire: socket.socket, serve: ServeFunction, given: dict[str, Any], order: dict[str, Any], parent: int, log: int
) -> None:
    """Never comes back."""
    code = 1
    try:
        die_with_parent(parent)
        nowhere = os.open(os.devnull, os.O_RDONLY)
        for file, place in ((nowhere, 0), (log, 1), (log, 2)):
            os.dup2(file, place)
        os.close(nowhere)
        os.close(log)
        sys.stdout, sys.stderr = (
            os.fdopen(place, "w", buffering=1, errors="backslashreplace", closefd=False) for place in (1, 2)
        )
        apply_limits(int(given.get("memory_mb", 0)))
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed()  # else all have the same; Python's own is seeded anew
        serve(wire, given, order)
        code = 0
    except (BrokenPipeError, ConnectionResetError):  # the rank has gone
        pass
    except BaseException:  # noqa: B036
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _ignore_signal(number: int, frame: object) -> None:
    """Not SIG_IGN, which programs that the code starts would inherit."""


def _list_children() -> list[int]:
    with open(f"/proc/self/task/{os.getpid()}/children") as listing:
        return [int(pid) for pid in listing.read().split()]


def _reap() -> list[tuple[int, int]]:
    """(pid, exit status) of children that have ended; of one that a signal ended 128 and its number."""
    found = []
    with contextlib.suppress(ChildProcessError):
        while (one := os.waitpid(-1, os.WNOHANG))[0]:
            code = os.waitstatus_to_exitcode(one[1])
            found.append((one[0], code if code >= 0 else 128 - code))
    return found


def _kill(pids: set[int]) -> None:
    for pid in pids:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)


def _drop_trackers(pids: set[int]) -> set[int]:
    return {pid for pid in pids if not is_tracker(pid)}


def _end_all(seconds: float) -> None:
    """Kill the children, and theirs as they arrive here, until none is left or time is up; those that remove what the
    others leave in shared memory only after a moment, in which they end by themselves."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and (pids := set(_list_children())):
        _kill(pids if time.monotonic() > deadline - seconds + _TRACKER_GRACE_S else _drop_trackers(pids))
        _reap()
        time.sleep(0.002)


if __name__ == "__main__":
    file, rank, spec, text = sys.argv[1:]
    given = json.loads(text)
    for module in given.get("preload", ()):
        with contextlib.suppress(Exception):
            importlib.import_module(module)
    main(socket.socket(fileno=int(file)), int(rank), plugins.load(spec, "MODULE:SERVE"), given)
