"""Stands between a rank and its SGLang server: `python -m megarl.rollout.engine_process`.

The rank must not be the server's parent, because SGLang kills its parent's whole process tree when a start fails;
and the server must not outlive the rank, however the rank dies. So this small process (no torch, no SGLang) starts
the server in a session of its own and ends it when the pipe from the rank closes, which the kernel does for a rank
that was killed, too. As subreaper it inherits whatever the server leaves behind, so nothing escapes.

stdin: one line of JSON {"parent", "log", "settings"}, then open for as long as the engine shall live. The exit
status is the server's.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent dies; exits at once if `parent` (a pid) is already gone."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def _children() -> list[int]:
    with open(f"/proc/self/task/{os.getpid()}/children") as listing:
        return [int(pid) for pid in listing.read().split()]


def _is_tracker(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as command:
            return b"resource_tracker" in command.read()
    except OSError:
        return False


def _end_all() -> None:
    """Kill the children, and theirs as they arrive here, until none is left.

    Python's resource trackers are given a moment: they end by themselves after the others, and only they remove the
    semaphores that the others leave in shared memory.
    """
    grace = time.monotonic() + 5.0
    while children := _children():
        for pid in children:
            if time.monotonic() > grace or not _is_tracker(pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.01)


def main() -> int:
    order = json.loads(sys.stdin.readline())
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    scratch = tempfile.mkdtemp(prefix="engine-")  # SGLang leaves its sockets behind when it is killed
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        with open(order["log"], "ab") as log:
            server = subprocess.Popen(
                [sys.executable, "-m", "megarl.rollout.engine_server"],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=dict(os.environ, TMPDIR=scratch),
            )
            assert server.stdin is not None
            server.stdin.write(json.dumps(dict(order["settings"], parent=os.getpid())).encode())
            server.stdin.close()
        while server.poll() is None:
            closed, _, _ = select.select([sys.stdin], [], [], 0.5)
            if closed or os.getppid() != order["parent"]:
                return 0
        time.sleep(0.2)  # let its last lines reach the log
        return server.returncode if server.returncode > 0 else 128 - server.returncode
    finally:
        _end_all()
        shutil.rmtree(scratch, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
