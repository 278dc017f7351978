"""`compare_algorithms`: its table and curves, reuse of runs, and valid configurations."""

from __future__ import annotations

import json
import math
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

import compare_algorithms  # noqa: E402
import trials  # noqa: E402

from megarl.config import ConfigError, load_config  # noqa: E402
from megarl.dry_run.validation import validate  # noqa: E402

pytestmark = pytest.mark.alone


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "sft" / "export").mkdir(parents=True)
    for name in ("sft/export/config.json", "train.jsonl", "eval.jsonl"):
        (tmp_path / name).write_text("{}")
    return tmp_path


def test_summarizes_a_run() -> None:
    rows = {0: {"eval/reward_greedy": 0.25, "eval/reward_sampled": 0.5}}
    rows |= {step: {"rollout/reward_mean": float(step), "time/step": 10.0 - step} for step in range(1, 8)}
    rows[7] |= {"eval/reward_greedy": 1.0, "eval/reward_sampled": 0.75}
    result = compare_algorithms.figures(rows)
    assert [result[f"{name} {when}"] for name in ("greedy", "sampled") for when in ("before", "after")] == [
        0.25,
        1.0,
        0.5,
        0.75,
    ]
    assert result["reward"] == 5.0 and result["s a step"] == 6.0 and math.isnan(result["entropy"])


def test_runs_each_configuration_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    commands = []

    def run(command: list[str], **_: Any) -> Any:
        overrides = dict(text.split("=", 1) for text in command if "=" in text)
        commands.append((overrides["algorithm"], overrides["run.seed"], overrides.get("critic.warmup_steps")))
        run_dir = Path(overrides["run.dir"])
        run_dir.mkdir(parents=True)
        rows = [
            {"step": 1, "time": 0.0, "eval/reward_greedy": float(overrides["run.seed"]) / 4, "rollout/reward_mean": 0.5}
        ]
        (run_dir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return SimpleNamespace(returncode=0)

    host = SimpleNamespace(path="socket", close=lambda: None)
    monkeypatch.setattr(compare_algorithms, "start_host", lambda config, threads: host)
    monkeypatch.setattr(trials.subprocess, "run", run)
    arguments = [str(folder), "--algorithms", "grpo", "vapo", "--seeds", "1", "2", "--out", str(folder / "out")]
    for _ in range(2):
        assert compare_algorithms.main(arguments) == 0
    assert commands == [("grpo", "1", None), ("grpo", "2", None), ("vapo", "1", "4"), ("vapo", "2", "4")]
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if line.split()[:1] in (["grpo"], ["vapo"])]
    assert [row[:3] for row in rows] == [["grpo", "0.375", "0.375"], ["vapo", "0.375", "0.375"]] * 2
    assert (folder / "out" / "curves.png").read_bytes()[:4] == b"\x89PNG"
    assert set(json.loads((folder / "out" / "table.json").read_text())) == {"grpo", "vapo"}


def test_restarts_interrupted_runs_and_keeps_others(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = folder / "x"

    def run(command: list[str], **_: Any) -> Any:
        assert not run_dir.exists()
        run_dir.mkdir()
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(trials.subprocess, "run", run)
    run_dir.mkdir()
    (run_dir / "config.yaml").write_text("")  # interrupted after its start
    trials.run("a.yaml", ["run.seed=1"], run_dir)
    trials.run("a.yaml", ["run.seed=1"], run_dir)
    with pytest.raises(ConfigError, match="x has a run with other settings"):
        trials.run("a.yaml", ["run.seed=2"], run_dir)


def test_failed_run_stops_the_comparison(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        trials.subprocess, "run", lambda *_, **__: SimpleNamespace(returncode=2, stdout="", stderr="why")
    )
    with pytest.raises(SystemExit, match=r"x has failed:\nwhy"):
        trials.run("a.yaml", [], folder / "x")


@pytest.mark.parametrize("name", compare_algorithms.list_comparable())
def test_configurations_are_valid(folder: Path, name: str) -> None:
    """Apart from the missing model, there are no errors."""
    overrides = [f"algorithm={name}", *compare_algorithms.EXTRA_OVERRIDES.get(name, []), *trials.quickstart(folder)]
    report = validate(load_config(trials.ROOT / compare_algorithms.CONFIG, overrides))
    assert [error for error in report.errors if str(folder) not in str(error)] == []


def test_rejects_unknown_algorithms_and_missing_folders(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="^--algorithms: ppoo is none of ppo, vapo"):
        compare_algorithms.main([str(folder), "--algorithms", "ppoo"])
    with pytest.raises(ConfigError, match="has no sft/export/config.json: call launch/quickstart.sh first"):
        compare_algorithms.main([str(tmp_path / "nothing")])


def test_readme_lists_each_algorithm() -> None:
    """One row per comparable algorithm, each of which learned the task, and the plot."""
    page = (trials.ROOT / "megarl/controllers/README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| [\d.]+, ([\d.]+) \| [\d.]+, ([\d.]+) \|", page, flags=re.MULTILINE)
    assert [name for name, _, _ in rows] == compare_algorithms.list_comparable()
    assert all(float(figure) >= 0.8 for _, *held_out in rows for figure in held_out)
    assert "(compared.png)" in page and (trials.ROOT / "megarl/controllers/compared.png").is_file()
