"""Check what works on this machine, in a few seconds: `megarl doctor`

Reports version, devices, packages, programs and free space. Imports nothing heavy but torch: an installed package may
still fail to import, and a run checks again before it starts. Exits with 1 if something is missing that every run
needs.
"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from megarl import __version__
from megarl.config.command_line import INSTALL_HINT, Parser, run_cli

REQUIRED = {"torch": "torch", "megatron-core": "megatron.core", "sglang": "sglang", "transformers": "transformers"}
OPTIONAL = {
    "transformer-engine": "fused attention and norms, FP8; needed on a GPU",
    "apex": "adds up weight gradients in their GEMM, built from NVIDIA's source; optional",
}


class CheckResult(NamedTuple):
    """Result of one check. state: `yes`, `no` (optional and absent), or `MISSING` (every run needs it)."""

    name: str
    state: str
    detail: str


def installed_version(name: str) -> str:
    """Return the version of a distribution, or an empty string if it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def is_installed(module: str) -> bool:
    """Return whether a module can be found, without importing it or its packages."""
    try:
        return find_spec(module.partition(".")[0]) is not None
    except (ImportError, ValueError):
        return False


def check_packages() -> Iterator[CheckResult]:
    for name, module in REQUIRED.items():
        version = installed_version(name)
        is_usable = bool(version) and is_installed(module)
        yield CheckResult(name, "yes" if is_usable else "MISSING", version or INSTALL_HINT)
    for name, purpose in OPTIONAL.items():
        is_usable = is_installed(name.replace("-", "_"))
        yield CheckResult(name, "yes" if is_usable else "no", installed_version(name) if is_usable else purpose)


def check_devices() -> CheckResult:
    if not installed_version("torch") or not is_installed("torch"):
        return CheckResult("devices", "MISSING", f"needs torch: {INSTALL_HINT}")
    from megarl.parallel import device

    devices = ", ".join(device.gpu_names()) or "no GPU: trains and generates on the CPU"
    return CheckResult("devices", "yes", f"{devices}; {len(os.sched_getaffinity(0))} cores")


def check_sandbox() -> CheckResult:
    """Check that bubblewrap can create a box. The sandbox's own checks, made before a run, are stricter."""
    name, remedy = "bubblewrap", "the policy's code cannot run sandboxed on this machine: megarl/sandbox/README.md"
    if not (program := shutil.which("bwrap")):
        return CheckResult(name, "no", f"not installed; {remedy}")
    command = [program, "--ro-bind", "/", "/", "--unshare-all", "--die-with-parent", "true"]
    try:
        process = subprocess.run(command, capture_output=True, text=True, timeout=2, errors="replace")
    except (OSError, subprocess.TimeoutExpired) as error:
        return CheckResult(name, "no", f"{type(error).__name__}; {remedy}")
    stderr = " ".join(process.stderr.split())[:100]
    is_failed = process.returncode != 0
    return CheckResult(name, "no" if is_failed else "yes", f"{stderr}; {remedy}" if is_failed else "makes a box")


def check_slurm() -> CheckResult:
    if job := os.environ.get("SLURM_JOB_ID"):
        return CheckResult("Slurm", "yes", f"job {job} on {os.environ.get('SLURM_JOB_NUM_NODES', '?')} nodes")
    if shutil.which("sbatch"):
        return CheckResult("Slurm", "yes", "sbatch slurm/ppo_moe.sh CONFIG")
    return CheckResult("Slurm", "no", "no sbatch on this machine")


def check_space() -> Iterator[CheckResult]:
    usage = shutil.disk_usage(".")
    yield CheckResult("disk", "yes", f"{usage.free / 1e9:.0f} of {usage.total / 1e9:.0f} GB free in {Path.cwd()}")
    memory = Path("/proc/meminfo")
    if memory.is_file():
        gb = {line.split()[0]: int(line.split()[1]) * 1024 / 1e9 for line in memory.read_text().splitlines()}
        yield CheckResult("memory", "yes", f"{gb['MemAvailable:']:.0f} of {gb['MemTotal:']:.0f} GB free")
    if Path("/dev/shm").is_dir():
        shared = shutil.disk_usage("/dev/shm").total
        short = "" if shared >= 2e9 else "; ranks share memory through it: enlarge it (--shm-size of the container)"
        yield CheckResult("/dev/shm", "no" if short else "yes", f"{shared / 1e9:.1f} GB{short}")


def run_checks() -> list[CheckResult]:
    """Run all checks, in display order."""
    is_supported = sys.version_info[:2] in ((3, 11), (3, 12))
    note = "" if is_supported else "; the lists of launch/ are for 3.11 and 3.12"
    python = CheckResult("Python", "yes" if is_supported else "no", sys.version.split()[0] + note)
    return [python, check_devices(), *check_packages(), check_sandbox(), check_slurm(), *check_space()]


def main(arguments: Sequence[str]) -> int:
    return run_cli(lambda: print_report(arguments))


def print_report(arguments: Sequence[str]) -> int:
    """Print the report; return 1 if a package that every run needs is missing."""
    Parser(__doc__, prog="megarl doctor").parse_args(arguments)
    lines = run_checks()
    print(f"MegaRL {__version__}")
    for name, state, detail in lines:
        print(f"  {name:<20}{state:<9}{detail}")
    missing = [line.name for line in lines if line.state == "MISSING"]
    if missing:
        print(f"\nmissing: {', '.join(missing)}. To install what is needed: {INSTALL_HINT}")
    else:
        print("\nNext: bash launch/quickstart.sh, or megarl train CONFIG --dry-run")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
