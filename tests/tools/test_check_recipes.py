"""`check_recipes`: recipes must reach their `expect` values."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

import check_recipes  # noqa: E402
import trials  # noqa: E402

from megarl.config import ConfigError, load_config  # noqa: E402
from megarl.dry_run.validation import parse_expectations  # noqa: E402


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "mine.yaml"
    path.write_text("expect:\n  a: {min: 0.5}\n  b: {max: 1}\n")

    def run(config: str, overrides: list[str], run_dir: Path) -> Any:
        assert config == str(path) and run_dir.name == "mine"
        return {1: {"a": float(dict(item.split("=") for item in overrides).get("run.seed", 1)) / 2}, 2: {"b": 1.0}}

    monkeypatch.setattr(trials, "run", run)
    return path


def test_reports_missed_expectations(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check_recipes.main([str(recipe)]) == 0
    assert "MISSED" not in capsys.readouterr().out
    assert check_recipes.main([str(recipe), "--out", "elsewhere", "run.seed=0"]) == 1
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("  mine")]
    assert lines == [["mine", "a", "at", "least", "0.5", "0", "MISSED"], ["mine", "b", "at", "most", "1", "1"]]


def test_finds_small_recipes() -> None:
    names = [path.name for path in check_recipes.find_small_recipes()]
    expected = ["quickstart.yaml", "quickstart_async.yaml", "quickstart_sft.yaml", "quickstart_split.yaml"]
    assert names == expected  # no recipe that needs downloaded weights


def test_quickstart_recipes_use_the_given_folder(tmp_path: Path) -> None:
    configs = trials.ROOT / "configs"
    warm_up, ppo = (load_config(configs / name) for name in ("quickstart_sft.yaml", "quickstart.yaml"))
    with pytest.raises(ConfigError, match="model is not there: call launch/quickstart.sh first"):
        check_recipes.quickstart_overrides(warm_up, tmp_path)
    for name in ("model", "sft/export"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("sft.jsonl", "train.jsonl", "eval.jsonl"):
        (tmp_path / name).touch()
    root = str(tmp_path)
    assert check_recipes.quickstart_overrides(warm_up, tmp_path) == [
        f"model.path={root}/model",
        f"data.train={root}/sft.jsonl",
    ]
    expected = [f"model.path={root}/sft/export", f"data.train={root}/train.jsonl", f"data.eval={root}/eval.jsonl"]
    assert check_recipes.quickstart_overrides(ppo, tmp_path) == expected
    mixed_config = load_config(configs / "quickstart_sft.yaml", ["data.train=[runs/quickstart/sft.jsonl,mine.jsonl]"])
    with pytest.raises(ConfigError, match="mine.jsonl is not there"):
        check_recipes.quickstart_overrides(mixed_config, tmp_path)
    assert check_recipes.quickstart_overrides(load_config(configs / "sft.yaml"), tmp_path) == []


RECIPES = sorted((trials.ROOT / "configs").glob("*.yaml"))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_each_recipe_has_expectations(path: Path) -> None:
    """Evaluation metrics require evaluation to be enabled."""
    config = load_config(path)
    result = parse_expectations(config)
    assert result
    for metric in result:
        if metric.startswith("eval/"):
            assert config.run.eval_every and config.data.eval, f"{metric} is never reported"


def test_rejects_a_recipe_without_expectations(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("algorithm: ppo\n")
    with pytest.raises(ConfigError, match="a.yaml expects nothing: give it a section `expect`"):
        check_recipes.main([str(path)])
