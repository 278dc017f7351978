"""Inject faults into real runs: each row of the contract, and what was observed.

    .venv/bin/python tools/fault_matrix.py [--only 1,8-11] [--short] [--json FILE] [--keep FOLDER]
    .venv/bin/python tools/fault_matrix.py --soak 30 [--every 90]

Runs are the training program with a tiny MoE, the real Megatron-Core and, where a row needs one, the real SGLang on the
CPU. Processes are killed by their ids, disks are small file systems, bits are flipped in files and on the wire.
`faults/README.md` describes each row. `--short` runs the rows that take seconds and need no engine. `detect`: seconds
from the fault to its first visible trace; `recover`: seconds to where the run continued; `lost`: samples that were
never trained on. The exit status is 1 if a row is not as expected.

`--soak` trains under random kills, `--every` seconds apart on average, and compares the final weights with those of the
undisturbed run, bit for bit.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from faults import soaking
from faults.fixtures import Fixtures
from faults.job import UnexpectedOutcome, shortened
from faults.results import RowResult, as_json, table, total
from faults.rows import ROWS, by_scenario, parse_rows
from rich.console import Console

from megarl.config.command_line import Parser, check_writable_file, check_writable_folder, float_in_range, run_cli
from megarl.config.strict import ConfigError


def run_scenarios(fixtures: Fixtures, numbers: list[int]) -> dict[int, RowResult]:
    """Return the observations of these rows; a row that could not be tried is not as expected, with the reason."""
    results: dict[int, RowResult] = {}
    for scenario, scenario_rows in by_scenario(numbers).items():
        try:
            for number, result in importlib.import_module(f"faults.{scenario}").run_scenario(fixtures, scenario_rows):
                fixtures.say(f"row {number} {'is as expected' if result.ok else 'is NOT as expected'}: {result.text}")
                results[number] = replace(result, text=result.text.replace(f"{fixtures.folder}/", ""))
        except (UnexpectedOutcome, ConfigError, OSError) as error:
            for number in scenario_rows:
                results.setdefault(number, RowResult(False, shortened(f"{type(error).__name__}: {error}", 300)))
    return results


def main() -> int:
    parser = Parser(description=__doc__)
    parser.add_argument("--only", default="", metavar="N[,M-K]", help="these rows")
    parser.add_argument("--short", action="store_true", help="rows that take seconds and need no engine")
    parser.add_argument("--soak", type=float_in_range(), metavar="MINUTES", help="train under kills at random")
    parser.add_argument(
        "--every", type=float_in_range(), default=90.0, metavar="SECONDS", help="between kills, on average"
    )
    parser.add_argument("--json", type=Path, help="a file to write the figures to")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="where runs stay; without, they are removed")
    options = parser.parse_args()
    try:
        numbers = parse_rows(options.only) if options.only else list(ROWS)
    except ValueError as error:
        raise ConfigError(f"--only: {error}") from None
    if options.short:
        numbers = [number for number in numbers if ROWS[number].short]
    check_writable_file(options.json, "--json")
    if options.keep is not None:
        check_writable_folder(options.keep, "--keep")
        folder = options.keep / time.strftime("%Y%m%d-%H%M%S")
        folder.mkdir(parents=True)
    else:
        folder = Path(tempfile.mkdtemp(prefix="megarl-faults-"))
    os.umask(0o077)
    console, start = Console(width=max(Console().width, 160)), time.monotonic()
    errors = Console(stderr=True)
    fixtures = Fixtures(
        folder, lambda text: errors.print(f"{time.monotonic() - start:6.1f} s  {text}", highlight=False)
    )
    try:
        if options.soak:
            report = soaking.soak(fixtures, 60 * options.soak, options.every)
            console.print(soaking.table(report))
            is_ok, written = report.ok, report.as_json()
        else:
            results = run_scenarios(fixtures, numbers)
            console.print(table(results))
            console.print(f"{total(results)}, in {time.monotonic() - start:.0f} s")
            is_ok, written = all(result.ok for result in results.values()), as_json(results)
    finally:
        fixtures.close()
        if options.keep is None:
            shutil.rmtree(folder, ignore_errors=True)
    if options.json:
        options.json.write_text(json.dumps(written, indent=1))
    return 0 if is_ok else 1


if __name__ == "__main__":
    sys.exit(run_cli(main))
