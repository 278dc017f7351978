"""Coordination between the launchers of a job's nodes: failures of ranks, and the joint decision to restart.

They meet in a store that node 0's launcher serves at MASTER_ADDR:MASTER_PORT for the whole job, and node 0 decides for
all. The store authenticates nobody, so messages are JSON with a keyed hash of the shared secret.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

from megarl.launch import launcher
from megarl.launch.exit_status import REQUEUE_EXIT_CODE, RunOutcome
from megarl.launch.restarts import RestartDecision, RestartPolicy, RestartTracker
from megarl.parallel.job_secret import launcher_key, seal, unseal
from megarl.utils.addresses import free_port

JOIN_TIMEOUT_S = 900.0
"""Seconds that nodes may take to join the store; as in torchrun's own rendezvous."""
REPORT_TIMEOUT_S = launcher.NOTICE_S + launcher.GRACE_S + launcher.ORPHAN_TIMEOUT_S + 30.0
"""Seconds that a node may take to report, once the ranks of another have ended."""
EXCLUDE_NODE_ENV = "MEGARL_LEAVE_OUT"
"""Environment variable: a file that receives the name of a node that a start elsewhere should avoid."""
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
    """One of several nodes. Raises torch.distributed's errors if they cannot join the store."""

    def __init__(self, number: int, count: int, address: str, port: int) -> None:
        self.node_rank, self.num_nodes, self._address, self._port = number, count, address, port
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

    def _publish(self, name: str, text: str) -> None:
        self._store.set(name, seal(text.encode(), f"{self._port} {name}", self._key))

    def _fetch(self, name: str) -> str:
        """Read a message. Raises ForgedError, a RuntimeError, if no launcher of this job has written it."""
        return bytes(unseal(self._store.get(name), f"{self._port} {name}", self._key)).decode()

    def agree_port(self) -> int:
        """Return the port at which the ranks of this attempt meet."""
        if self.node_rank == 0:
            self._publish(f"{self.attempt}/port", str(free_port()))
        return int(self._fetch(f"{self.attempt}/port"))

    def announce_failure(self) -> None:
        """Announce to the other nodes that ranks have failed on this one."""
        self._store.set(f"{self.attempt}/failed", str(self.node_rank))

    def has_remote_failure(self) -> bool:
        """Return whether ranks of another node have failed. Callable from one thread besides the main one."""
        self._watch_store = self._watch_store or self._connect()  # a store connection serves one thread
        return bool(self._watch_store.check([f"{self.attempt}/failed"]))

    def decide_next(self, report: NodeReport, policy: RestartPolicy | None) -> RestartDecision:
        """Return what follows an attempt that has ended on this node; the same on all nodes."""
        try:
            decision = self._decide_together(f"{self.attempt}/next", report, policy)
        except RuntimeError as error:
            reason = " ".join(str(error).split("\n")[0].split())
            return RestartDecision(False, 1, f"error: the launcher of node number 0 no longer responds: {reason}")
        self.attempt += 1
        return decision

    def _decide_together(self, key: str, report: NodeReport, policy: RestartPolicy | None) -> RestartDecision:
        """Decide on node 0 for all nodes, by the key in the store."""
        self._publish(f"{self.attempt}/{self.node_rank}/ended", report.to_json())
        if self.node_rank == 0:
            names = [f"{self.attempt}/{number}/ended" for number in range(self.num_nodes)]
            self._wait_for_keys(names, REPORT_TIMEOUT_S)
            reports = [NodeReport.from_json(self._fetch(name)) if self._store.check([name]) else None for name in names]
            decision = decide_restart(self._restarts, reports, policy)
            if (file := os.environ.get(EXCLUDE_NODE_ENV)) and decision.exclude_node:
                Path(file).write_text(decision.exclude_node + "\n")
            self._publish(key, json.dumps(decision))
            responsive = [number for number in range(1, self.num_nodes) if reports[number]]
            self._wait_for_keys([f"{self.attempt}/{number}/heard" for number in responsive], _ACK_TIMEOUT_S)
            return decision
        # Node 0 may have ended later, and waited for a third node.
        self._wait_for_keys([key], 2 * REPORT_TIMEOUT_S + _ACK_TIMEOUT_S)
        if not self._store.check([key]):
            return RestartDecision(False, 1, "error: the launcher of node number 0 sent no decision")
        decision = RestartDecision(*json.loads(self._fetch(key)))
        self._store.set(f"{self.attempt}/{self.node_rank}/heard", "")
        return decision

    def _wait_for_keys(self, names: Sequence[str], limit: float) -> None:
        deadline = time.monotonic() + limit
        while not all(self._store.check([name]) for name in names) and time.monotonic() < deadline:
            time.sleep(_POLL_S)


def decide_restart(
    tracker: RestartTracker, reports: Sequence[NodeReport | None], policy: RestartPolicy | None
) -> RestartDecision:
    """Decide what follows the ends on all nodes."""
    outcome, failed_node = combine_reports(reports)
    if None in reports:  # that node cannot restart
        return RestartDecision(False, outcome.status, outcome.text, exclude_node=failed_node)
    return tracker.decide(outcome, policy, failed_node)


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
