"""Coordination between the launchers of a job's nodes: failures of ranks, and the joint decision to restart.

They meet in a store that node 0's launcher serves at MASTER_ADDR:MASTER_PORT for the whole job, and node 0 decides for
all. The store authenticates nobody, so messages are JSON with a keyed hash of the shared secret.

Launchers are numbered. The first ones run ranks; those of spare nodes wait until they take the place of another.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

from megarl.config import ConfigError
from megarl.launch import launcher
from megarl.launch.exit_status import REQUEUE_EXIT_CODE, RunOutcome
from megarl.launch.restarts import RestartDecision, RestartPolicy, RestartTracker
from megarl.parallel.job_secret import launcher_key, seal, unseal
from megarl.processes.node import get_name
from megarl.utils.addresses import free_port

JOIN_TIMEOUT_S = 900.0
"""Seconds that nodes may take to join the store; as in torchrun's own rendezvous."""
REPORT_TIMEOUT_S = launcher.NOTICE_S + launcher.GRACE_S + launcher.ORPHAN_TIMEOUT_S + 30.0
"""Seconds that a node may take to report, once the ranks of another have ended."""
EXCLUDE_NODE_ENV = "MEGARL_LEAVE_OUT"
"""Environment variable: a file that receives the name of a node that a start elsewhere should avoid."""
STATUS_ENV = "MEGARL_STATUS"
"""Environment variable: a file that receives the run's exit status, which lost nodes cannot report."""
SPARES_ENV = "MEGARL_SPARES"
"""Environment variable: the number of spare nodes."""
_POLL_S = 0.1
_ACK_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class NodeReport:
    """How the ranks of one node have ended, see `launcher.determine_outcome`. problem: error of torchrun itself."""

    node: str
    has_succeeded: bool = False
    codes: dict[int, int] = field(default_factory=dict)
    words: tuple[launcher.RankMessage, ...] = ()
    stop_signal: int = 0
    problem: str = ""
    ranks: tuple[int, ...] = ()
    """Ranks of this node, as far as known."""

    @property
    def has_failed(self) -> bool:
        """Whether ranks of other nodes must end, too; those that were asked to stop do so by themselves."""
        return bool(self.problem) or any(code not in (0, REQUEUE_EXIT_CODE) for code in self.codes.values())

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> NodeReport:
        tree = json.loads(text)
        tree["codes"] = {int(rank): code for rank, code in tree["codes"].items()}
        tree["words"] = tuple(launcher.RankMessage(**message) for message in tree["words"])
        return NodeReport(**tree | {"ranks": tuple(tree["ranks"])})


