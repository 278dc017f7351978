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
from megarl.launch.exit_status import REQUEUE_EXIT_CODE, Verdict
from megarl.launch.restarts import Next, Restarts, Rules
from megarl.parallel.job_secret import of_launchers, seal, unseal
from megarl.processes import node

JOIN_S = 900.0
"""How long nodes may take to come to the store; as torchrun's own rendezvous."""
HEAR_S = launcher.NOTICE_S + launcher.GRACE_S + launcher.ORPHANS_S + 30.0
"""How long a node may take to say how its ranks have ended, once those of another have."""
LEAVE_OUT = "MEGARL_LEAVE_OUT"
"""Environment variable with a file that gets the name of a node that a start elsewhere should be without."""
_LOOK_S = 0.1
_HEARD_S = 10.0


@dataclass(frozen=True)
class Report:
    """How the ranks of a node have ended. codes, words, asked: as of `launcher.verdict`. problem: what torchrun itself
    has failed of."""

    node: str
    well: bool = False
    codes: dict[int, int] = field(default_factory=dict)
    words: tuple[launcher.Word, ...] = ()
    asked: int = 0
    problem: str = ""
    ranks: tuple[int, ...] = ()
    """Of this node, as far as that is known."""

    @property
    def failed(self) -> bool:
        """Whether ranks of other nodes are to end, too; they do by themselves where all were asked to stop."""
        return bool(self.problem) or any(code not in (0, REQUEUE_EXIT_CODE) for code in self.codes.values())

    def text(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def of(text: str) -> Report:
        said = json.loads(text)
        said["codes"] = {int(rank): code for rank, code in said["codes"].items()}
        said["words"] = tuple(launcher.Word(**word) for word in said["words"])
        return Report(**{**said, "ranks": tuple(said["ranks"])})


class Alone:
    """One node, which decides for itself. rules: what the run has said of itself, see `launcher.Words`."""

    count = 1

    def __init__(self) -> None:
        self.restarts = Restarts()

    def meeting_port(self, attempt: int, given: int) -> int:
        return given

    def failed(self, attempt: int) -> None:
        """Tell the others that ranks have failed here."""

    def has_failed(self, attempt: int) -> bool:
        """Whether ranks have failed on some other node. For one thread beside the main one."""
        return False

    def next(self, attempt: int, own: Report, rules: Rules | None) -> Next:
        """What comes after an attempt, which has ended here; the same on all nodes."""
        return self._decided([own], rules)

    def _decided(self, reports: Sequence[Report | None], rules: Rules | None) -> Next:
        end, where = combined(reports)
        if None in reports:
            return Next(False, end.status, end.text, leave_out=where)  # it is not there to start again
        return self.restarts.after(end, rules, where)


class Several(Alone):
    """One of several nodes. Raises what torch.distributed does where they do not come together."""

    def __init__(self, number: int, count: int, address: str, port: int) -> None:
        super().__init__()
        self.number, self.count, self._address = number, count, address
        self._key = of_launchers()
        self._ours = self._connect(port, keeps=number == 0)
        self._watching: Any = None
        self._port = port

    def _connect(self, port: int, keeps: bool = False) -> Any:
        import torch.distributed as dist

        from megarl.parallel import rendezvous

        limit = timedelta(seconds=JOIN_S)
        if keeps:
            return rendezvous.keep(self._address, port, None, limit, wait=False)
        return dist.TCPStore(self._address, port, is_master=False, timeout=limit, wait_for_workers=False)

    def _say(self, name: str, text: str) -> None:
        self._ours.set(name, seal(text.encode(), f"{self._port} {name}", self._key))

    def _hear(self, name: str) -> str:
        """Raises ForgedError, a RuntimeError, for what no launcher of this job has said."""
        return bytes(unseal(self._ours.get(name), f"{self._port} {name}", self._key)).decode()

    def meeting_port(self, attempt: int, given: int) -> int:
        if self.number == 0:
            with socket.socket() as probe:
                probe.bind(("", 0))
                self._say(f"{attempt}/port", str(probe.getsockname()[1]))
        return int(self._hear(f"{attempt}/port"))

    def failed(self, attempt: int) -> None:
        self._ours.set(f"{attempt}/failed", str(self.number))

    def has_failed(self, attempt: int) -> bool:
        self._watching = self._watching or self._connect(self._port)  # one is for one thread
        return bool(self._watching.check([f"{attempt}/failed"]))

    def next(self, attempt: int, own: Report, rules: Rules | None) -> Next:
        try:
            return self._next(attempt, own, rules)
        except RuntimeError as error:
            said = " ".join(str(error).split("\n")[0].split())
            return Next(False, 1, f"error: the launcher of node number 0 does not answer any more: {said}")

    def _next(self, attempt: int, own: Report, rules: Rules | None) -> Next:
        self._say(f"{attempt}/{self.number}/ended", own.text())
        if self.number == 0:
            names = [f"{attempt}/{number}/ended" for number in range(self.count)]
            self._wait(names, HEAR_S)
            found = [Report.of(self._hear(name)) if self._ours.check([name]) else None for name in names]
            after = self._decided(found, rules)
            _leave_out(after)
            self._say(f"{attempt}/next", json.dumps(after))
            self._wait([f"{attempt}/{number}/heard" for number in range(1, self.count) if found[number]], _HEARD_S)
            return after
        self._wait([f"{attempt}/next"], 2 * HEAR_S + _HEARD_S)  # it may have ended later, and waited for a third
        if not self._ours.check([f"{attempt}/next"]):
            return Next(False, 1, "error: the launcher of node number 0 does not say what comes next")
        after = Next(*json.loads(self._hear(f"{attempt}/next")))
        self._ours.set(f"{attempt}/{self.number}/heard", "")
        return after

    def _wait(self, names: Sequence[str], limit: float) -> None:
        deadline = time.monotonic() + limit
        while not all(self._ours.check([name]) for name in names) and time.monotonic() < deadline:
            time.sleep(_LOOK_S)


def combined(reports: Sequence[Report | None]) -> tuple[Verdict, str]:
    """What the ends on all nodes come to, and the name of the node where that was; None of one that does not answer."""
    there = [report for report in reports if report is not None]
    codes = {rank: code for report in there for rank, code in report.codes.items()}
    words = [word for report in there for word in report.words]
    nodes = {rank: report.node for report in there for rank in (*report.codes, *report.ranks)}
    places = {rank: f"node {name}" for rank, name in nodes.items() if len(reports) > 1}
    asked = [report.asked for report in there if report.asked]
    silent = [number for number, report in enumerate(reports) if report is None]
    if all(report.well for report in there) and not silent:
        return Verdict(0, "", "done"), ""
    end = launcher.verdict(codes, words, asked[0] if asked else 0, places)
    problems = [report for report in there if report.problem]
    if problems and not codes:
        end = Verdict(1, f"error: torchrun: {problems[0].problem}", "lost")
    if silent and end.kind == "lost":
        return Verdict(1, f"error: the launcher of node number {silent[0]} does not answer", "lost"), ""
    return end, nodes.get(end.rank, "")


def _leave_out(after: Next) -> None:
    if (file := os.environ.get(LEAVE_OUT)) and after.leave_out:
        Path(file).write_text(after.leave_out + "\n")


def own_name(number: int, count: int) -> str:
    return node.name(number if count > 1 else None)
