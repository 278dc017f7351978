"""Load run-level data for the page: configuration, metrics by step, bands, alarms, logs and code.

The folder may be incomplete, empty, of another version, or of a run in progress. Everything readable is loaded; each
problem becomes a note in `notes`.
"""

from __future__ import annotations

import json
import os
import re
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from megarl.config import Config, ConfigError, load_config, to_dict
from megarl.config.strict import list_keys
from megarl.observe.health_bands import BANDS, Band, load_bands
from megarl.observe.live_status import HEARTBEAT_S, LIVE_FOLDER
from megarl.observe.tracker import collect_metrics, iter_lines
from megarl.utils import exact_json
from megarl.utils.text import one_line
from megarl.view.column_codec import pack
from megarl.view.rollout_index import Index, empty_index

_ALARM = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)  ALARM: (.*)")
_STEP = re.compile(r"\bstep (\d{1,12})\b")
MAX_ALARMS = 1000
_SECTIONS = {key.rpartition(".")[0] for key, _ in list_keys(Config())}
MAX_VALUE_CHARS = 2000
"""Characters of a key's value."""
MAX_STATUSES = 256
STATUS_NAMES = ("rank", "step", "phase", "category", "running", "waiting", "conversations", "cache_usage")
MAX_FILES, MAX_FILE_BYTES = 100, 100_000
"""Files of `read_texts`, and how much of the end of each is read."""


