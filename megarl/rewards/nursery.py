"""Forks the processes that reward functions run in: `python -m megarl.rewards.nursery FD PARENT TIMEOUT SPEC ...`.

What they need is imported here, once, so that one that has to be replaced is there at once; the functions' own modules
are imported in each of them, for not all that a module does when it is imported survives a fork. FD is a socket, on
which {"number", "kind"} comes with the end of another that the process is to serve; {"number", "status"} goes back when
it has ended.

Each is two processes: one that watches over the one that it forks, in which the functions are. As subreaper the first
inherits whatever a function leaves behind, daemons with a session of their own included. When the other end of the
socket is closed, which the kernel does for a rank that was killed, or when the functions' process ends, all of that is
killed before the first is gone.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import socket
import sys
import time
import traceback

import numpy as np

from megarl.rewards.calls import Kind, serve
from megarl.rollout.engine_host import die_with_parent

_PR_SET_CHILD_SUBREAPER = 36
_LOOK_MS = 50
_END_LIMIT_S = 5.0


def main(orders: socket.socket, parent: int, limit: float, specs: list[str]) -> None:
    _inherit_orphans()
    signal.signal(signal.SIGTERM, _nothing)  # Slurm sends it to all; the rank says when this is over
    children: dict[int, int] = {}  # the number of each, by its pid
    poll = select.poll()
    poll.register(orders, select.POLLIN)
    # No signal at the rank's death, which might come in the middle of killing what the processes have left behind.
    while os.getppid() == parent:
        if poll.poll(_LOOK_MS):
            order, files, _, _ = socket.recv_fds(orders, 4096, 1)
            if not order:
                break
            said = json.loads(order)
            wire = socket.socket(fileno=files[0])
            wire.set_inheritable(False)
            pid = os.fork()
            if pid == 0:
                orders.close()
                _watch_over(wire, said["kind"], specs, limit)
            wire.close()
            children[pid] = said["number"]
        for pid, status in _ended():
            if pid in children:
                _kill(set(_own()) - children.keys())  # left by one that was killed itself
                with contextlib.suppress(OSError):
                    orders.send(json.dumps({"number": children.pop(pid), "status": status}).encode())
    _end_all(_END_LIMIT_S)
    os._exit(0)  # without the second that tearing down what was imported takes


def _watch_over(wire: socket.socket, kind: Kind, specs: list[str], limit: float) -> None:
    """Never comes back."""
    code = 1
    try:
        _inherit_orphans()
        own = os.getpid()
        worker = os.fork()
        if worker == 0:
            _work(wire, kind, specs, limit, own)
        poll = select.poll()
        poll.register(wire, 0)  # that the other end was closed
        poll.register(os.pidfd_open(worker), select.POLLIN)
        poll.poll()
        code = dict(_ended()).get(worker, 0)
    except BaseException:  # noqa: B036  whatever it is, this must not go on as its parent
        traceback.print_exc()
    finally:
        _end_all(_END_LIMIT_S)
        os._exit(code)


def _work(wire: socket.socket, kind: Kind, specs: list[str], limit: float, parent: int) -> None:
    """Never comes back."""
    code = 1
    try:
        die_with_parent(parent)
        nowhere = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nowhere, 0)
        np.random.seed()  # else all have the same; Python's own is seeded anew
        serve(wire, kind, specs, limit)
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


def _inherit_orphans() -> None:
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _nothing(number: int, frame: object) -> None:
    """Not SIG_IGN, which programs that a function starts would inherit."""


def _own() -> list[int]:
    with open(f"/proc/self/task/{os.getpid()}/children") as listing:
        return [int(pid) for pid in listing.read().split()]


def _ended() -> list[tuple[int, int]]:
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


def _end_all(seconds: float) -> None:
    """Kill the children, and theirs as they arrive here, until none is left or time is up."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and (pids := set(_own())):
        _kill(pids)
        _ended()
        time.sleep(0.002)


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]), float(sys.argv[3]), sys.argv[4:])
