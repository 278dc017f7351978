"""torchrun, but for its end: `.venv/bin/python -m megarl.torchrun [torchrun's options] -m megarl.train CONFIG ...`.

Torch's agent turns a signal into a traceback, ends ranks 30 seconds after it, reports every failure as status 1 in
dozens of lines, and leaves a folder in /tmp. Here ranks may take their time to save, and the end is that of
`ending.py`: one line on each node, one of the documented exit statuses.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import os
import select
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from megarl import launcher
from megarl.ending import SAME_S, name_of

_HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class _Watch(threading.Thread):
    """Passes signals on to the ranks and hears what they say, also while the agent waits in C++ for other nodes."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.words = launcher.Words()
        self.asked = 0
        self.logs = tempfile.mkdtemp(prefix="megarl-torchrun-")  # else the agent makes one, and leaves it
        self._again = False  # they have been asked twice
        self._deadline = float("inf")
        self._since: dict[int, float] = {}
        self._signals, write = os.pipe2(os.O_NONBLOCK)
        os.set_blocking(write, False)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        for number in _HANDLED:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, lambda *_: None)  # the byte in the pipe is what counts

    def run(self) -> None:
        while True:
            ready, _, _ = select.select([self._signals, self.words.fileno()], [], [], 0.2)
            if self._signals in ready:
                for number in os.read(self._signals, 64):
                    if number in _HANDLED:
                        self._pass_on(number)
            self.words.read()
            if time.monotonic() > self._deadline:
                _send(signal.SIGKILL)

    def _pass_on(self, number: int) -> None:
        if time.monotonic() - self._since.get(number, 0.0) < SAME_S:
            return
        self._since[number] = time.monotonic()
        if number == signal.SIGINT or self._again:
            self._deadline = min(self._deadline, time.monotonic() + launcher.GRACE_S)
            there = _send(signal.SIGINT)
        else:
            there = _send(number)  # by a second one ranks end, but for those that are writing a checkpoint
            self._again = self.asked != 0
        if self.asked != signal.SIGINT:
            self.asked = number
        if not there:
            print(f"ended by {name_of(number)}", file=sys.stderr, flush=True)
            self.tidy()
            os._exit(128 + number)

    def tidy(self) -> None:
        shutil.rmtree(self.logs, ignore_errors=True)


def _send(number: int) -> int:
    """To all processes that this one has started, which are the ranks; their number."""
    sent = 0
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):
            for pid in (task / "children").read_text().split():
                os.kill(int(pid), number)
                sent += 1
    return sent


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    from torch.distributed.run import parse_args

    with contextlib.redirect_stderr(io.StringIO()) as said:
        try:
            return parse_args(list(arguments))
        except SystemExit as leaving:
            if leaving.code == 0:
                raise
    raise ValueError(said.getvalue().strip().rpartition("error: ")[2])


def main(arguments: Sequence[str] | None = None) -> int:
    watch = _Watch()
    watch.start()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})  # Slurm sends it to all; it is for the ranks
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import run

    for name in ("torch.distributed.elastic", "torch.distributed.run"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    codes: dict[int, int] = {}
    try:
        options = _parse(sys.argv[1:] if arguments is None else arguments)
        options.log_dir = options.log_dir or watch.logs
        options.signals_to_handle = "SIGQUIT"
        options.shutdown_timeout = int(launcher.GRACE_S)
        os.environ.update(watch.words.environment)
        run(options)
        return 0
    except ChildFailedError as error:
        codes = {rank: failure.exitcode for rank, failure in error.failures.items()}
    except ValueError as error:
        print(f"error: torchrun: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
        return 2
    except Exception as error:
        text = f"the nodes did not come together: {type(error).__name__}: {' '.join(str(error).split())}"
        print(f"error: torchrun: {text}", file=sys.stderr, flush=True)
        return 1
    finally:
        watch.tidy()
    status, text = launcher.verdict(codes, list(watch.words.read()), watch.asked)
    if text:
        print(text, file=sys.stderr, flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main())
