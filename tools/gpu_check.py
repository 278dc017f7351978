"""Check what works on this machine's NVIDIA GPU: each part on its own, from the kernels to the whole loop.

    .venv/bin/python tools/gpu_check.py [--only exact,ipc] [--json FILE] [--device cpu]

Every row is a process with a timeout, so that one that crashes or hangs does not end the others. `gpu/README.md`
describes each. A row has passed, failed, or is not available, with the reason: no NVIDIA GPU, or a package that is not
installed. `--device cpu` runs the rows that have a CPU form, which shows that this tool works, not that a GPU does.
Exit status: 0 if every row that could be tried passed, 1 if one failed, 3 if none could be tried.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

from gpu.found import CheckResult, make_result, status, table
from gpu.rows import ROWS, parse_rows, reason_against
from rich.console import Console

from megarl.config.command_line import Parser, check_writable_file, run_cli

TOOLS = Path(__file__).resolve().parent
RESULT = "GPU-CHECK "


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
        result = CheckResult("failed", f"not done after {timeout_s:g} s")
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
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write what was found")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="default %(default)s")
    parser.add_argument("--as-row", choices=list(ROWS), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.as_row:
        return as_row(options.as_row, options.device)
    names = parse_rows(options.only)
    check_writable_file(options.json, "--json")
    import torch

    has_gpu = torch.cuda.is_available()
    results: dict[str, CheckResult] = {}
    console = Console(width=None if sys.stdout.isatty() else 140)
    for name in names:
        if reason := reason_against(ROWS[name], options.device, has_gpu):
            results[name] = CheckResult("not here", reason)
        else:
            results[name] = run_row(name, options.device, ROWS[name].timeout_s)
            console.print(f"{name}: {results[name].state}, {results[name].text}", markup=False)
        if options.json:  # after each row, so that results survive the loss of the machine
            machine = torch.cuda.get_device_name() if has_gpu and options.device == "cuda" else "no GPU"
            tree = {"device": machine, "torch": torch.__version__, "rows": {k: asdict(v) for k, v in results.items()}}
            options.json.write_text(json.dumps(tree, indent=1) + "\n")
    console.print(table(results, {name: ROWS[name].title for name in names}))
    return status(results)


if __name__ == "__main__":
    sys.exit(run_cli(main))
