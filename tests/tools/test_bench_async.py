"""`bench_async`: ratios of step times, settings and folder checks."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

import bench_async  # noqa: E402

from megarl.config import ConfigError  # noqa: E402

pytestmark = pytest.mark.nightly


def test_ratio_compares_steps_of_the_same_round(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "train.jsonl").write_text("")
    seconds = iter([4.0, 2.0, 1.0, 8.0, 4.0, 4.0])

    class Host:
        path = "socket"

        def close(self) -> None:
            return None

    def run_timed(options: Any, kind: str, host: str) -> dict[str, float]:
        assert host == "socket"
        return {"step": next(seconds), "generate": 1.0, "train": 1.0, "staleness_mean": 0.5}

    monkeypatch.setattr(bench_async, "start_host", lambda config, threads: Host())
    monkeypatch.setattr(bench_async, "run_timed", run_timed)
    assert bench_async.main([str(tmp_path), "--rounds", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["step", "generate", "train", "staleness_mean", "times", "as", "fast"]
    assert [line.split()[-1] for line in lines[1:]] == ["1", "2", "3"]


def test_rejects_a_folder_without_quickstart() -> None:
    with pytest.raises(ConfigError, match="is not what tools/make_quickstart.py makes"):
        bench_async.main(["/nowhere"])


def test_settings_differ_only_in_the_compared_key(tmp_path: Path) -> None:
    options = bench_async.argparse.Namespace(folder=tmp_path, steps=3, epochs=2, overrides=["run.seed=3"])
    overrides = bench_async.settings(options)
    configs = [
        bench_async.load_config(bench_async.ROOT / "configs/quickstart.yaml", [*overrides, *kind])
        for kind in bench_async.KINDS.values()
    ]
    assert [config.rollout.asynchronous for config in configs] == [False, True, True]
    assert {config.run.seed for config in configs} == {3} and {config.run.num_rollout for config in configs} == {5}
