"""A torchrun with orderly shutdown and restarts: .venv/bin/python -m megarl.torchrun [options] -m megarl.train CONFIG

Torch's agent turns a signal into a traceback, kills ranks 30 seconds after it, reports every failure as status 1 in
dozens of lines, and leaves a folder in /tmp. Here ranks get time to save, `launch/restarts.py` decides on restarts, on
all nodes alike (`launch/nodes.py`), and each node ends with one line and an exit status of `launch/exit_status.py`.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import io
import logging
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from megarl import __version__
from megarl.launch import launcher
from megarl.launch.exit_status import RESTART_COUNT_ENV, SIGNAL_DEBOUNCE_S, signal_name
from megarl.launch.launcher import StoppedRankMonitor
from megarl.launch.nodes import MultiNode, NodeReport, SingleNode, node_name
from megarl.launch.restarts import append_to_log
from megarl.parallel.job_secret import SealedPickle, launcher_key
from megarl.processes.children import end_orphans, inherit_orphans, list_children
from megarl.processes.temp_folders import TempFolder

_FAILURE_POLL_S = 1.0
_HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class _SignalForwarder(threading.Thread):
    """Forward signals to the ranks and read their messages, also while the agent waits in C++ for other nodes.

    Also interrupts the local ranks once those of another node have failed.
    """

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.messages = launcher.RankMessages()
        self.stop_signal = 0
        self.has_killed = False
        self.has_remote_failure: Callable[[], bool] = bool  # on another node
        self.log_folder = TempFolder("megarl-torchrun-")  # the agent would create one and leave it behind
        self._is_asked_twice = False  # two stop signals have been forwarded
        self._deadline = float("inf")
        self._notice_deadline = float("inf")
        self._last_signal_times: dict[int, float] = {}
        self._stopped_monitor = StoppedRankMonitor()
        self._signals, write = os.pipe2(os.O_NONBLOCK)
        os.set_blocking(write, False)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        for number in _HANDLED:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, lambda *_: None)  # only the byte in the wakeup pipe counts

    def begin_attempt(self, has_failed: Callable[[], bool]) -> None:
        """Reset the state for ranks that start now."""
        self.messages.clear()
        self.has_killed, self._deadline, self._notice_deadline = False, float("inf"), float("inf")
        self._stopped_monitor = StoppedRankMonitor()
        self.has_remote_failure = has_failed

    def end_attempt(self) -> None:
        """Stop watching for remote failures: the ranks have exited."""
        self.has_remote_failure, self._notice_deadline = bool, float("inf")

    def run(self) -> None:
        last_poll = 0.0
        while True:
            if select.select([self._signals], [], [], 0.2)[0]:
                for number in os.read(self._signals, 64):
                    if number in _HANDLED:
                        self._forward(number)
            self.messages.read()
            self.messages.add_late(self._stopped_monitor.poll(_find_rank_pids, self.messages.restart_policy()))
            now = time.monotonic()
            if now - last_poll > _FAILURE_POLL_S and self._notice_deadline == float("inf"):
                last_poll = now
                with contextlib.suppress(RuntimeError):  # node 0 is gone; the peers of its ranks notice
                    self._notice_deadline = now + launcher.NOTICE_S if self.has_remote_failure() else float("inf")
            if now > self._notice_deadline and self._deadline == float("inf"):
                self._interrupt_all()
            if now > self._deadline:
                self.has_killed = True
                _signal_ranks(signal.SIGKILL)

    def _interrupt_all(self) -> int:
        self._deadline = min(self._deadline, time.monotonic() + launcher.GRACE_S)
        return _signal_ranks(signal.SIGINT)

    def _forward(self, signum: int) -> None:
        if time.monotonic() - self._last_signal_times.get(signum, 0.0) < SIGNAL_DEBOUNCE_S:
            return
        self._last_signal_times[signum] = time.monotonic()
        if signum == signal.SIGINT or self._is_asked_twice:
            num_signaled = self._interrupt_all()
        else:
            num_signaled = _signal_ranks(signum)  # a second one ends ranks, except those writing a checkpoint
            self._is_asked_twice = self.stop_signal != 0
        if self.stop_signal != signal.SIGINT:
            self.stop_signal = signum
        if not num_signaled:
            self.log_folder.close()
            _write_final_line(f"ended by {signal_name(signum)}")
            os._exit(128 + signum)


def _write_final_line(text: str) -> None:
    """Write the last line to stderr and silence what follows: the agent's C++ wait reports its interruption there."""
    stderr = os.dup(2)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    os.write(stderr, f"{text}\n".encode())


def _signal_ranks(signum: int) -> int:
    """Send a signal to all child processes, which are the ranks. Return their number."""
    sent = 0
    for pid in list_children():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signum)
            sent += 1
    return sent


def _find_rank_pids() -> dict[int, int]:
    """Return the pids of the ranks that this process has started, by rank."""
    pids: dict[int, int] = {}
    for pid in list_children():
        with contextlib.suppress(OSError):  # it has exited
            variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            pids |= {int(variable[5:]): pid for variable in variables if variable.startswith(b"RANK=")}
    return pids


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    from torch.distributed.run import parse_args

    with contextlib.redirect_stderr(io.StringIO()) as stderr:
        try:
            return parse_args(list(arguments))
        except SystemExit as exit_request:
            if exit_request.code == 0:
                raise
    raise ValueError(stderr.getvalue().strip().rpartition("error: ")[2])


