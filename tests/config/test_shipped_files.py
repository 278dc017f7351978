"""Recipes and model configs that come with MegaRL, by name and as copies."""

from __future__ import annotations

from pathlib import Path

import pytest

from megarl.config import load_config
from megarl.config.recipe_copies import main, read_title
from megarl.config.shipped_files import CONFIGS, find_file, list_model_configs, list_recipes

pytestmark = pytest.mark.alone


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_names_stand_for_files(folder: Path) -> None:
    for name in ("quickstart", "quickstart.yaml", "configs/quickstart.yaml"):
        assert find_file(name) == str(CONFIGS / "quickstart.yaml")
    assert find_file("configs/models/qwen2.5_7b.json") == str(CONFIGS / "models/qwen2.5_7b.json")
    for name in ("", "nowhere.yaml", "models", "/configs/quickstart.yaml", "../quickstart.yaml"):
        assert find_file(name) == name
    (folder / "quickstart").touch()
    assert find_file("quickstart") == "quickstart"


def test_recipes_load_by_name_from_any_folder() -> None:
    config = load_config("qwen3_30b_a3b", ["run.dir=a"])
    assert config == load_config(CONFIGS / "qwen3_30b_a3b.yaml", ["run.dir=a"])
    assert config.model.hf_config == str(CONFIGS / "models/qwen3_30b_a3b.json")
    assert {"qwen3-30b-a3b", "deepseek-v3"} <= set(list_model_configs())


def test_lists_recipes_with_titles(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(list_recipes()) > 20
    assert "quickstart  Quickstart: PPO teaches a tiny MoE to use a calculator" in {
        " ".join(line.split()).replace(" ", "  ", 1) for line in lines
    }
    assert all(read_title(file) for file in list_recipes().values())


def test_copies_a_recipe(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["quickstart"]) == 0
    assert (folder / "quickstart.yaml").read_bytes() == (CONFIGS / "quickstart.yaml").read_bytes()
    assert main(["quickstart"]) == 2 and "quickstart.yaml exists" in capsys.readouterr().err
    assert main(["quickstrat"]) == 2 and "did you mean quickstart?" in capsys.readouterr().err