class MultiNode:
    """One of several nodes. Raises torch.distributed's errors if they cannot join the store.

    number: of this launcher, below `count + spares`. count: number of nodes that run ranks.
    """

    def __init__(self, number: int, count: int, address: str, port: int, spares: int = 0) -> None:
        self._number, self._address, self._port = number, address, port
        self._active = list(range(count))  # numbers of the launchers that run ranks, by node rank
        self._spares = list(range(count, count + spares))
        self._listeners = set(range(1, count + spares))  # numbers that node 0 waits for before it ends
        self.attempt = 0
        """Number of the current start of all ranks."""
        self._restarts = RestartTracker()
        self._key = launcher_key()
        self._store = self._connect(is_server=number == 0)
        self._watch_store: Any = None

    def _connect(self, is_server: bool = False) -> Any:
        import torch.distributed as dist

        from megarl.parallel import rendezvous

        timeout = timedelta(seconds=JOIN_TIMEOUT_S)
        if is_server:
            return rendezvous.serve_store(self._address, self._port, None, timeout, wait=False)
        return dist.TCPStore(self._address, self._port, is_master=False, timeout=timeout, wait_for_workers=False)

    @property
    def node_rank(self) -> int | None:
        """Rank of this node in the current attempt; None for a node without ranks, a spare or a replaced one."""
        return self._active.index(self._number) if self._number in self._active else None

    def _publish(self, name: str, text: str) -> None:
        self._store.set(name, seal(text.encode(), f"{self._port} {name}", self._key))

    def _fetch(self, name: str) -> str:
        """Read a message. Raises ForgedError, a RuntimeError, if no launcher of this job has written it."""
        return bytes(unseal(self._store.get(name), f"{self._port} {name}", self._key)).decode()

    def agree_port(self) -> int:
        """Return the port at which the ranks of this attempt meet."""
        if self._number == 0:
            self._publish(f"{self.attempt}/port", str(free_port()))
        return int(self._fetch(f"{self.attempt}/port"))

    def announce_failure(self) -> None:
        """Announce to the other nodes that ranks have failed on this one."""
        self._store.set(f"{self.attempt}/failed", str(self._number))

    def has_remote_failure(self) -> bool:
        """Return whether ranks of another node have failed. Callable from one thread besides the main one."""
        self._watch_store = self._watch_store or self._connect()  # a store connection serves one thread
        return bool(self._watch_store.check([f"{self.attempt}/failed"]))

    def decide_next(self, report: NodeReport | None, policy: RestartPolicy | None) -> RestartDecision:
        """Return what follows an attempt that has ended on this node; the same on all nodes.

        report: None on a node without ranks, which waits here until the attempt has ended on the others.
        """
        try:
            key = f"{self.attempt}/next"
            decision = self._decide_for_all(key, report, policy) if self._number == 0 else self._hear(key, report)
        except RuntimeError as error:
            reason = " ".join(str(error).split("\n")[0].split())
            return RestartDecision(False, 1, f"error: the launcher of node number 0 no longer responds: {reason}")
        self.attempt += 1
        return decision

    def _decide_for_all(self, key: str, report: NodeReport | None, policy: RestartPolicy | None) -> RestartDecision:
        """Decide, and publish the decision with the nodes of the next attempt."""
        self._publish(self._end_key(0), (report or NodeReport("")).to_json())
        self._wait_for_keys([self._end_key(number) for number in self._active], REPORT_TIMEOUT_S)
        names = [self._end_key(number) for number in self._active]
        reports = [NodeReport.from_json(self._fetch(name)) if self._store.check([name]) else None for name in names]
        self._listeners -= {number for number, report in zip(self._active, reports, strict=True) if report is None}
        if None in reports:
            self.announce_failure()  # perhaps nobody else has noticed
        if self._has_failed():
            self._drop_silent_spares()
        decision = decide_restart(self._restarts, reports, policy, len(self._spares))
        if decision.should_restart:
            decision = self._replace_nodes(reports, decision)
        self._publish(key, json.dumps([decision, self._active, self._spares]))
        if decision.exclude_node:
            _write_for_scheduler(EXCLUDE_NODE_ENV, decision.exclude_node)
        if not decision.should_restart:
            _write_for_scheduler(STATUS_ENV, str(decision.status))
        self._wait_for_keys([f"{self.attempt}/{number}/heard" for number in self._listeners], _ACK_TIMEOUT_S)
        return decision

    def _drop_silent_spares(self) -> None:
        self._wait_for_keys([self._end_key(number) for number in self._spares], _ACK_TIMEOUT_S)
        silent = [number for number in self._spares if not self._store.check([self._end_key(number)])]
        self._listeners -= set(silent)
        self._spares = [number for number in self._spares if number not in silent]

    def _replace_nodes(self, reports: Sequence[NodeReport | None], decision: RestartDecision) -> RestartDecision:
        """Give the place of each node that is gone, or failed repeatedly, to a spare, and say so."""
        for node_rank, report in enumerate(reports):
            if report is None or (decision.exclude_node and report.node == decision.exclude_node):
                self._active[node_rank] = spare = self._spares.pop(0)
                name = NodeReport.from_json(self._fetch(self._end_key(spare))).node
                replaced = f"node number {node_rank}" if report is None else f"node {report.node}"
                decision = decision._replace(text=f"{decision.text}; {replaced} is replaced by the spare node {name}")
        return decision

    def _hear(self, key: str, report: NodeReport | None) -> RestartDecision:
        """Report to node 0, and wait for its decision."""
        if report is None:
            self._wait_without_ranks(key)
        else:
            self._publish(self._end_key(self._number), report.to_json())
            # Node 0 may have ended later, and waited for a third node and spares.
            self._wait_for_keys([key], 2 * REPORT_TIMEOUT_S + 2 * _ACK_TIMEOUT_S)
        if not self._store.check([key]):
            return RestartDecision(False, 1, "error: the launcher of node number 0 sent no decision")
        decision, self._active, self._spares = json.loads(self._fetch(key))
        self._store.set(f"{self.attempt}/{self._number}/heard", "")
        return RestartDecision(*decision)

    def _wait_without_ranks(self, key: str) -> None:
        """Wait for a decision, and respond once ranks have failed: node 0 then needs to know who can replace a node."""
        has_responded = False
        while not self._store.check([key]):
            if not has_responded and self._has_failed():
                self._publish(self._end_key(self._number), NodeReport(get_name(self._number)).to_json())
                has_responded = True
            time.sleep(_POLL_S)

    def _has_failed(self) -> bool:
        return bool(self._store.check([f"{self.attempt}/failed"]))

    def _end_key(self, number: int) -> str:
        return f"{self.attempt}/{number}/ended"

    def _wait_for_keys(self, names: Sequence[str], limit: float) -> None:
        deadline = time.monotonic() + limit
        while not all(self._store.check([name]) for name in names) and time.monotonic() < deadline:
            time.sleep(_POLL_S)


