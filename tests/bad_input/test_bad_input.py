"""All cases of the tables in this folder have the outcome that `case.py` requires."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.alone, pytest.mark.nightly]

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
sys.path.insert(0, str(FOLDER))
AREAS = sorted(path.stem for path in FOLDER.glob("of_*.py"))
CASES = [(area, number, case) for area in AREAS for number, case in enumerate(importlib.import_module(area).CASES)]


@pytest.fixture(scope="session")
def base_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model, prompts without tools, and conversations."""
    folder = tmp_path_factory.mktemp("base") / "m"
    command = [sys.executable, str(ROOT / "tools/make_quickstart.py"), str(folder), "--demonstrations", "200"]
    subprocess.run([*command, "--train", "60"], cwd=ROOT, check=True, capture_output=True)
    for name in ("train.jsonl", "eval.jsonl"):
        rows = [json.loads(line) for line in (folder / name).read_text().splitlines()]
        lines = [json.dumps({key: value for key, value in row.items() if key != "tools"}) for row in rows]
        (folder / name).write_text("\n".join(lines) + "\n")
    return folder


MIN_CASES = 1200


def test_number_of_cases() -> None:
    assert len(CASES) >= MIN_CASES


def test_case_names_are_unique() -> None:
    names = [(area, case.name) for area, _, case in CASES]
    assert len(set(names)) == len(names)


@pytest.fixture(scope="session")
def results(
    base_folder: Path,
    tmp_path_factory: pytest.TempPathFactory,
    run_ranks: Callable[..., list[dict[str, Any]]],
    request: pytest.FixtureRequest,
) -> Callable[[str, int], tuple[Path, dict[str, Any]]]:
    """A function of area and number that returns the folder and result of a case; the cases of an area run together."""
    selected: dict[str, list[str]] = {}
    for item in request.session.items:
        if (call := getattr(item, "callspec", None)) and "area" in call.params:
            selected.setdefault(call.params["area"], []).append(str(call.params["number"]))

    @cache
    def run_area(area: str) -> tuple[Path, dict[str, Any]]:
        folder = tmp_path_factory.mktemp(area)
        arguments = (area, str(folder), str(base_folder), *selected[area])
        return folder, run_ranks(1, "tests/bad_input/attempt.py", *arguments, timeout=580.0)[0]

    return lambda area, number: (run_area(area)[0] / str(number), run_area(area)[1][str(number)])


@pytest.mark.parametrize(("area", "number", "case"), CASES, ids=[f"{area}: {case.name}" for area, _, case in CASES])
def test_reports_one_error_line(area: str, number: int, case: Any, results: Callable[[str, int], Any]) -> None:
    folder, result = results(area, number)
    assert "broken" not in result, result["broken"]
    lines = [line for line in result["err"].splitlines() if line.strip()]
    assert (result["code"], len(lines)) == (2, 1), result
    assert lines[0].startswith("error: "), result
    for text in case.expected:
        assert text.replace("FOLDER", str(folder)) in lines[0], result
    assert not result["changed"], result
    assert not result["children"], result
