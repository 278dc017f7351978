"""A torchrun with orderly shutdown and restarts: .venv/bin/python -m megarl.torchrun [options] -m megarl.train CONFIG

Torch's agent turns a signal into a traceback, kills ranks 30 seconds after it, and reports every failure as status 1 in
dozens of lines. Here ranks get time to save, `launch/restarts.py` decides on restarts, on all nodes alike
(`launch/nodes.py`), and each node ends with one line and an exit status of `launch/exit_status.py`.

MEGARL_SPARES=S starts S further nodes, with the numbers from --nnodes on, that replace nodes which fail.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import os
import re
import select
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from megarl import __version__
from megarl.launch import launcher
from megarl.launch.exit_status import signal_name
from megarl.launch.nodes import SPARES_ENV, MultiNode, NodeReport, decide_restart, parse_spares
from megarl.launch.restarts import RestartDecision, RestartPolicy, RestartTracker
from megarl.parallel.job_secret import SealedPickle, launcher_key
from megarl.processes import node
from megarl.processes.children import inherit_orphans, list_children
from megarl.processes.temp_folders import TempFolder

_FAILURE_POLL_S = 1.0
_HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class _AgentSupervisor(launcher.RankSupervisor):
    """Supervises the ranks that torch's agent has started, in a thread, because the agent waits in C++ for other nodes.

    Interrupts the local ranks once those of another node have failed; for local failures the agent does so.
    """

    def __init__(self) -> None:
        super().__init__()
        self.nodes: MultiNode | None = None
        """Nodes to watch for failures while an attempt runs."""
        self.log_folder = TempFolder("megarl-torchrun-")  # the agent would create one and leave it behind
        self._last_failure_check = 0.0
        self._signals, write = os.pipe2(os.O_NONBLOCK)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        for number in _HANDLED:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, lambda *_: None)  # only the byte in the wakeup pipe counts
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            if select.select([self._signals], [], [], 0.2)[0]:
                for number in os.read(self._signals, 64):
                    if number in _HANDLED:
                        has_ranks = bool(self.running_pids())
                        if self.forward_signal(number) and not has_ranks:
                            self.log_folder.close()
                            # Silence what follows: the agent's C++ wait reports its interruption there.
                            stderr = os.dup(2)
                            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
                            os.write(stderr, f"ended by {signal_name(number)}\n".encode())
                            os._exit(128 + number)
            self.poll()

    def running_pids(self) -> dict[int, int]:
        pids: dict[int, int] = {}
        for pid in list_children():  # all of them are ranks
            variables = b""
            with contextlib.suppress(OSError):  # it has exited
                variables = Path(f"/proc/{pid}/environ").read_bytes()
            match = re.search(rb"(?:^|\0)RANK=(\d+)", variables)
            pids[int(match[1]) if match else -pid] = pid
        return pids

    def has_failed_rank(self) -> bool:
        now = time.monotonic()
        if self.nodes is None or now - self._last_failure_check < _FAILURE_POLL_S:
            return False
        self._last_failure_check = now
        try:
            return self.nodes.has_remote_failure()
        except RuntimeError:  # node 0 is gone; the peers of its ranks notice
            return False


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
    supervisor = _AgentSupervisor()
    # Slurm sends SIGUSR1 to every process; only the ranks handle it.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        if list(arguments[:1]) in (["-V"], ["--version"]):
            print(f"MegaRL {__version__}")
            return 0
        options = _parse(arguments)
        options.log_dir = options.log_dir or supervisor.log_folder.path
        options.signals_to_handle = "SIGQUIT"
        options.shutdown_timeout = int(launcher.GRACE_S)
        return _run_with_restarts(options, supervisor)
    except ValueError as error:
        print(f"error: torchrun: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
        return 2
    except Exception as error:
        print(f"error: torchrun: {_rendezvous_error(error)}", file=sys.stderr, flush=True)
        return 1
    finally:
        supervisor.log_folder.close()


def _run_with_restarts(options: argparse.Namespace, supervisor: _AgentSupervisor) -> int:
    from megarl.parallel.rendezvous import serve_local_store

    is_static, count = options.rdzv_backend == "static", int(str(options.nnodes).rpartition(":")[2])
    spares = parse_spares(os.environ.get(SPARES_ENV, ""))
    may_restart = is_static or options.standalone  # with other rendezvous backends, nodes do not hear of each other
    tracker, nodes = RestartTracker(), None
    if is_static and count > 1 and not options.standalone:
        nodes = MultiNode(int(options.node_rank), count, options.master_addr, int(options.master_port), spares)
    elif spares:
        raise ValueError(f"{SPARES_ENV}={spares} needs several nodes, and torchrun's default --rdzv-backend")

    def attempt(environment: Mapping[str, str]) -> tuple[NodeReport | None, RestartPolicy | None]:
        if nodes is not None:
            if nodes.node_rank is None:
                return None, None  # a spare
            options.node_rank = nodes.node_rank
        os.environ.update({**supervisor.messages.environment, **environment})
        supervisor.begin_attempt()
        with contextlib.ExitStack() as stack:
            if nodes is None and may_restart:
                os.environ.update(stack.enter_context(serve_local_store()))
            port = options.master_port if nodes is None else nodes.agree_port()
            supervisor.nodes = nodes
            report = _run_attempt(options, port, supervisor, node.get_name(nodes.node_rank if nodes else None))
        supervisor.nodes, supervisor.notice_deadline = None, float("inf")  # the ranks have exited
        if nodes is not None and report.has_failed:
            nodes.announce_failure()
        is_deciding = int(options.node_rank) == 0 and may_restart  # node 0 is never replaced
        return report, supervisor.messages.restart_policy() if is_deciding else None

    def decide(report: NodeReport | None, policy: RestartPolicy | None) -> RestartDecision:
        return decide_restart(tracker, [report], policy) if nodes is None else nodes.decide_next(report, policy)

    return launcher.run_with_restarts(attempt, decide)  # a signal between two attempts ends this process


def _run_attempt(options: argparse.Namespace, port: int, supervisor: _AgentSupervisor, name: str) -> NodeReport:
    """Run the ranks of this node once and wait until they have exited."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous
    from torch.distributed.run import run

    for logger in ("torch.distributed.elastic", "torch.distributed.run"):
        logging.getLogger(logger).setLevel(logging.CRITICAL)
    # With `--rdzv-backend=c10d` the agents of several nodes exchange pickles.
    vars(dynamic_rendezvous)["pickle"] = SealedPickle("rendezvous", launcher_key())
    codes: dict[int, int] = {}
    problem, has_succeeded = "", False
    try:
        run(argparse.Namespace(**{**vars(options), "master_port": port}))
        has_succeeded = True
    except ChildFailedError as error:
        first_failure = min(failure.timestamp for failure in error.failures.values())
        for rank, failure in error.failures.items():
            ended_by_us = supervisor.killed or failure.timestamp >= first_failure + launcher.GRACE_S - 1
            if failure.exitcode != -signal.SIGKILL or not ended_by_us:
                codes[rank] = failure.exitcode
    except ValueError:
        raise
    except Exception as error:
        problem = _rendezvous_error(error)
    ranks_per_node = int(options.nproc_per_node) if str(options.nproc_per_node).isdigit() else 0
    first_rank = ranks_per_node * int(options.node_rank)
    ranks = tuple(range(first_rank, first_rank + ranks_per_node))
    messages = tuple(supervisor.messages.read())
    return NodeReport(name, has_succeeded, codes, messages, supervisor.stop_signal, problem, ranks)


def _rendezvous_error(error: Exception) -> str:
    return f"the nodes did not join: {type(error).__name__}: {' '.join(str(error).split())}"


if __name__ == "__main__":
    sys.exit(main())
