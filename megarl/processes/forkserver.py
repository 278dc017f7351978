"""Fork worker processes for user code: `python -m megarl.processes.forkserver FD PARENT MODULE:SERVE SHARED_ARGS`.

The module of SERVE is imported here once; SERVE loads the user's modules itself, because not everything that an import
does survives a fork. FD is a socket that receives {"number", "order"} with one end of a socket for the worker, and
sends {"number", "status"} when it has ended. Each worker is two processes: a supervisor, and the process that it forks
for the code. The supervisor adopts every orphan, and kills all of them once the inner process or the rank has ended.
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
from collections.abc import Callable, Iterable
from typing import Any

from megarl.config import plugins
from megarl.processes.children import (
    apply_limits,
    die_with_parent,
    ignore_signals,
    inherit_orphans,
    is_tracker,
    list_children,
)

ServeFunction = Callable[[socket.socket, dict[str, Any], dict[str, Any]], None]
"""Called as `serve(wire, shared_args, order)`. shared_args: {"memory_mb", "preload"} and what `serve` needs."""
MAX_OUTPUT_BYTES, OUTPUT_BYTES_PER_S = 1 << 18, 1 << 12
"""Maximum bytes of a worker's logged output, and the additional bytes that it may print per second of its life."""
_LOOK_MS = 50
_END_LIMIT_S = 5.0
_TRACKER_GRACE_S = 2.0


def main(orders: socket.socket, parent: int, serve: ServeFunction, shared_args: dict[str, Any]) -> None:
    inherit_orphans()
    ignore_signals(signal.SIGTERM)  # Slurm sends it to all processes; the rank decides when to stop
    children: dict[int, int] = {}  # worker numbers by pid
    poll = select.poll()
    poll.register(orders, select.POLLIN)
    # Poll for the rank's death: a parent-death signal could interrupt the killing of what the workers left behind.
    while os.getppid() == parent:
        if poll.poll(_LOOK_MS):
            order, files, _, _ = socket.recv_fds(orders, 1 << 16, 1)
            if not order:
                break
            message = json.loads(order)
            wire = socket.socket(fileno=files[0])
            wire.set_inheritable(False)
            pid = os.fork()
            if pid == 0:
                orders.close()
                _supervise(wire, serve, shared_args, message["order"])
            wire.close()
            children[pid] = message["number"]
        for pid, status in _reap():
            if pid in children:
                _kill(set(list_children()) - children.keys())  # orphans of a killed supervisor
                with contextlib.suppress(OSError):
                    orders.send(json.dumps({"number": children.pop(pid), "status": status}).encode())
    _end_all(_END_LIMIT_S)
    os._exit(0)  # skips interpreter teardown, which takes a second


def _supervise(wire: socket.socket, serve: ServeFunction, shared_args: dict[str, Any], order: dict[str, Any]) -> None:
    """Run one worker and clean up after it. Never returns."""
    code = 1
    try:
        inherit_orphans()
        supervisor = os.getpid()
        read_end, write_end = os.pipe()
        worker = os.fork()
        if worker == 0:
            os.close(read_end)
            _run_worker(wire, serve, shared_args, order, supervisor, write_end)
        os.close(write_end)
        os.set_blocking(read_end, False)
        worker_fd = os.pidfd_open(worker)
        poll = select.poll()
        poll.register(wire, 0)  # hang-up only
        poll.register(worker_fd, select.POLLIN)
        poll.register(read_end, select.POLLIN)
        forwarder = _OutputForwarder(read_end)
        while True:
            events = dict(poll.poll())
            if read_end in events and not forwarder.forward():
                poll.unregister(read_end)
            if worker_fd in events or wire.fileno() in events:
                break
        for _ in range(4):  # drain the pipe; bounded, because a daemon may keep filling it
            forwarder.forward()
        code = dict(_reap()).get(worker, 0)
    except BaseException:  # noqa: B036  never continue in the parent's code
        traceback.print_exc()
    finally:
        _end_all(_END_LIMIT_S)
        os._exit(code)


class _OutputForwarder:
    """Forwards a worker's output from a pipe to the log, up to a limit."""

    def __init__(self, fd: int) -> None:
        self._fd, self._start, self._num_written, self._is_complete = fd, time.monotonic(), 0, True

    def forward(self) -> bool:
        """Forward the next part. Returns False once every writer has closed the pipe."""
        try:
            part = os.read(self._fd, 1 << 16)
        except BlockingIOError:
            return True
        limit = MAX_OUTPUT_BYTES + int(OUTPUT_BYTES_PER_S * (time.monotonic() - self._start))
        accepted = part[: max(0, limit - self._num_written)]
        with contextlib.suppress(OSError):  # disk full
            if accepted:
                os.write(2, accepted)
            if self._is_complete and len(accepted) < len(part):
                os.write(2, b"\n--- it prints too much: this is not all of it\n")
        self._num_written += len(accepted)
        self._is_complete = len(accepted) == len(part)
        return bool(part)


def _run_worker(
    wire: socket.socket,
    serve: ServeFunction,
    shared_args: dict[str, Any],
    order: dict[str, Any],
    parent: int,
    log_fd: int,
) -> None:
    """Run the code in the inner process. Never returns."""
    code = 1
    try:
        die_with_parent(parent)
        devnull = os.open(os.devnull, os.O_RDONLY)
        for file, fd in ((devnull, 0), (log_fd, 1), (log_fd, 2)):
            os.dup2(file, fd)
        os.close(devnull)
        os.close(log_fd)
        sys.stdout, sys.stderr = (
            os.fdopen(fd, "w", buffering=1, errors="backslashreplace", closefd=False) for fd in (1, 2)
        )
        apply_limits(int(shared_args.get("memory_mb", 0)))
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed()  # forks would share its state; Python reseeds its own generator
        serve(wire, shared_args, order)
        code = 0
    except (BrokenPipeError, ConnectionResetError):  # the rank has exited
        pass
    except BaseException:  # noqa: B036
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _reap() -> list[tuple[int, int]]:
    """Return (pid, exit status) of ended children; the status is 128 plus the number for a signal."""
    ended = []
    with contextlib.suppress(ChildProcessError):
        while (waited := os.waitpid(-1, os.WNOHANG))[0]:
            code = os.waitstatus_to_exitcode(waited[1])
            ended.append((waited[0], code if code >= 0 else 128 - code))
    return ended


def _kill(pids: Iterable[int], trackers: bool = False) -> None:
    """Kill processes, resource trackers only if asked to."""
    for pid in pids:
        with contextlib.suppress(OSError):
            if trackers or not is_tracker(pid):
                os.kill(pid, signal.SIGKILL)


def _end_all(seconds: float) -> None:
    """Kill the children, and orphans as they are adopted, until none is left or `seconds` have passed."""
    # Resource trackers get a grace period, in which they clean up shared memory and exit by themselves.
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and (pids := list_children()):
        _kill(pids, trackers=time.monotonic() > deadline - seconds + _TRACKER_GRACE_S)
        _reap()
        time.sleep(0.002)


if __name__ == "__main__":
    file, rank, spec, text = sys.argv[1:]
    shared_args = json.loads(text)
    for module in shared_args.get("preload", ()):
        with contextlib.suppress(Exception):
            importlib.import_module(module)
    main(socket.socket(fileno=int(file)), int(rank), plugins.load(spec, "MODULE:SERVE"), shared_args)