def main(arguments: Sequence[str] | None = None) -> int:
    inherit_orphans()
    forwarder = _SignalForwarder()
    forwarder.start()
    signal.pthread_sigmask(
        signal.SIG_BLOCK, {signal.SIGUSR1}
    )  # Slurm sends it to every process; only the ranks handle it
    try:
        if list(sys.argv[1:] if arguments is None else arguments)[:1] in (["-V"], ["--version"]):
            print(f"MegaRL {__version__}")
            return 0
        options = _parse(sys.argv[1:] if arguments is None else arguments)
        options.log_dir = options.log_dir or forwarder.log_folder.path
        options.signals_to_handle = "SIGQUIT"
        options.shutdown_timeout = int(launcher.GRACE_S)
        return _run_with_restarts(options, forwarder)
    except ValueError as error:
        print(f"error: torchrun: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
        return 2
    except Exception as error:
        print(f"error: torchrun: {_rendezvous_error(error)}", file=sys.stderr, flush=True)
        return 1
    finally:
        forwarder.log_folder.close()


def _run_with_restarts(options: argparse.Namespace, forwarder: _SignalForwarder) -> int:
    """Do what `launcher.run_with_restarts` does, on each node."""
    from megarl.parallel.rendezvous import serve_local_store

    nodes, static = _join_nodes(options), options.rdzv_backend == "static" or options.standalone
    number, attempt = int(options.node_rank), 0
    while True:
        os.environ.update({**forwarder.messages.environment, RESTART_COUNT_ENV: str(attempt)})
        forwarder.begin_attempt(lambda: nodes.has_remote_failure(attempt))  # noqa: B023  called within this attempt only
        with contextlib.ExitStack() as stack:
            if static and nodes.num_nodes == 1:
                os.environ.update(stack.enter_context(serve_local_store()))
            port = nodes.agree_port(attempt, options.master_port)
            report = _run_attempt(options, port, forwarder, node_name(number, nodes.num_nodes))
        forwarder.end_attempt()
        if report.has_failed:
            nodes.announce_failure(attempt)
        end_orphans((), launcher.ORPHAN_TIMEOUT_S)
        # With other rendezvous backends, nodes do not hear of each other.
        decision = nodes.decide_next(attempt, report, forwarder.messages.restart_policy() if static else None)
        if decision.text:
            print(decision.text, file=sys.stderr, flush=True)
        if not decision.should_restart:
            return decision.status
        if number == 0:
            append_to_log(forwarder.messages.restart_policy(), decision.text.splitlines()[-1])
        time.sleep(decision.wait_s)  # a signal during the wait ends this process
        attempt += 1


def _join_nodes(options: argparse.Namespace) -> SingleNode:
    count = int(str(options.nnodes).rpartition(":")[2])
    if count == 1 or options.standalone or options.rdzv_backend != "static":
        return SingleNode()
    return MultiNode(int(options.node_rank), count, options.master_addr, int(options.master_port))


def _run_attempt(options: argparse.Namespace, port: int, forwarder: _SignalForwarder, name: str) -> NodeReport:
    """Run the ranks of this node once and wait until they have exited."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous
    from torch.distributed.run import run

    for logger in ("torch.distributed.elastic", "torch.distributed.run"):
        logging.getLogger(logger).setLevel(logging.CRITICAL)
    # With `--rdzv-backend=c10d` the agents of several nodes exchange pickles.
    vars(dynamic_rendezvous)["pickle"] = SealedPickle("rendezvous", launcher_key())
    attempt_options = copy.copy(options)
    attempt_options.master_port = port
    codes: dict[int, int] = {}
    problem = ""
    succeeded = False
    try:
        run(attempt_options)
        succeeded = True
    except ChildFailedError as error:
        first_failure = min(failure.timestamp for failure in error.failures.values())
        codes = {rank: failure.exitcode for rank, failure in error.failures.items()}
        for rank, failure in error.failures.items():
            ended_by_us = forwarder.has_killed or failure.timestamp >= first_failure + launcher.GRACE_S - 1
            if failure.exitcode == -signal.SIGKILL and ended_by_us:
                del codes[rank]
    except ValueError:
        raise
    except Exception as error:
        problem = _rendezvous_error(error)
    ranks_per_node = int(options.nproc_per_node) if str(options.nproc_per_node).isdigit() else 0
    first_rank = ranks_per_node * int(options.node_rank)
    ranks = tuple(range(first_rank, first_rank + ranks_per_node))
    return NodeReport(name, succeeded, codes, tuple(forwarder.messages.read()), forwarder.stop_signal, problem, ranks)


def _rendezvous_error(error: Exception) -> str:
    return f"the nodes did not join: {type(error).__name__}: {' '.join(str(error).split())}"


if __name__ == "__main__":
    sys.exit(main())