@dataclass
class RunData:
    """Run-level data of one run folder.

    Args:
        config: text of each key's value, by key.
        changed_keys: keys that are not at their default.
        metrics: by step.
        times: when each step's metrics were logged, in seconds since the Unix epoch.
        has_band_alarms: whether the run's guards watch `bands`.
        alarms: (step, time, text).
        index: the rollouts of training; empty until `page.load` has read it.
        evaluations: those of evaluations, likewise.
        spans: the timeline, likewise; None if there is none.
        statuses: what ranks are doing now, see `LiveStatus.read`; empty for a run that has ended.
    """

    path: Path
    name: str
    algorithm: str = "?"
    is_running: bool = False
    config: dict[str, str] = field(default_factory=dict)
    changed_keys: list[str] = field(default_factory=list)
    metrics: dict[int, dict[str, float]] = field(default_factory=dict)
    times: dict[int, float] = field(default_factory=dict)
    bands: dict[str, Band] = field(default_factory=dict)
    has_band_alarms: bool = False
    alarms: list[tuple[int, str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    index: Index = field(default_factory=empty_index)
    evaluations: Index = field(default_factory=empty_index)
    spans: Mapping[str, Any] | None = None
    statuses: list[dict[str, Any]] = field(default_factory=list)

    @property
    def generates_rollouts(self) -> bool:
        """Whether the run's algorithm generates rollouts, which SFT and training on pairs do not, as far as its steps
        tell: True before the first."""
        names = {name for values in self.metrics.values() for name in values}
        is_rollout_metric = any(name.startswith("rollout/") or name == "time/generate" for name in names)
        return is_rollout_metric or "time/step" not in names or (self.path / "rollouts").exists()

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for the page, with packed `metrics`, NaN where a step lacks one."""
        steps = list(self.metrics)
        names = sorted({name for values in self.metrics.values() for name in values})
        columns = {
            name: pack(np.array([self.metrics[step].get(name, np.nan) for step in steps], np.float32)) for name in names
        }
        bands = {
            name: {
                "lower": band.lower,
                "upper": band.upper,
                "low_remedy": band.low_remedy,
                "high_remedy": band.high_remedy,
            }
            for name, band in self.bands.items()
        }
        return {
            "name": self.name,
            "path": str(self.path),
            "algorithm": self.algorithm,
            "is_running": self.is_running,
            "config": self.config,
            "changed_keys": self.changed_keys,
            "steps": steps,
            "times": [self.times.get(step) for step in steps],
            "metrics": columns,
            "bands": bands,
            "has_band_alarms": self.has_band_alarms,
            "alarms": [list(alarm) for alarm in self.alarms],
            "notes": list(self.notes),
            "timeline": self.spans,
            "statuses": self.statuses,
            "generates_rollouts": self.generates_rollouts,
            "num_rollouts": len(self.index),
            "num_evaluated": len(self.evaluations),
        }


def read_run(path: Path) -> RunData:
    """Load a run folder. Raises ConfigError if it does not exist; other problems become notes."""
    if not path.is_dir():
        raise ConfigError(f"no run folder {path}; name one, such as runs/quickstart/run-1")
    run = RunData(path, path.resolve().name or str(path))
    run.is_running = _is_running(path)
    _read_config(run)
    _read_metrics(run)
    _read_alarms(run)
    run.statuses = read_statuses(path)
    return run


def _is_running(path: Path) -> bool:
    """Return whether the process named in the lock file is alive on this machine.

    The lock itself is not tried, because a run that starts at that moment would find it held.
    """
    try:
        match = re.fullmatch(r"process (\d{1,9}) on (\S+)\s*", (path / ".lock").read_text(errors="replace"))
        if match is None or match[2] != socket.gethostname():
            return False
        os.kill(int(match[1]), 0)
        process_dir = Path("/proc", match[1])  # detects a later process with a reused pid
        return not process_dir.exists() or process_dir.stat().st_mtime <= (path / ".lock").stat().st_mtime + 1
    except PermissionError:
        return (path / ".lock").is_file()  # another user's process
    except OSError:
        return False


def read_statuses(path: Path, now: float | None = None) -> list[dict[str, Any]]:
    """Return what the first `MAX_STATUSES` ranks of a run are doing, with `seconds`, for how long. Ranks without a sign
    of life for three heartbeats are left out."""
    now = time.time() if now is None else now
    statuses = []
    for file in sorted(path.glob(f"{LIVE_FOLDER}/rank_*.json"))[:MAX_STATUSES]:
        try:
            status = json.loads(file.read_text(encoding="utf-8"))
            if now - status["time"] < 3 * HEARTBEAT_S:
                names = [name for name in STATUS_NAMES if name in status]
                seconds = max(0.0, round(now - status["since"], 1))
                statuses.append({name: status[name] for name in names} | {"seconds": seconds})
        except (OSError, ValueError, LookupError, TypeError):  # removed meanwhile, or damaged
            continue
    return statuses


def _read_config(run: RunData) -> None:
    file = run.path / "config.yaml"
    run.bands = {name: band for name, band in BANDS.items() if (band.lower, band.upper) != (None, None)}
    if not file.is_file():
        problem = "has no config.yaml: it is incomplete or not a run folder"
        run.notes.append(f"{run.path} {problem}; using the default bands")
        return
    try:
        tree = yaml.safe_load(file.read_text(encoding="utf-8"))
        if not isinstance(tree, dict):
            raise ValueError("it is not a mapping")
        run.algorithm = str(tree.get("algorithm", "?"))
        run.config = _flatten(tree)
        defaults = _flatten(to_dict(Config()))
        run.changed_keys = [key for key, value in run.config.items() if value != defaults.get(key)]
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        run.notes.append(f"{file} cannot be read ({one_line(error, 200)}); using the default bands")
        return
    try:
        guards = load_config(file).guards
        if guards.alarms:
            run.bands, run.has_band_alarms = load_bands(guards), True
    except (ConfigError, OSError, ValueError, RecursionError, TypeError) as error:
        problem = re.split(r" \((?:known here:|megarl train)", one_line(error, 200))[0]  # keys of this version
        run.notes.append(f"{file} is of another version of MegaRL ({problem}); using the default bands")


def _flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Return the values of a configuration as text by `section.key`. Lists, and maps below a key, stay together."""
    texts: dict[str, str] = {}
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and value and key in _SECTIONS:
            texts |= _flatten(value, f"{key}.")
        else:
            is_plain = isinstance(value, (str, int, float)) and not isinstance(value, bool)
            texts[key] = (str(value) if is_plain else exact_json.dumps(value))[:MAX_VALUE_CHARS]
    return texts


def _read_metrics(run: RunData) -> None:
    file = run.path / "metrics.jsonl"
    try:
        text = file.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        run.notes.append(f"{run.path} has no metrics.jsonl: no step is done yet, or it is not a run folder")
        return
    except OSError as error:
        run.notes.append(f"{file} cannot be read ({one_line(error, 200)})")
        return
    invalid_lines, rows = [], []
    for number, row in iter_lines(text):
        if row is not None:
            is_number = {name: type(value) in (int, float) and abs(value) != inf for name, value in row.items()}
            rows.append({name: value for name, value in row.items() if is_number[name]})
        elif number <= text.count("\n") or not run.is_running:  # a running process may be writing the last line
            invalid_lines.append(number)
    run.metrics = collect_metrics(rows)
    for row in rows:
        if "time" in row:
            run.times[row["step"]] = max(float(row["time"]), run.times.get(row["step"], 0.0))
    if invalid_lines:
        more = f" and {len(invalid_lines) - 1} more" if len(invalid_lines) > 1 else ""
        run.notes.append(f"{file}: line {invalid_lines[0]}{more} cannot be read and is excluded")
    if not run.metrics:
        run.notes.append(f"{file} has no metrics yet")


def _read_alarms(run: RunData) -> None:
    file = run.path / "log.txt"
    try:
        text = file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return
    step, alarms = 0, []
    for line in text.splitlines():
        step_match = _STEP.search(line)
        step = int(step_match[1]) if step_match else step
        if alarm_match := _ALARM.fullmatch(line):
            alarms.append((step, alarm_match[1], alarm_match[2][:2000]))
    if len(alarms) > MAX_ALARMS:
        run.notes.append(f"{file} has {len(alarms)} alarms; the last {MAX_ALARMS} are shown")
    run.alarms = alarms[-MAX_ALARMS:]


def read_texts(path: Path) -> list[dict[str, Any]]:
    """Return the run's log, configuration changes, code, and other logs as {name, text, is_cut}, of each the end."""
    files = [path / "log.txt", path / "changes.jsonl"]
    for pattern in ("code/**/*", "logs/*"):
        try:
            files += sorted(file for file in path.glob(pattern) if file.is_file())
        except OSError:  # a folder of another user
            continue
    texts = []
    for file in files[:MAX_FILES]:
        try:
            with file.open("rb") as stream:
                size = stream.seek(0, os.SEEK_END)
                stream.seek(max(0, size - MAX_FILE_BYTES))
                text = stream.read(MAX_FILE_BYTES).decode("utf-8", "replace")
        except OSError:
            continue
        is_cut = size > MAX_FILE_BYTES
        text = text.partition("\n")[2] if is_cut else text
        if text:
            texts.append({"name": str(file.relative_to(path)), "text": text, "is_cut": is_cut})
    return texts