def _write_for_scheduler(variable: str, text: str) -> None:
    """Write a line to the file that an environment variable names, if it does."""
    if file := os.environ.get(variable):
        try:
            Path(file).write_text(text + "\n")
        except OSError as error:
            print(f"warning: {variable}={file} cannot be written: {error}", file=sys.stderr, flush=True)


def parse_spares(text: str) -> int:
    """Return the number of spare nodes that MEGARL_SPARES states, 0 if it is empty. Raises ConfigError."""
    if text and not text.isdecimal():
        raise ConfigError(f"{SPARES_ENV}={text} must be the number of spare nodes")
    return int(text or 0)


def decide_restart(
    tracker: RestartTracker, reports: Sequence[NodeReport | None], policy: RestartPolicy | None, spares: int = 0
) -> RestartDecision:
    """Decide what follows the ends on all nodes. A decision to restart that names a node replaces it by a spare, as it
    does each node without a report. spares: number of nodes that can replace others, but not the first, which decides.
    """
    outcome, failed_node = combine_reports(reports)
    spares -= reports.count(None)
    if spares < 0:  # a node that is gone cannot restart
        return RestartDecision(False, outcome.status, outcome.text, exclude_node=failed_node)
    is_first = reports[0] is not None and failed_node == reports[0].node
    return tracker.decide(outcome, policy, failed_node, can_replace=spares > 0 and not is_first)


def combine_reports(reports: Sequence[NodeReport | None]) -> tuple[RunOutcome, str]:
    """Combine the nodes' reports (None for a node that does not respond) to an outcome and the node that caused it."""
    received = [report for report in reports if report is not None]
    silent = [number for number, report in enumerate(reports) if report is None]
    if not silent and all(report.has_succeeded for report in received):
        return RunOutcome(0, "", "done"), ""
    codes = {rank: code for report in received for rank, code in report.codes.items()}
    messages = [message for report in received for message in report.words]
    node_of_rank = {rank: report.node for report in received for rank in (*report.codes, *report.ranks)}
    location_of_rank = {rank: f"node {name}" for rank, name in node_of_rank.items() if len(reports) > 1}
    stop_signal = next((report.stop_signal for report in received if report.stop_signal), 0)
    outcome = launcher.determine_outcome(codes, messages, stop_signal, location_of_rank)
    problems = [report.problem for report in received if report.problem]
    if problems and not codes:
        outcome = RunOutcome(1, f"error: torchrun: {problems[0]}", "lost")
    if silent and outcome.kind == "lost":
        return RunOutcome(1, f"error: the launcher of node number {silent[0]} does not respond", "lost"), ""
    return outcome, node_of_rank.get(outcome.rank, "")
