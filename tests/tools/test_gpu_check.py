"""What is tried on a GPU is tried here without one, as far as it has such a form; and what cannot be says so."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from shutil import which
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tools"))

import gpu_check  # noqa: E402
from gpu import training  # noqa: E402
from gpu.found import Found, status  # noqa: E402
from gpu.rows import ROWS, chosen, reason_against  # noqa: E402

from megarl.config.strict import ConfigError  # noqa: E402

pytestmark = [pytest.mark.alone, pytest.mark.nightly]
ON_CPU = [name for name, row in ROWS.items() if row.cpu and (name != "compile" or which("g++"))]
"""torch.compile makes C++ of a model there."""


def check(*arguments: str, hidden: bool = True) -> subprocess.CompletedProcess[str]:
    env = dict(os.environ, PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1") | ({"CUDA_VISIBLE_DEVICES": ""} if hidden else {})
    command = [sys.executable, "-W", "ignore", "tools/gpu_check.py", *arguments]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=500)


def test_without_a_gpu_every_row_says_so(tmp_path: Path) -> None:
    done = check("--json", str(tmp_path / "found.json"))
    assert done.returncode == 3, done.stderr
    rows = json.loads((tmp_path / "found.json").read_text())["rows"]
    assert list(rows) == list(ROWS)
    assert {(row["state"], row["text"]) for row in rows.values()} == {("not here", "no NVIDIA GPU")}
    assert done.stdout.count("not here") == len(ROWS)


def test_rows_with_a_form_for_the_cpu_pass_there(tmp_path: Path) -> None:
    done = check("--device", "cpu", "--only", ",".join(ON_CPU), "--json", str(tmp_path / "found.json"))
    rows: dict[str, Any] = json.loads((tmp_path / "found.json").read_text())["rows"]
    assert {name: row["state"] for name, row in rows.items()} == dict.fromkeys(ON_CPU, "passed"), done.stdout
    assert done.returncode == 0
    assert rows["exact"]["text"].startswith("12 boxes")


def test_each_row_names_a_function_that_is_there() -> None:
    for row in ROWS.values():
        module, function = row.work.split(":")
        assert callable(getattr(importlib.import_module(f"gpu.{module}"), function))


def test_what_is_not_installed_is_named() -> None:
    def find(name: str) -> object:
        return None if name == "transformer_engine" else name

    assert reason_against(ROWS["te"], "cuda", True, find) == "not installed: transformer_engine"
    assert reason_against(ROWS["local"], "cuda", True, find) == ""
    assert reason_against(ROWS["speed"], "cpu", False, find) == "has no form without an NVIDIA GPU"


def test_a_row_that_hangs_or_crashes_is_a_failed_row() -> None:
    assert "not done after 0.01 s" in gpu_check.tried("ipc", "cpu", 0.01).text
    crashed = gpu_check.read("", "Traceback\nSegmentation fault\n", -11)
    assert (crashed.state, crashed.text) == ("failed", "ended with -11: Segmentation fault")


def test_the_exit_status_tells_failed_from_nothing_tried() -> None:
    passed, failed, absent = Found("passed", ""), Found("failed", ""), Found("not here", "")
    assert status({"a": passed, "b": absent}) == 0
    assert status({"a": passed, "b": failed}) == 1
    assert status({"a": absent}) == 3


def test_a_curve_that_leaves_the_truth_or_does_not_fall_fails() -> None:
    truth = [6.0, 4.0, 2.0]
    assert training.beside([6.0, 4.01, 2.02], truth).state == "passed"
    assert "differs by" in training.beside([6.0, 4.5, 2.0], truth).text
    assert "does not fall" in training.beside([6.0, 6.0, 6.0], [6.0, 6.0, 6.0]).text
    assert training.beside([6.0, float("nan"), 2.0], truth).state == "failed"


def test_a_row_that_is_not_there_is_named() -> None:
    with pytest.raises(ConfigError, match="no row 'nccl'.*there are exact, speed"):
        chosen("nccl")
    assert chosen("local,ipc") == ["ipc", "local"]
