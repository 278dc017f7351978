"""`compare_corrections`: its table, reuse of runs, and valid configurations."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

import compare_corrections  # noqa: E402
import trials  # noqa: E402

from megarl.config import ConfigError  # noqa: E402
from megarl.controllers.controller import load_requirements  # noqa: E402
from megarl.controllers.rollout_correction import check_correction  # noqa: E402

pytestmark = pytest.mark.alone


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "sft" / "export").mkdir(parents=True)
    for name in ("sft/export/config.json", "train.jsonl", "eval.jsonl"):
        (tmp_path / name).write_text("{}")
    return tmp_path


def test_table_has_means_of_runs_done_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    commands = []

    def run(command: list[str], **_: Any) -> Any:
        overrides = dict(text.split("=", 1) for text in command if "=" in text and not text.startswith("-"))
        commands.append(
            (overrides["run.seed"], overrides["rollout.max_staleness"], overrides.get("correction.kind", ""))
        )
        run_dir = Path(overrides["run.dir"])
        run_dir.mkdir(parents=True)
        reward = 0.5 if overrides["run.seed"] == "1" else 0.9
        rows = [{"step": step, "time": 0.0, "rollout/staleness_mean": float(step)} for step in (1, 2)]
        rows.append({"step": 2, "time": 0.0, "eval/reward_greedy": reward, "eval/reward_sampled": 0.25})
        (run_dir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return SimpleNamespace(returncode=0)

    host = SimpleNamespace(path="socket", close=lambda: None)
    monkeypatch.setattr(compare_corrections, "start_host", lambda config, threads: host)
    monkeypatch.setattr(trials.subprocess, "run", run)
    arguments = [str(folder), "--only", "behavior,tis", "--steps", "2", "--seeds", "2", "--staleness", "3"]
    tables = []
    for _ in range(2):
        assert compare_corrections.main(arguments) == 0
        tables.append(capsys.readouterr().out.splitlines())
    assert commands == [("1", "3", ""), ("2", "3", ""), ("1", "3", "tis"), ("2", "3", "tis")]
    assert tables[0] == tables[1] and [line.split(",")[0] for line in tables[0][1:]] == ["behavior", "tis"]
    assert tables[0][1].split()[3:6] == ["0.7", "0.25", "1.5"]


@pytest.mark.parametrize("name", compare_corrections.CORRECTIONS)
def test_configurations_are_valid(folder: Path, name: str) -> None:
    options = SimpleNamespace(folder=folder, steps=3, overrides=["run.num_update=4"])
    overrides = compare_corrections.settings(options, name, 4, 7)  # type: ignore[arg-type]
    config = compare_corrections.load_config(trials.ROOT / compare_corrections.CONFIG, overrides)
    check_correction(config, load_requirements(config))
    assert config.rollout.asynchronous and (config.rollout.max_staleness, config.run.seed, config.run.num_update) == (
        4,
        7,
        4,
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["/nowhere"], "call launch/quickstart.sh first"), (["--only", "vtrace"], "unknown correction")],
)
def test_rejects_missing_folders_and_unknown_corrections(folder: Path, arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        compare_corrections.main(arguments if arguments[0] == "/nowhere" else [str(folder), *arguments])
