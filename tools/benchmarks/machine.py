"""What a figure depends on besides the program: the machine, its load, the versions of packages."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from pathlib import Path

import psutil

from megarl import __version__
from megarl.parallel import device

PACKAGES = ("torch", "megatron-core", "sglang", "transformers", "trl")


def describe_machine() -> dict[str, str | int | float]:
    """Return processor, cores (those of this process, and all), memory in GB, GPUs and kernel."""
    return {
        "cpu": find_cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "cores_of_machine": os.cpu_count() or 0,
        "memory_gb": round(psutil.virtual_memory().total / 1e9, 1),
        "gpu": ", ".join(device.gpu_names()) or "none",
        "kernel": platform.release(),
    }


def find_cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()  # ARM's cpuinfo names no model


def list_versions() -> dict[str, str]:
    """Return the versions of MegaRL, Python and PACKAGES, "none" for what is not installed."""
    versions = {"megarl": __version__, "python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "none"
    return versions


def read_load() -> list[float]:
    """Return the load averages of the last 1, 5 and 15 minutes."""
    return [round(load, 2) for load in os.getloadavg()]
