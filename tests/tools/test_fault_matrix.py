"""The short rows of the fault matrix: real runs, without engines."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tools"))

from faults.disks import can_mount  # noqa: E402
from faults.rows import ROWS  # noqa: E402

pytestmark = pytest.mark.nightly

SHORT = [number for number, row in ROWS.items() if row.short]


def run_matrix(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "ignore", "tools/fault_matrix.py", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=dict(os.environ, PYTHONPATH=str(ROOT)))


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    file = tmp_path_factory.mktemp("faults") / "results.json"
    process = run_matrix("--short", "--json", str(file))
    assert file.exists(), process.stderr[-3000:]
    tree: dict[str, Any] = json.loads(file.read_text())
    assert f"{tree['ok']} of {len(SHORT)} rows are as expected" in process.stdout
    assert process.returncode == (tree["ok"] < len(SHORT))
    return tree["rows"]  # type: ignore[no-any-return]


@pytest.mark.parametrize("number", SHORT)
def test_short_rows_are_as_expected(results: dict[str, Any], number: int) -> None:
    if number == 13 and not can_mount() and os.getuid() == 0:
        pytest.skip("root writes whatever the mode is, and nobody may mount anything on this machine")
    if number == 28 and not can_mount():
        pytest.skip(
            "a limit on file sizes also cuts the terminal's output, and nobody may mount anything on this machine"
        )
    row = results[str(number)]
    assert row["ok"], f"{row['injected']}: {row['text']}"
    assert row["expected"] == ROWS[number].expected


def test_invalid_options_print_one_line() -> None:
    for arguments, message in ((("--only", "31"), "'31' names no row of 1 to 30"), (("--soak", "0"), "above 0")):
        process = run_matrix(*arguments)
        assert process.returncode == 2 and process.stderr.startswith("error: ") and message in process.stderr
        assert len(process.stderr.splitlines()) == 1
