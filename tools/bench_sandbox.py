"""Throughput and latency of boxes, relative to plain bubblewrap with the same Python.

    .venv/bin/python tools/bench_sandbox.py [--boxes 100] [--workers 1 2 4 8] [section.key=value ...]

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
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from megarl.config import ConfigError, from_dict, plain_yaml
from megarl.config.command_line import Parser, int_in_range, run_cli
from megarl.processes.children import inherit_orphans
from megarl.sandbox.box import Sandbox
from megarl.sandbox.mounts import SITE_PACKAGES

WIDTHS = {"p50": 10, "p95": 10, "processor": 14}
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


async def measure_alternating(sandbox: Sandbox, count: int) -> dict[str, dict[str, float]]:
    """Return the seconds and CPU seconds of a box, for each kind; the kinds take turns."""
    seconds_by_kind: dict[str, list[float]] = {"sandbox": [], "bare": []}
    for _ in range(FIRST):
        await sandbox.run(COMMAND)
    await asyncio.sleep(0.2)
    cpu_by_kind = {"sandbox": -cpu_seconds(sandbox.runner_pid), "bare": 0.0}
    known_children = children()
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
    cpu_by_kind["sandbox"] += cpu_seconds(sandbox.runner_pid)
    results = {}
    for kind, seconds in seconds_by_kind.items():
        cuts = statistics.quantiles(seconds, n=20) if count > 1 else seconds * 19
        results[kind] = {"p50": cuts[9], "p95": cuts[18], "processor": cpu_by_kind[kind] / count}
    return results


async def measure_concurrent(sandbox: Sandbox, count: int, workers: int) -> tuple[float, float]:
    """Return boxes and plain ones per second with this many workers; the two take turns by quarters of the total."""
    each = max(1, count // workers // ROUNDS)
    elapsed = [0.0, 0.0]
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
            elapsed[0] += time.perf_counter() - start
            start = time.perf_counter()
            await asyncio.gather(*(loop.run_in_executor(threads, run_plain_boxes) for _ in range(workers)))
            elapsed[1] += time.perf_counter() - start
    number = ROUNDS * each * workers
    return number / elapsed[0], number / elapsed[1]


def run_plain() -> None:
    subprocess.run(PLAIN_COMMAND, env={}, stdin=subprocess.DEVNULL, check=True)


def cpu_seconds(pid: int) -> float:
    """Return the CPU seconds of a process and of the children that it has reaped."""
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(") ")[2].split()
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


def children() -> set[int]:
    with open(f"/proc/self/task/{os.getpid()}/children") as file:
        return {int(pid) for pid in file.read().split()}


def reap(known_children: set[int]) -> None:
    """Wait for the first process of a plain box, which may briefly outlive its bubblewrap and then becomes our
    child."""
    deadline = time.monotonic() + 0.05
    while time.monotonic() < deadline:
        for pid in children() - known_children:
            os.waitpid(pid, 0)
        time.sleep(0.001)


def children_cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


async def measure(options: argparse.Namespace) -> None:
    inherit_orphans()
    sandbox = Sandbox(options.settings)
    try:
        print(await sandbox.probe())
        kinds = await measure_alternating(sandbox, options.boxes)
        print(f"{'':12}{'p50 ms':>10}{'p95 ms':>10}{'processor ms':>14}")
        for kind, row in kinds.items():
            print(f"{kind:12}{row['p50'] * 1e3:10.1f}{row['p95'] * 1e3:10.1f}{row['processor'] * 1e3:14.1f}")
        ratio = {name: kinds["sandbox"][name] / kinds["bare"][name] for name in kinds["bare"] if kinds["bare"][name]}
        print(f"{'ratio':12}" + "".join(f"{ratio.get(name, float('nan')):{w}.2f}" for name, w in WIDTHS.items()))
        for workers in options.workers:
            sandboxed, plain = await measure_concurrent(sandbox, options.boxes, workers)
            print(f"{workers:3} at once: {sandboxed:8.1f} boxes/s, bare {plain:8.1f}, ratio {sandboxed / plain:5.2f}")
    finally:
        await sandbox.close()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = Parser(description=__doc__)
    parser.add_argument(
        "--boxes", type=int_in_range(), default=100, help="of each kind, and with each number of workers"
    )
    parser.add_argument(
        "--workers", type=int_in_range(most=1000), nargs="+", default=[1, 2, 4, 8], help="boxes at once"
    )
    parser.add_argument("overrides", nargs="*", help="sandbox.memory_mb=256 and the like")
    options = parser.parse_args(arguments)
    tree = plain_yaml.apply_overrides({}, options.overrides, {"sandbox": "sandbox.backend"})
    options.settings = from_dict(tree).sandbox
    if options.settings.backend != "bubblewrap":
        raise ConfigError("sandbox.backend must be bubblewrap here: it is what the boxes are compared with")
    asyncio.run(measure(options))
    return 0


if __name__ == "__main__":
    sys.exit(run_cli(main))
