"""What a figure depends on besides the program: the machine, its load, the versions of packages."""

from __future__ import annotations

import os
import platform

import psutil

from megarl.observe import run_machine
from megarl.parallel import device

PACKAGES = ("torch", "megatron-core", "sglang", "transformers", "trl")


def describe_machine() -> dict[str, str | int | float]:
    """Return processor, cores (those of this process, and all), memory in GB, GPUs and kernel."""
    return {
        "cpu": run_machine.find_cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "cores_of_machine": os.cpu_count() or 0,
        "memory_gb": round(psutil.virtual_memory().total / 1e9, 1),
        "gpu": ", ".join(device.gpu_names()) or "none",
        "kernel": platform.release(),
    }


def list_versions() -> dict[str, str]:
    """Return the versions of MegaRL, Python and PACKAGES, "none" for what is not installed."""
    versions = run_machine.list_versions(PACKAGES)
    return {name: versions.get(name, "none") for name in ("megarl", "python", *PACKAGES)}


def read_load() -> list[float]:
    """Return the load averages of the last 1, 5 and 15 minutes."""
    return [round(load, 2) for load in os.getloadavg()]
