"""Check what works on this machine's NVIDIA GPU: each part on its own, from the kernels to the whole loop.

    .venv/bin/python tools/gpu_check.py --report gpu.md            every row, the quickstart first, within ten minutes
    .venv/bin/python tools/gpu_check.py --two-minutes              a first look
    .venv/bin/python tools/gpu_check.py [--only exact,ipc] [--json FILE] [--device cpu]

Every row is a process with a timeout, so that one that crashes or hangs does not end the others. `gpu/README.md`
describes each. A row has passed, failed, was not started in time, or is not available, with the reason: no NVIDIA GPU,
or a package that is not installed. `--device cpu` runs the rows that have a CPU form, which shows that this tool works,
not that a GPU does. Exit status: 0 if every row that could be tried passed, 1 if one failed, 3 if none could be tried.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

from gpu.found import CheckResult, make_result, report, status, table
from gpu.rows import FIRST_LOOK, ROWS, parse_rows, reason_against
from rich.console import Console

from megarl.config.command_line import Parser, check_writable_file, float_in_range, run_cli
from megarl.config.strict import ConfigError

TOOLS = Path(__file__).resolve().parent
RESULT = "GPU-CHECK "
LEAST_S = 5.0
"""Seconds that must be left for a row to be started."""
CPU_TIMEOUT_S = 600.0
"""Of each row with `--device cpu`, which is slower than the GPU for which rows have their timeouts."""


def run_row(name: str, device: str, timeout_s: float) -> CheckResult:
    """Run a row in its own process group, which is killed at the end. Return the result."""
    paths = [str(TOOLS.parent), str(TOOLS), *filter(None, [os.environ.get("PYTHONPATH")])]
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}
    env = {**os.environ, **hidden, "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-W", "ignore", __file__, "--as-row", name, "--device", device]
    start = time.monotonic()
    process = subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        output, errors = process.communicate(timeout=timeout_s)
        result = read(output, errors, process.returncode)
    except subprocess.TimeoutExpired:
        result = CheckResult("failed", f"not done after {timeout_s:.3g} s")
    finally:
        try:
            os.killpg(process.pid, signal.SIGKILL)  # also what the row has started
        except ProcessLookupError:
            pass
        process.wait()
    return replace(result, seconds=time.monotonic() - start)


def read(output: str, errors: str, code: int) -> CheckResult:
    """Return the row's own result, or how its process ended."""
    results = [line for line in output.splitlines() if line.startswith(RESULT)]
    if results:
        return CheckResult(**json.loads(results[-1].removeprefix(RESULT)))
    last = (errors.strip().splitlines() or ["no output"])[-1]
    return make_result([f"ended with {code}: {last[:400]}"], "")


def as_row(name: str, device: str) -> int:
    """Run as the row's process."""
    module, function = ROWS[name].work.split(":")
    try:
        result = getattr(importlib.import_module(f"gpu.{module}"), function)(device)
    except Exception as error:  # any failure is a result
        result = CheckResult("failed", f"{type(error).__name__}: {' '.join(str(error).split())[:600]}")
    print(RESULT + json.dumps(asdict(result)), flush=True)
    return 0


def main() -> int:
    parser = Parser(description=__doc__)
    parser.add_argument("--only", default="", metavar="ROW[,ROW]", help=f"of {', '.join(ROWS)}")
    parser.add_argument(
        "--two-minutes", action="store_true", help=f"the rows {', '.join(FIRST_LOOK)}, with --minutes 2"
    )
    parser.add_argument(
        "--minutes", type=float_in_range(0, 1440), metavar="N", help="for all rows; default 10, on a CPU no limit"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write what was found")
    parser.add_argument("--report", type=Path, metavar="FILE", help="where to write it as a Markdown table")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="default %(default)s")
    parser.add_argument("--as-row", choices=list(ROWS), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.as_row:
        return as_row(options.as_row, options.device)
    if options.two_minutes and (options.only or options.minutes):
        raise ConfigError("--two-minutes sets --only and --minutes; remove them")
    names = parse_rows(",".join(FIRST_LOOK) if options.two_minutes else options.only)
    check_writable_file(options.json, "--json")
    check_writable_file(options.report, "--report")
    on_cpu = options.device == "cpu"
    minutes = 2.0 if options.two_minutes else options.minutes or (math.inf if on_cpu else 10.0)
    import torch

    has_gpu = torch.cuda.is_available()
    machine = torch.cuda.get_device_name() if has_gpu and not on_cpu else "no GPU"
    results: dict[str, CheckResult] = {}
    titles = {name: ROWS[name].title for name in names}
    deadline = time.monotonic() + 60 * minutes
    console = Console(width=None if sys.stdout.isatty() else 140)
    for name in names:
        if reason := reason_against(ROWS[name], options.device, has_gpu):
            results[name] = CheckResult("not here", reason)
        elif (left_s := deadline - time.monotonic()) < LEAST_S:
            results[name] = CheckResult("not run", f"the {minutes:g} minutes were over; run it by --only {name}")
        else:
            timeout_s = min(left_s, CPU_TIMEOUT_S if on_cpu else ROWS[name].timeout_s)
            results[name] = run_row(name, options.device, timeout_s)
            console.print(f"{name}: {results[name].state}, {results[name].text}", markup=False)
        # After each row, so that results survive the loss of the machine.
        if options.report:
            options.report.write_text(report(results, titles, f"{machine}, torch {torch.__version__}"))
        if options.json:
            tree = {"device": machine, "torch": torch.__version__, "rows": {k: asdict(v) for k, v in results.items()}}
            options.json.write_text(json.dumps(tree, indent=1) + "\n")
    console.print(table(results, titles))
    return status(results)


if __name__ == "__main__":
    sys.exit(run_cli(main))
