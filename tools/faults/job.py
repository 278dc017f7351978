"""A start of the training program for fault injection: its processes, its output, its end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from faults.points import VARIABLE, Point
from megarl.engine.engine_host import HOST_VARIABLE

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 900.0
"""Maximum wait for anything; a busy machine is slow."""
SAME_BITS = "the weights are those of the undisturbed run, bit for bit"
_LOOK_S = 0.02


class UnexpectedOutcome(Exception):
    """Raised if the run did not reach the point of the fault, or did not end. Describes what it did."""


@dataclass(frozen=True)
class JobExit:
    status: int
    lines: list[str]
    """Lines of stderr."""
    at: float
    """Time of the end, as in `time.time()`."""

    @property
    def reason(self) -> str:
        """The line with the reason, short enough for a table."""
        return shortened(self.lines[-1] if self.lines else f"exit status {self.status}")


def shortened(text: str, limit: int = 160) -> str:
    text = " ".join(text.split())
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


class Job:
    """run_dir: run folder, possibly of an earlier start. config: a YAML file; settings: overrides. points: see
    `points.py`; they are in `<run_dir>.points`, and each is reached once, however often the run is started. prefix: of
    the command line, such as for a private file system. host: socket of an engine host, for runs that need one."""

    def __init__(
        self,
        run_dir: Path,
        config: Path,
        settings: Mapping[str, Any],
        points: Sequence[Point] = (),
        prefix: Sequence[str] = (),
        host: str = "",
    ) -> None:
        self.run_dir = self.seen_at = run_dir
        """The second is the path for this process, which differs if the run has a private file system."""
        self.points = run_dir.with_name(f"{run_dir.name}.points")
        self.points.mkdir(parents=True, exist_ok=True)
        overrides = [f"{key}={_yaml(value)}" for key, value in {"run.dir": run_dir, **settings}.items()]
        script = str(Path(__file__).with_name("hooked.py"))
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "tools")])
        environment[VARIABLE] = json.dumps({"folder": str(self.points), "points": [asdict(point) for point in points]})
        if host:
            environment[HOST_VARIABLE] = host
        self._output = tempfile.TemporaryFile("w+")
        self._errors = tempfile.TemporaryFile("w+")
        self.started_at = time.time()
        self.process = subprocess.Popen(
            [*prefix, sys.executable, script, str(config), *overrides],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=self._errors,
            start_new_session=True,
        )

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill_all()

    # --- waiting

    def wait_for(self, condition: Callable[[], Any], description: str, seconds: float = PATIENCE_S) -> Any:
        """Return the first true value of `condition`. Raises UnexpectedOutcome if the run ends first, or on timeout."""
        deadline = time.monotonic() + seconds
        while not (result := condition()):
            if self.process.poll() is not None:
                if result := condition():
                    return result
                raise UnexpectedOutcome(f"the run ended before {description}: {self.wait().reason}")
            if time.monotonic() > deadline:
                raise UnexpectedOutcome(f"{description} did not come in {seconds:g} s")
            time.sleep(_LOOK_S)
        return result

    def wait_for_point(self, name: str, seconds: float = PATIENCE_S) -> dict[str, Any]:
        """Return the process that reached the point, and the time."""
        mark: dict[str, Any] = self.wait_for(lambda: self._mark(name), f"the point {name}", seconds)
        return mark

    def _mark(self, name: str) -> dict[str, Any] | None:
        try:
            mark: dict[str, Any] = json.loads((self.points / f"{name}.at").read_text())
        except (OSError, ValueError):
            return None
        return mark

    def release(self, name: str) -> None:
        (self.points / f"{name}.go").touch()

    def wait(self, seconds: float = PATIENCE_S) -> JobExit:
        try:
            status = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise UnexpectedOutcome(f"the run did not end in {seconds:g} s") from None
        at = time.time()
        self._errors.seek(0)
        lines = [line for line in self._errors.read().splitlines() if line.strip()]
        return JobExit(status if status >= 0 else 128 - status, lines, at)

    # --- its processes

    def family(self) -> list[psutil.Process]:
        try:
            launcher = psutil.Process(self.process.pid)
            return [launcher, *launcher.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def ranks(self) -> dict[int, int]:
        """Return the process of each rank; for a single rank, the program itself."""
        processes = {}
        for process in self.family():
            try:
                environment, script = process.environ(), process.cmdline()
            except psutil.Error:
                continue
            if "LOCAL_WORLD_SIZE" in environment and any(part.endswith("hooked.py") for part in script):
                if not _is_fork(process):
                    processes[int(environment["RANK"])] = process.pid
        return processes or {0: self.process.pid}

    def send(self, pid: int, number: int) -> float:
        """Send a signal to a process of the run. Return the time."""
        if pid not in {process.pid for process in self.family()}:
            raise UnexpectedOutcome(f"process {pid} is none of the run's any more")
        os.kill(pid, number)
        return time.time()

    def kill_all(self) -> float:
        """Kill all processes at once, like a machine that goes down. Return the time."""
        family, at = self.family(), time.time()
        for process in family:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                pass
        psutil.wait_procs(family[1:], timeout=30)
        if family:
            self.process.wait()
        return at

    # --- what it says

    @property
    def log(self) -> str:
        return read_text(self.seen_at / "log.txt")

    @property
    def output(self) -> str:
        self._output.flush()
        return os.pread(self._output.fileno(), 1 << 22, 0).decode(errors="replace")

    def metrics(self) -> list[dict[str, Any]]:
        return read_run_metrics(self.seen_at)


def _is_fork(process: psutil.Process) -> bool:
    """Return whether the process was forked by a rank: it has a rank's command line and is its child."""
    parent = process.parent()
    try:
        return parent is not None and "LOCAL_WORLD_SIZE" in parent.environ() and parent.cmdline() == process.cmdline()
    except psutil.Error:
        return False


def read_run_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """Return the complete lines in order, repeated steps included."""
    rows = []
    for line in read_text(run_dir / "metrics.jsonl").splitlines():
        try:
            rows.append(json.loads(line))
        except ValueError:
            pass  # the file is being written
    return rows


def read_text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def checkpoints(run_dir: Path) -> list[str]:
    """Return the names in the folder of checkpoints."""
    try:
        return sorted(path.name for path in (run_dir / "checkpoints").iterdir())
    except OSError:
        return []


def same_weights(first: Path, second: Path) -> bool:
    """Return whether two runs have exported the same bits."""
    files = [sorted((path / "export").glob("*.safetensors")) for path in (first, second)]
    if not files[0] or len(files[0]) != len(files[1]):
        return False
    return all(a.read_bytes() == b.read_bytes() for a, b in zip(*files, strict=True))


def signal_name(number: int) -> str:
    return signal.Signals(number).name


def _yaml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (list, tuple)):
        return f"[{','.join(map(_yaml, value))}]"
    return json.dumps(value) if isinstance(value, dict) else str(value)
