"""The machine and the versions that a run runs with: a line of `machine.jsonl` in its folder for each of its starts."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from megarl import __version__
from megarl.checkpoint.provenance import code_revision
from megarl.parallel import device

FILE_NAME = "machine.jsonl"
PACKAGES = "torch", "megatron-core", "sglang", "transformers", "transformer-engine"


def find_cpu_model() -> str:
    """Return the processor's name, or else its architecture."""
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()  # ARM's cpuinfo names no model


def list_versions(packages: Iterable[str] = PACKAGES) -> dict[str, str]:
    """Return the versions of MegaRL, Python and those of the packages that are installed."""
    versions = {"megarl": __version__, "python": platform.python_version()}
    for name in packages:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def describe() -> dict[str, Any]:
    """Return commit, versions, GPUs of this node (empty without one), processor, and cores of this process."""
    return {
        "code": code_revision(),
        "versions": list_versions(),
        "gpus": device.gpu_names(),
        "cpu": find_cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
    }


def record(run_dir: Path, step: int) -> None:
    """Append what describes this node and program. step: the last step before this start. Raises OSError."""
    with (run_dir / FILE_NAME).open("a", encoding="utf-8") as file:
        file.write(json.dumps({"step": step, "time": time.time(), **describe()}) + "\n")


def read(run_dir: Path) -> list[dict[str, Any]]:
    """Return the records of a run's starts, the oldest first; empty for a run of an earlier version of MegaRL."""
    file = run_dir / FILE_NAME
    records = []
    for line in file.read_text(encoding="utf-8").splitlines() if file.is_file() else ():
        try:
            tree = json.loads(line)
        except ValueError:
            continue  # truncated by a crash
        if isinstance(tree, dict):
            records.append(tree)
    return records
