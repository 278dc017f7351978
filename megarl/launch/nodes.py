"""What the launchers of a job's nodes tell each other: that its ranks have failed on one of them, and what comes next.

They meet in a store that node 0's launcher keeps at MASTER_ADDR:MASTER_PORT for as long as the job lasts; ranks meet
elsewhere each time that they start, where node 0 says. Node 0 hears how the ranks of each node have ended, and decides
for all. The store asks nobody who he is: what they say is JSON, sealed by the secret that they share.
"""

from __future__ import annotations

import json
import os
import socket
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
from megarl.processes import node

JOIN_TIMEOUT_S = 900.0
"""How long nodes may take to come to the store; as torchrun's own rendezvous."""
REPORT_TIMEOUT_S = launcher.NOTICE_S + launcher.GRACE_S + launcher.ORPHAN_TIMEOUT_S + 30.0
"""How long a node may take to say how its ranks have ended, once those of another have."""
EXCLUDE_NODE_ENV = "MEGARL_LEAVE_OUT"
"""Environment variable with a file that gets the name of a node that a start elsewhere should be without."""
_POLL_S = 0.1
_ACK_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class NodeReport:
    """How the ranks of a node have ended. codes, words, asked: as of `launcher.verdict`. problem: what torchrun itself
    has failed of."""

    node: str
    has_succeeded: bool = False
    codes: dict[int, int] = field(default_factory=dict)
    words: tuple[launcher.RankMessage, ...] = ()
    stop_signal: int = 0
    problem: str = ""
    ranks: tuple[int, ...] = ()
    """Of this node, as far as that is known."""

    @property
    def has_failed(self) -> bool:
        """Whether ranks of other nodes are to end, too; they do by themselves where all were asked to stop."""
        return bool(self.problem) or any(code not in (0, REQUEUE_EXIT_CODE) for code in self.codes.values())

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> NodeReport:
        said = json.loads(text)
        said["codes"] = {int(rank): code for rank, code in said["codes"].items()}
        said["words"] = tuple(launcher.RankMessage(**word) for word in said["words"])
        return NodeReport(**{**said, "ranks": tuple(said["ranks"])})


class SingleNode:
    """One node, which decides for itself. rules: what the run has said of itself, see `launcher.Words`."""

    num_nodes = 1

    def __init__(self) -> None:
        self.restarts = RestartTracker()

    def agree_port(self, attempt: int, given: int) -> int:
        return given

    def announce_failure(self, attempt: int) -> None:
        """Tell the others that ranks have failed here."""

    def has_remote_failure(self, attempt: int) -> bool:
        """Whether ranks have failed on some other node. For one thread beside the main one."""
        return False

    def decide_next(self, attempt: int, own: NodeReport, rules: RestartPolicy | None) -> RestartDecision:
        """What comes after an attempt, which has ended here; the same on all nodes."""
        return self._decide([own], rules)

    def _decide(self, reports: Sequence[NodeReport | None], rules: RestartPolicy | None) -> RestartDecision:
        end, where = combine_reports(reports)
        if None in reports:
            return RestartDecision(False, end.status, end.text, exclude_node=where)  # it is not there to start again
        return self.restarts.decide(end, rules, where)


