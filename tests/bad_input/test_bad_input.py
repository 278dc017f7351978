"""Every mistake in the tables beside this file ends as `case.py` says that mistakes end."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(HERE))
AREAS = sorted(path.stem for path in HERE.glob("of_*.py"))
CASES = [(area, number, case) for area in AREAS for number, case in enumerate(importlib.import_module(area).CASES)]


@pytest.fixture(scope="session")
def material(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model, prompts and conversations."""
    folder = tmp_path_factory.mktemp("material") / "m"
    command = [sys.executable, str(ROOT / "tools/make_quickstart.py"), str(folder), "--demonstrations", "200"]
    subprocess.run([*command, "--train", "60"], cwd=ROOT, check=True, capture_output=True)
    return folder


def test_names_are_names() -> None:
    names = [(area, case.name) for area, _, case in CASES]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(("area", "number", "case"), CASES, ids=[f"{area}: {case.name}" for area, _, case in CASES])
def test_a_mistake_is_one_line(
    area: str,
    number: int,
    case: Any,
    material: Path,
    tmp_path: Path,
    run_ranks: Callable[..., list[dict[str, Any]]],
) -> None:
    folder = tmp_path / "f"
    arguments = (area, str(number), str(folder), str(material))
    (result,) = run_ranks(1, "tests/bad_input/attempt.py", *arguments, timeout=60.0)
    lines = [line for line in result["err"].splitlines() if line.strip()]
    assert (result["code"], len(lines)) == (2, 1), result
    assert lines[0].startswith("error: "), result
    for text in case.says:
        assert text.replace("FOLDER", str(folder)) in lines[0], result
    assert not result["changed"], result
    assert not result["children"], result
