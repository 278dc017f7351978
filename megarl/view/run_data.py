"""What a run folder says of a run as a whole: figures by step, bands, alarms; as plain data for a page.

The folder may be half written, of another version, empty or of a run that goes on. What is wrong becomes a sentence
among `notes`; what can be read is there.
"""

from __future__ import annotations

import os
import re
import socket
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from megarl.config import ConfigError, load_config
from megarl.observe.health_bands import BANDS, Band, load_bands
from megarl.utils import exact_json
from megarl.view.column_codec import pack

_ALARM = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)  ALARM: (.*)")
_STEP = re.compile(r"\bstep (\d{1,12})\b")
MAX_ALARMS = 1000


@dataclass
class RunData:
    """metrics: by step. watched: whether `bands` are those that the run's guards look at. alarms: (step, time,
    text)."""

    path: Path
    name: str
    algorithm: str = "?"
    is_running: bool = False
    metrics: dict[int, dict[str, float]] = field(default_factory=dict)
    bands: dict[str, Band] = field(default_factory=dict)
    has_band_alarms: bool = False
    alarms: list[tuple[int, str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """For the page: `metrics` packed, with NaN where a step has none."""
        steps = list(self.metrics)
        names = sorted({name for values in self.metrics.values() for name in values})
        columns = {
            name: pack(np.array([self.metrics[step].get(name, np.nan) for step in steps], np.float32)) for name in names
        }
        ends = {name: {"least": band.lower, "most": band.upper, **_remedies(band)} for name, band in self.bands.items()}
        return {
            "name": self.name,
            "path": str(self.path),
            "algorithm": self.algorithm,
            "running": self.is_running,
            "steps": steps,
            "metrics": columns,
            "bands": ends,
            "watched": self.has_band_alarms,
            "alarms": [list(alarm) for alarm in self.alarms],
            "notes": self.notes,
        }


def _remedies(band: Band) -> dict[str, str]:
    return {"title": band.title, "low": band.low_remedy, "high": band.high_remedy}


def read_run(path: Path) -> RunData:
    """Raises ConfigError where there is no folder; all else is noted."""
    if not path.is_dir():
        raise ConfigError(f"there is no run folder {path}; name one, such as runs/quickstart/run-1")
    run = RunData(path, path.resolve().name or str(path))
    run.is_running = _is_running(path)
    _read_config(run)
    _read_metrics(run)
    _read_alarms(run)
    return run


def _is_running(path: Path) -> bool:
    """Whether the process that the lock names is there, as far as it is of this machine. The lock itself is not tried:
    a run that begins meanwhile would find it held."""
    try:
        found = re.fullmatch(r"process (\d{1,9}) on (\S+)\s*", (path / ".lock").read_text(errors="replace"))
        if found is None or found[2] != socket.gethostname():
            return False
        os.kill(int(found[1]), 0)
        began = Path("/proc", found[1])  # of a process that came later and was given the same number
        return not began.exists() or began.stat().st_mtime <= (path / ".lock").stat().st_mtime + 1
    except PermissionError:
        return (path / ".lock").is_file()  # somebody else's process
    except OSError:
        return False


def _read_config(run: RunData) -> None:
    file = run.path / "config.yaml"
    run.bands = {name: band for name, band in BANDS.items() if (band.lower, band.upper) != (None, None)}
    if not file.is_file():
        run.notes.append(
            f"{run.path} has no config.yaml: it is half written or no run folder; bands are the usual ones"
        )
        return
    try:
        tree = yaml.safe_load(file.read_text(encoding="utf-8"))
        if not isinstance(tree, dict):
            raise ValueError("it is no mapping")
        run.algorithm = str(tree.get("algorithm", "?"))
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        run.notes.append(f"{file} cannot be read ({_line(error)}); bands are the usual ones")
        return
    try:
        guards = load_config(file).guards
        if guards.alarms:
            run.bands, run.has_band_alarms = load_bands(guards), True
    except (ConfigError, OSError, ValueError, RecursionError, TypeError) as error:
        what = _line(error).partition(" (known here:")[0]  # the list is of this version, and long
        run.notes.append(f"{file} is of another version of MegaRL ({what}); bands are the usual ones")


def _read_metrics(run: RunData) -> None:
    file = run.path / "metrics.jsonl"
    try:
        text = file.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        run.notes.append(f"{run.path} has no metrics.jsonl: no step is done yet, or it is no run folder")
        return
    except OSError as error:
        run.notes.append(f"{file} cannot be read ({_line(error)})")
        return
    broken, lines = [], text.split("\n")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            found = exact_json.loads(line)
            step = found["step"]
            if type(step) is not int or not 0 <= step < 2**53:
                raise ValueError("its step is no number")
        except (ValueError, LookupError, TypeError, RecursionError):
            if number < len(lines) or not run.is_running:  # else it is being written
                broken.append(number)
            continue
        values = {name: value for name, value in found.items() if name not in ("step", "time") and _is_number(value)}
        run.metrics.setdefault(step, {}).update(values)
    run.metrics = dict(sorted(run.metrics.items()))
    if broken:
        which = f"line {broken[0]}" + (f" and {len(broken) - 1} more" if len(broken) > 1 else "")
        run.notes.append(f"{file}: {which} cannot be read and is left out")
    if not run.metrics:
        run.notes.append(f"{file} has no metrics yet")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) != float("inf")


def _read_alarms(run: RunData) -> None:
    file = run.path / "log.txt"
    try:
        text = file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return
    step, found = 0, []
    for line in text.splitlines():
        named = _STEP.search(line)
        step = int(named[1]) if named else step
        if alarm := _ALARM.fullmatch(line):
            found.append((step, alarm[1], alarm[2][:2000]))
    if len(found) > MAX_ALARMS:
        run.notes.append(f"{file} has {len(found)} alarms, of which the last {MAX_ALARMS} are shown")
    run.alarms = found[-MAX_ALARMS:]


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