class MultiNode(SingleNode):
    """One of several nodes. Raises what torch.distributed does where they do not come together."""

    def __init__(self, number: int, count: int, address: str, port: int) -> None:
        super().__init__()
        self.node_rank, self.num_nodes, self._address = number, count, address
        self._key = launcher_key()
        self._store = self._connect(port, keeps=number == 0)
        self._watch_store: Any = None
        self._port = port

    def _connect(self, port: int, keeps: bool = False) -> Any:
        import torch.distributed as dist

        from megarl.parallel import rendezvous

        limit = timedelta(seconds=JOIN_TIMEOUT_S)
        if keeps:
            return rendezvous.serve_store(self._address, port, None, limit, wait=False)
        return dist.TCPStore(self._address, port, is_master=False, timeout=limit, wait_for_workers=False)

    def _publish(self, name: str, text: str) -> None:
        self._store.set(name, seal(text.encode(), f"{self._port} {name}", self._key))

    def _fetch(self, name: str) -> str:
        """Raises ForgedError, a RuntimeError, for what no launcher of this job has said."""
        return bytes(unseal(self._store.get(name), f"{self._port} {name}", self._key)).decode()

    def agree_port(self, attempt: int, given: int) -> int:
        if self.node_rank == 0:
            with socket.socket() as probe:
                probe.bind(("", 0))
                self._publish(f"{attempt}/port", str(probe.getsockname()[1]))
        return int(self._fetch(f"{attempt}/port"))

    def announce_failure(self, attempt: int) -> None:
        self._store.set(f"{attempt}/failed", str(self.node_rank))

    def has_remote_failure(self, attempt: int) -> bool:
        self._watch_store = self._watch_store or self._connect(self._port)  # one is for one thread
        return bool(self._watch_store.check([f"{attempt}/failed"]))

    def decide_next(self, attempt: int, own: NodeReport, rules: RestartPolicy | None) -> RestartDecision:
        try:
            return self._decide_together(attempt, own, rules)
        except RuntimeError as error:
            said = " ".join(str(error).split("\n")[0].split())
            return RestartDecision(False, 1, f"error: the launcher of node number 0 does not answer any more: {said}")

    def _decide_together(self, attempt: int, own: NodeReport, rules: RestartPolicy | None) -> RestartDecision:
        self._publish(f"{attempt}/{self.node_rank}/ended", own.to_json())
        if self.node_rank == 0:
            names = [f"{attempt}/{number}/ended" for number in range(self.num_nodes)]
            self._wait_for_keys(names, REPORT_TIMEOUT_S)
            found = [NodeReport.from_json(self._fetch(name)) if self._store.check([name]) else None for name in names]
            after = self._decide(found, rules)
            _write_excluded_node(after)
            self._publish(f"{attempt}/next", json.dumps(after))
            self._wait_for_keys(
                [f"{attempt}/{number}/heard" for number in range(1, self.num_nodes) if found[number]], _ACK_TIMEOUT_S
            )
            return after
        self._wait_for_keys(
            [f"{attempt}/next"], 2 * REPORT_TIMEOUT_S + _ACK_TIMEOUT_S
        )  # it may have ended later, and waited for a third
        if not self._store.check([f"{attempt}/next"]):
            return RestartDecision(False, 1, "error: the launcher of node number 0 does not say what comes next")
        after = RestartDecision(*json.loads(self._fetch(f"{attempt}/next")))
        self._store.set(f"{attempt}/{self.node_rank}/heard", "")
        return after

    def _wait_for_keys(self, names: Sequence[str], limit: float) -> None:
        deadline = time.monotonic() + limit
        while not all(self._store.check([name]) for name in names) and time.monotonic() < deadline:
            time.sleep(_POLL_S)


def combine_reports(reports: Sequence[NodeReport | None]) -> tuple[RunOutcome, str]:
    """What the ends on all nodes come to, and the name of the node where that was; None of one that does not answer."""
    there = [report for report in reports if report is not None]
    codes = {rank: code for report in there for rank, code in report.codes.items()}
    words = [word for report in there for word in report.words]
    nodes = {rank: report.node for report in there for rank in (*report.codes, *report.ranks)}
    places = {rank: f"node {name}" for rank, name in nodes.items() if len(reports) > 1}
    asked = [report.stop_signal for report in there if report.stop_signal]
    silent = [number for number, report in enumerate(reports) if report is None]
    if all(report.has_succeeded for report in there) and not silent:
        return RunOutcome(0, "", "done"), ""
    end = launcher.determine_outcome(codes, words, asked[0] if asked else 0, places)
    problems = [report for report in there if report.problem]
    if problems and not codes:
        end = RunOutcome(1, f"error: torchrun: {problems[0].problem}", "lost")
    if silent and end.kind == "lost":
        return RunOutcome(1, f"error: the launcher of node number {silent[0]} does not answer", "lost"), ""
    return end, nodes.get(end.rank, "")


def _write_excluded_node(after: RestartDecision) -> None:
    if (file := os.environ.get(EXCLUDE_NODE_ENV)) and after.exclude_node:
        Path(file).write_text(after.exclude_node + "\n")


def node_name(number: int, count: int) -> str:
    return node.get_name(number if count > 1 else None)
