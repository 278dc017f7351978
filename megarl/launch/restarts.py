"""Decide whether a failed run restarts, from which step, and after how long.

Only failures that may not recur are retried: a killed or hung rank, a lost machine, a fault. Not retried: user
mistakes, requested stops, and runs without checkpoints (`run.save_every`).
"""

from __future__ import annotations

import contextlib
import json
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from megarl.launch.exit_status import REPEATED_FAULT_EXIT_CODE, RunOutcome

FIRST_WAIT_S, LONGEST_WAIT_S = 2.0, 300.0
"""Seconds before the first restart, and the maximum; each wait is four times the previous one."""
MEMORY_RECORD = "in_memory.json"
"""File in a run folder that names the newest step in the nodes' memory, see `checkpoint/memory_store.py`."""
_STEP = re.compile(r"step_(\d{6,})")
_TAIL = 1 << 16


@dataclass(frozen=True)
class RestartPolicy:
    """Settings that a run registers: its folder, `run.save_every`, `run.max_restarts`, `run.distributed_timeout_s`."""

    run_dir: str
    save_every: int
    max_restarts: int
    timeout_s: float = float("inf")

    @staticmethod
    def from_json(text: str) -> RestartPolicy:
        """Parse JSON. Raises ValueError if it is not a valid policy."""
        try:
            policy = RestartPolicy(**json.loads(text))
        except TypeError as error:
            raise ValueError(str(error)) from None
        counts = (policy.save_every, policy.max_restarts)
        is_valid = isinstance(policy.run_dir, str) and all(type(count) is int and count >= 0 for count in counts)
        if not is_valid or type(policy.timeout_s) not in (int, float) or not policy.timeout_s > 0:
            raise ValueError("not the values of a restart policy")
        return policy


class RestartDecision(NamedTuple):
    """The decision taken after the ranks of a run have ended.

    should_restart: restart after `wait_s` seconds; otherwise exit with `status`. text: line to print, empty on success.
    """

    should_restart: bool
    status: int
    text: str
    wait_s: float = 0.0
    exclude_node: str = ""
    """Node that a restart should avoid: all repeated failures since the last new checkpoint were on it."""


class RestartTracker:
    """Count the restarts of one run since its last new checkpoint, and remember its last fault."""

    def __init__(self) -> None:
        self._total = 0  # restarts of the run
        self._count = 0  # restarts since the last new checkpoint
        self._newest = -1
        self._last_fault: tuple[str, int] | None = None
        self._failed_nodes: list[str] = []

    def decide(
        self, outcome: RunOutcome, policy: RestartPolicy | None, failed_node: str = "", can_replace: bool = False
    ) -> RestartDecision:
        """Decide what follows an end of all ranks; call once per end.

        policy: None if the run ended before it registered one. failed_node: its name, if there are several.
        can_replace: whether a spare can take that node's place instead of the run stopping.
        """
        may_recover = outcome.kind in ("killed", "fault", "lost", "late")
        if not may_recover or policy is None or not policy.save_every or not policy.max_restarts:
            return RestartDecision(False, outcome.status, outcome.text)
        folder = Path(policy.run_dir)
        on_disk, in_memory = find_newest_step(folder), read_memory_step(folder)
        newest, step = max(on_disk, in_memory), read_last_step(folder) + 1
        # Without numbers and log path, the error is equal on another rank.
        last_line = outcome.text.rpartition("\n")[2].partition("; the full traceback")[0]
        fault = (re.sub(r"\d+", "#", last_line), step) if outcome.kind == "fault" else None
        is_repeated, self._last_fault = fault is not None and fault == self._last_fault, fault
        if newest > self._newest:
            self._count, self._failed_nodes = 0, []
        self._newest = newest
        self._failed_nodes.append(failed_node)
        if is_repeated:
            reason = f"that is the same error at step {step} as last time, so the run does not restart"
            return RestartDecision(False, REPEATED_FAULT_EXIT_CODE, f"{outcome.text}; {reason}")
        exclude_node = ""
        if self._count >= policy.max_restarts:
            if self._count and set(self._failed_nodes) == {failed_node}:
                exclude_node = failed_node
            if not exclude_node or not can_replace:
                count_text = "once" if self._count == 1 else f"{self._count} times"
                reason = f"it has restarted {count_text} without a new checkpoint (run.max_restarts) and stops"
                return RestartDecision(False, outcome.status, f"{outcome.text}; {reason}", exclude_node=exclude_node)
            self._count, self._failed_nodes = 0, []
        wait_s = min(FIRST_WAIT_S * 4**self._count, LONGEST_WAIT_S)
        self._count += 1
        self._total += 1
        start = f"checkpoint step_{newest:06d}" if newest else "the beginning, since there is no checkpoint yet"
        start += " in memory" if in_memory > on_disk else ""
        reason = (
            f"restarting in {wait_s:g} s from {start} (restart {self._total} of this run, {self._count} of "
            f"{policy.max_restarts} without a new checkpoint)"
        )
        return RestartDecision(True, outcome.status, f"{outcome.text}; {reason}", wait_s, exclude_node)


def append_to_log(policy: RestartPolicy | None, text: str) -> None:
    """Append a line to the run's log.txt. Write errors are ignored: the line is on the terminal, too."""
    if policy is not None:
        with contextlib.suppress(OSError), Path(policy.run_dir, "log.txt").open("a", encoding="utf-8") as file:
            file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')}  {' '.join(text.split())}\n")


def find_newest_step(run_dir: Path) -> int:
    """Return the step of the newest checkpoint, 0 if there is none. Validity is checked when it is loaded."""
    matches = []
    with contextlib.suppress(OSError):
        matches = [_STEP.fullmatch(path.name) for path in (run_dir / "checkpoints").iterdir()]
    return max((int(match[1]) for match in matches if match), default=0)


def read_memory_step(run_dir: Path) -> int:
    """Return the step of the newest checkpoint in the nodes' memory, 0 if there is none.

    Whether it is complete without the nodes that are lost is determined when it is loaded.
    """
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        return int(json.loads((run_dir / MEMORY_RECORD).read_text(encoding="utf-8"))["step"])
    return 0


def read_last_step(run_dir: Path) -> int:
    """Return the step of the last metrics written, 0 if there are none."""
    with contextlib.suppress(OSError), (run_dir / "metrics.jsonl").open("rb") as file:
        file.seek(max(0, file.seek(0, 2) - _TAIL))
        for line in reversed(file.read().splitlines()):
            with contextlib.suppress(ValueError, TypeError, KeyError):
                return int(json.loads(line)["step"])
    return 0
