"""Throughput and latency of boxes, relative to plain bubblewrap with the same Python.

    .venv/bin/python tools/bench.py boxes [--boxes 100] [--workers 1 2 4 8] [section.key=value ...]

Each box runs `python3 -c pass`. So does the plain one: bubblewrap with /usr, the interpreter without its installed
packages, /proc, /dev and /tmp, started by a minimal program. Both take turns, so that other load on the machine affects
both. CPU seconds are those of all their processes; on a busy machine they mean more than the clock: the number of cores
divided by them is the throughput that the processes would allow. The kernel's own work for both, such as tearing down
namespaces, shows only in boxes per second.

A few boxes run first: from then on, prepared boxes are waiting, as they are in a run.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import resource
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

from benchmarks.measure import compute_ratio, process_seconds
from benchmarks.output import Report
from megarl.config import ConfigError, from_dict, plain_yaml
from megarl.config.command_line import int_in_range
from megarl.processes.children import inherit_orphans, list_children
from megarl.sandbox.box import Sandbox
from megarl.sandbox.mounts import SITE_PACKAGES

COMMAND = ["python3", "-c", "pass"]
FIRST = 8
ROUNDS = 4
PYTHON = os.path.realpath(sys.base_prefix)
PLAIN_COMMAND = [
    *("bwrap", "--unshare-all", "--die-with-parent", "--ro-bind", "/usr", "/usr"),
    *("--symlink", "usr/lib", "/lib", "--symlink", "usr/lib64", "/lib64", "--symlink", "usr/bin", "/bin"),
    *(() if PYTHON.startswith("/usr") else ("--ro-bind", PYTHON, PYTHON)),
    *("--tmpfs", f"{PYTHON}/{SITE_PACKAGES}", "--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp"),
    *(f"{PYTHON}/bin/python3", *COMMAND[1:]),
]


async def measure_alternating(sandbox: Sandbox, count: int) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Return the seconds of each box, and the CPU seconds of one, for each kind; the kinds take turns."""
    seconds_by_kind: dict[str, list[float]] = {"bare": [], "sandbox": []}
    for _ in range(FIRST):
        await sandbox.run(COMMAND)
    await asyncio.sleep(0.2)
    cpu_by_kind = {"bare": 0.0, "sandbox": -process_seconds(sandbox.runner_pid)}
    known_children = set(list_children())
    for _ in range(count):
        start = time.perf_counter()
        result = await sandbox.run(COMMAND)
        seconds_by_kind["sandbox"].append(time.perf_counter() - start)
        if not result.ok:
            raise ConfigError(f"a box does not run Python: {result.stderr.decode(errors='replace')[-200:]}")
        cpu_before, start = children_cpu_seconds(), time.perf_counter()
        run_plain()
        seconds_by_kind["bare"].append(time.perf_counter() - start)
        reap(known_children)
        cpu_by_kind["bare"] += children_cpu_seconds() - cpu_before
    # The runner reaps a box's first process shortly after the box ends.
    cpu_by_kind["sandbox"] += process_seconds(sandbox.runner_pid)
    return seconds_by_kind, {kind: seconds / count for kind, seconds in cpu_by_kind.items()}


async def measure_concurrent(sandbox: Sandbox, count: int, workers: int) -> dict[str, list[float]]:
    """Return boxes and plain ones per second with this many workers, by turn; each turn has a quarter of the total."""
    each = max(1, count // workers // ROUNDS)
    rates: dict[str, list[float]] = {"bare": [], "sandbox": []}
    loop = asyncio.get_running_loop()
    with ThreadPoolExecutor(workers) as threads:

        async def run_sandboxed() -> None:
            for _ in range(each):
                await sandbox.run(COMMAND)

        def run_plain_boxes() -> None:
            for _ in range(each):
                run_plain()

        for _ in range(ROUNDS):
            start = time.perf_counter()
            await asyncio.gather(*(run_sandboxed() for _ in range(workers)))
            rates["sandbox"].append(each * workers / (time.perf_counter() - start))
            start = time.perf_counter()
            await asyncio.gather(*(loop.run_in_executor(threads, run_plain_boxes) for _ in range(workers)))
            rates["bare"].append(each * workers / (time.perf_counter() - start))
    return rates


def run_plain() -> None:
    subprocess.run(PLAIN_COMMAND, env={}, stdin=subprocess.DEVNULL, check=True)


def reap(known_children: set[int]) -> None:
    """Wait for the first process of a plain box, which may briefly outlive its bubblewrap and then becomes our
    child."""
    deadline = time.monotonic() + 0.05
    while time.monotonic() < deadline:
        for pid in set(list_children()) - known_children:
            os.waitpid(pid, os.WNOHANG)
        time.sleep(0.001)


def children_cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


async def measure(options: argparse.Namespace, report: Report) -> None:
    inherit_orphans()
    sandbox = Sandbox(options.settings)
    try:
        report.note(str(await sandbox.probe()))
        seconds, processor_s = await measure_alternating(sandbox, options.boxes)
        rows = []
        for kind, values in seconds.items():
            cuts = statistics.quantiles(values, n=20) if len(values) > 1 else values * 19
            row = {"way": kind, "p50, ms": 1e3 * cuts[9], "p95, ms": 1e3 * cuts[18]}
            row |= {"processor ms": 1e3 * processor_s[kind], "ratio": compute_ratio(values, seconds["bare"])}
            row["ratio of processor ms"] = processor_s[kind] / processor_s["bare"] if processor_s["bare"] else None
            rows.append(row | {"samples": {"seconds": values}})
        report.table(f"{options.boxes} boxes one after another", rows)
        concurrent = []
        for workers in options.workers:
            rates = await measure_concurrent(sandbox, options.boxes, workers)
            row = {"at once": workers} | {f"{kind}, boxes/s": statistics.harmonic_mean(rates[kind]) for kind in rates}
            row["ratio"] = compute_ratio(rates["sandbox"], rates["bare"])
            concurrent.append(row | {"samples": rates})
        report.table("boxes at once", concurrent)
    finally:
        await sandbox.close()


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--boxes", type=int_in_range(), default=100, help="of each kind, and with each number of workers"
    )
    parser.add_argument(
        "--workers", type=int_in_range(most=1000), nargs="+", default=[1, 2, 4, 8], help="boxes at once"
    )
    parser.add_argument("overrides", nargs="*", help="sandbox.memory_mb=256 and the like")


def run(options: argparse.Namespace, report: Report) -> None:
    tree = plain_yaml.apply_overrides({}, options.overrides, {"sandbox": "sandbox.backend"})
    options.settings = from_dict(tree).sandbox
    if options.settings.backend != "bubblewrap":
        raise ConfigError("sandbox.backend must be bubblewrap here: it is what the boxes are compared with")
    report.start()
    asyncio.run(measure(options, report))
