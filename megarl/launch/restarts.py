"""Whether a run that has broken off starts again, from where, and after how long. README.md says what ends a run.

Only what may go better the next time is tried again: a rank that was killed or hung, a lost machine, a fault. Not a
mistake of the user's, not what somebody asked for, and nothing without checkpoints (`run.save_every`). A launcher knows
of the run what rank 0 has told it (`ending.register_run`).
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
"""Before the first restart, and before any: each takes four times as long as the one before."""
_STEP = re.compile(r"step_(\d{6,})")
_TAIL = 1 << 16


@dataclass(frozen=True)
class RestartPolicy:
    """What a run says of itself: its folder, `run.save_every`, `run.max_restarts` and `run.timeout_s`."""

    run_dir: str
    save_every: int
    max_restarts: int
    timeout_s: float = float("inf")

    @staticmethod
    def from_json(text: str) -> RestartPolicy:
        """From JSON. Raises ValueError for what are no rules."""
        said = json.loads(text)
        if not isinstance(said, dict) or not set(said) <= {"run_dir", "save_every", "max_restarts", "timeout_s"}:
            raise ValueError("not the fields of rules")
        try:
            rules = RestartPolicy(**said)
        except TypeError as error:
            raise ValueError(str(error)) from None
        counts = (rules.save_every, rules.max_restarts)
        is_plain = isinstance(rules.run_dir, str) and all(type(count) is int and count >= 0 for count in counts)
        if not is_plain or type(rules.timeout_s) not in (int, float) or not rules.timeout_s > 0:
            raise ValueError("not the values of rules")
        return rules


class RestartDecision(NamedTuple):
    """What becomes of a run whose ranks have ended. again: it starts once more, after `wait_s` seconds; else it ends
    with `status`. text: to be said, empty where all is well. leave_out: the node that a start elsewhere should be
    without: all that went wrong since the last new checkpoint was there, and more than once."""

    should_restart: bool
    status: int
    text: str
    wait_s: float = 0.0
    exclude_node: str = ""


class RestartTracker:
    """Of one run: how often it has started again since its last new checkpoint, and what ended it the last time."""

    def __init__(self) -> None:
        self.attempts = 0
        """How often it has started again in all."""
        self._count = 0
        self._newest = -1
        self._last_fault: tuple[str, int] | None = None
        self._failed_nodes: list[str] = []

    def decide(self, end: RunOutcome, rules: RestartPolicy | None, where: str = "") -> RestartDecision:
        """To be asked once for each time that the ranks have ended. rules: None where the run has not come to say.
        where: the node that it was, of several."""
        if end.kind not in ("killed", "fault", "lost", "late") or rules is None:
            return RestartDecision(False, end.status, end.text)
        if not rules.save_every or not rules.max_restarts:
            return RestartDecision(False, end.status, end.text)
        folder = Path(rules.run_dir)
        newest, step = find_newest_step(folder), read_last_step(folder) + 1
        fault = (_normalize_error(end.text), step) if end.kind == "fault" else None
        same, self._last_fault = fault is not None and fault == self._last_fault, fault
        if newest > self._newest:
            self._count, self._failed_nodes = 0, []
        self._newest = newest
        self._failed_nodes.append(where)
        if same:
            why = f"that is the same at step {step} as the time before, so it does not start again"
            return RestartDecision(False, REPEATED_FAULT_EXIT_CODE, _append_reason(end.text, why))
        if self._count >= rules.max_restarts:
            times = "once" if self._count == 1 else f"{self._count} times"
            why = f"it has started again {times} without a new checkpoint (run.max_restarts), and does not any more"
            leave_out = where if self._count and set(self._failed_nodes) == {where} else ""
            return RestartDecision(False, end.status, _append_reason(end.text, why), exclude_node=leave_out)
        wait = min(FIRST_WAIT_S * 4**self._count, LONGEST_WAIT_S)
        self._count += 1
        self.attempts += 1
        where = f"checkpoint step_{newest:06d}" if newest else "the start, as there is no checkpoint yet"
        why = (
            f"starting again in {wait:g} s from {where} (restart {self.attempts} of this run, {self._count} of "
            f"{rules.max_restarts} without a new checkpoint)"
        )
        return RestartDecision(True, end.status, _append_reason(end.text, why), wait)


def append_to_log(rules: RestartPolicy | None, text: str) -> None:
    """Put a line into the run's log.txt. What cannot be written is left out: it was said on the terminal."""
    if rules is not None:
        with contextlib.suppress(OSError), Path(rules.run_dir, "log.txt").open("a", encoding="utf-8") as file:
            file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')}  {' '.join(text.split())}\n")


def find_newest_step(run_dir: Path) -> int:
    """Of its checkpoints; 0 where there is none. Whether it is whole is seen when it is loaded."""
    try:
        names = [_STEP.fullmatch(path.name) for path in (run_dir / "checkpoints").iterdir()]
    except OSError:
        return 0
    return max((int(match[1]) for match in names if match), default=0)


def read_last_step(run_dir: Path) -> int:
    """The step that its metrics were written of last; 0 where there are none."""
    try:
        with (run_dir / "metrics.jsonl").open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - _TAIL))
            for line in reversed(file.read().splitlines()):
                with contextlib.suppress(ValueError, TypeError, KeyError):
                    return int(json.loads(line)["step"])
    except OSError:
        pass
    return 0


def _append_reason(text: str, why: str) -> str:
    return f"{text}; {why}"


def _normalize_error(text: str) -> str:
    """What is the same when the same happens on another rank, in another log, at another address."""
    return re.sub(r"\d+", "#", text.splitlines()[-1].partition("; the whole traceback")[0]) if text else ""
