"""`bench.py asynchronous`: ratios of step times, and settings."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import bench
import pytest
from benchmarks import asynchronous

from megarl.config import load_config

pytestmark = pytest.mark.nightly


def test_ratio_compares_steps_of_the_same_round(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text("")
    seconds = iter([4.0, 2.0, 1.0, 8.0, 4.0, 4.0])

    class Host:
        path = "socket"

        def close(self) -> None:
            return None

    def run_timed(options: Any, kind: str, host: str) -> dict[str, float]:
        assert host == "socket"
        return {"step": next(seconds), "generate": 1.0, "train": 1.0, "staleness_mean": 0.5}

    monkeypatch.setattr(asynchronous, "start_host", lambda config, threads: Host())
    monkeypatch.setattr(asynchronous, "run_timed", run_timed)
    assert bench.main(["asynchronous", str(tmp_path), "--rounds", "2", "--json", str(tmp_path / "result")]) == 0
    rows = json.loads((tmp_path / "result").read_text())["rows"]
    assert [row["times as fast"]["median"] for row in rows] == [1, 2, 3]
    assert [row["step"] for row in rows] == [6, 3, 2.5]


def test_settings_differ_only_in_the_compared_key(tmp_path: Path) -> None:
    options = argparse.Namespace(folder=tmp_path, steps=3, epochs=2, overrides=["run.seed=3"])
    overrides = asynchronous.make_overrides(options)
    configs = [
        load_config(asynchronous.ROOT / "configs/quickstart.yaml", [*overrides, *kind])
        for kind in asynchronous.KINDS.values()
    ]
    assert [config.rollout.asynchronous for config in configs] == [False, True, True]
    assert {config.run.seed for config in configs} == {3} and {config.run.num_rollout for config in configs} == {5}
