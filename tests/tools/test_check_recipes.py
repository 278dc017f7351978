"""Recipes are held to what they expect."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

import check_recipes  # noqa: E402
import trials  # noqa: E402

from megarl.config import ConfigError  # noqa: E402


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "mine.yaml"
    path.write_text("expect:\n  a: {least: 0.5}\n  b: {most: 1}\n")

    def run(config: str, overrides: list[str], run_dir: Path) -> Any:
        assert config == str(path) and run_dir.name == "mine"
        return {1: {"a": float(dict(one.split("=") for one in overrides).get("run.seed", 1)) / 2}, 2: {"b": 1.0}}

    monkeypatch.setattr(trials, "run", run)
    return path


def test_what_is_reached_and_what_is_missed(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check_recipes.main([str(recipe)]) == 0
    assert "MISSED" not in capsys.readouterr().out
    assert check_recipes.main([str(recipe), "--out", "elsewhere", "run.seed=0"]) == 1
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("  mine")]
    assert lines == [["mine", "a", "at", "least", "0.5", "0", "MISSED"], ["mine", "b", "at", "most", "1", "1"]]


def test_the_small_ones_are_found() -> None:
    names = [path.name for path in check_recipes.small()]
    assert {"quickstart.yaml", "quickstart_async.yaml", "quickstart_split.yaml"} <= set(names)
    assert "deepseek_v3_671b.yaml" not in names


def test_a_recipe_that_expects_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("algorithm: ppo\n")
    with pytest.raises(ConfigError, match="a.yaml expects nothing: give it a section `expect`"):
        check_recipes.main([str(path)])
