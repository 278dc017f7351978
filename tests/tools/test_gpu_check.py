"""`gpu_check` without a GPU: rows that have a CPU form, and reasons for the others."""

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
from gpu import collectives, kernels, training  # noqa: E402
from gpu.found import CheckResult, status  # noqa: E402
from gpu.rows import ROWS, parse_rows, reason_against  # noqa: E402

from megarl.config.strict import ConfigError  # noqa: E402

pytestmark = [pytest.mark.alone, pytest.mark.nightly]
ON_CPU = [name for name, row in ROWS.items() if row.cpu and (name != "compile" or which("g++"))]
"""On the CPU, torch.compile needs a C++ compiler."""


def run_check(*arguments: str, hide_gpus: bool = True) -> subprocess.CompletedProcess[str]:
    env = dict(os.environ, PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1") | (
        {"CUDA_VISIBLE_DEVICES": ""} if hide_gpus else {}
    )
    command = [sys.executable, "-W", "ignore", "tools/gpu_check.py", *arguments]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=500)


def test_without_a_gpu_every_row_is_skipped(tmp_path: Path) -> None:
    process = run_check("--json", str(tmp_path / "found.json"), "--report", str(tmp_path / "gpu.md"))
    assert process.returncode == 3, process.stderr
    report = (tmp_path / "gpu.md").read_text().splitlines()
    assert "no GPU, torch 2" in report[0] and len(report) == 4 + len(ROWS)
    assert report[4] == "| `quickstart` | the quickstart, shortened | not here | 0 | no NVIDIA GPU |"
    rows = json.loads((tmp_path / "found.json").read_text())["rows"]
    assert list(rows) == list(ROWS)
    assert {(row["state"], row["text"]) for row in rows.values()} == {("not here", "no NVIDIA GPU")}
    assert process.stdout.count("not here") == len(ROWS)


def test_cpu_rows_pass(tmp_path: Path) -> None:
    process = run_check("--device", "cpu", "--only", ",".join(ON_CPU), "--json", str(tmp_path / "found.json"))
    rows: dict[str, Any] = json.loads((tmp_path / "found.json").read_text())["rows"]
    assert {name: row["state"] for name, row in rows.items()} == dict.fromkeys(ON_CPU, "passed"), process.stdout
    assert process.returncode == 0
    assert rows["exact"]["text"].startswith("12 boxes")


def test_each_row_names_an_existing_function() -> None:
    for row in ROWS.values():
        module, function = row.work.split(":")
        assert callable(getattr(importlib.import_module(f"gpu.{module}"), function))


def test_names_missing_packages() -> None:
    def find(name: str) -> object:
        return None if name == "transformer_engine" else name

    assert reason_against(ROWS["te"], "cuda", True, find) == "not installed: transformer_engine"
    assert reason_against(ROWS["local"], "cuda", True, find) == ""
    assert reason_against(ROWS["speed"], "cpu", False, find) == "has no form without an NVIDIA GPU"


def test_kernels_take_turns_with_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = kernels.make_cases(0.001, "cpu")
    for moved, work in cases.values():
        work()
        assert moved > 0
    calls: list[str] = []

    def time_calls(work: Any, repeats: int, cycles: int) -> float:
        calls.append(work)
        return 1.0 if work == "copy" else 1.25

    monkeypatch.setattr(kernels, "make_cases", lambda gib: {name: (100, name) for name in cases})
    monkeypatch.setattr(kernels, "count_cycles", lambda work, repeats: 0)
    monkeypatch.setattr(kernels, "time_calls", time_calls)
    result = kernels.speed("cuda")
    assert calls == [*cases] * 5
    assert result.state == "failed" and result.text == "contiguous pack: 0.80 of copy, wanted 0.9"


@pytest.mark.gpu
def test_measures_each_kernel() -> None:
    assert all(rate > 0 for rates in kernels.measure_rates(0.25, 20).values() for rate in rates)


def test_hanging_or_crashing_row_fails() -> None:
    assert "not done after 0.01 s" in gpu_check.run_row("ipc", "cpu", 0.01).text
    crashed = gpu_check.read("", "Traceback\nSegmentation fault\n", -11)
    assert (crashed.state, crashed.text) == ("failed", "ended with -11: Segmentation fault")


def test_no_row_starts_after_the_time(tmp_path: Path) -> None:
    """Six seconds, of which the first row takes one at least, are too few for another one."""
    process = run_check(
        *("--device", "cpu", "--only", "local,ipc", "--minutes", "0.1", "--json", str(tmp_path / "found.json"))
    )
    assert process.stderr == ""
    first, second = json.loads((tmp_path / "found.json").read_text())["rows"].values()
    assert process.returncode == (1 if first["state"] == "failed" else 0)
    assert (second["state"], second["text"]) == ("not run", "the 0.1 minutes were over; run it by --only local"), first


def test_timeouts_fit_into_ten_minutes_but_for_a_few_rows_that_hang() -> None:
    assert ROWS["quickstart"].timeout_s + 4 * 60 < 600
    assert next(iter(ROWS)) == "quickstart" and set(gpu_check.FIRST_LOOK) <= ROWS.keys()


def test_two_minutes_sets_other_options() -> None:
    process = run_check("--two-minutes", "--only", "ipc")
    assert process.returncode == 2 and "remove them" in process.stderr


@pytest.mark.parametrize(("nccl", "state"), [((2, 27, 5), "passed"), ((2, 30, 7), "failed")])
def test_only_an_older_nccl_may_refuse_to_share_a_gpu(
    monkeypatch: pytest.MonkeyPatch, nccl: tuple[int, ...], state: str
) -> None:
    refused = "DistBackendError: ncclInvalidUsage: Duplicate GPU detected : rank 0 and rank 1"
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(collectives.torch.cuda.nccl, "version", lambda: nccl)
    monkeypatch.setattr(collectives, "_world", lambda world, device: [refused] * world)
    assert collectives.shared("cuda").state == state
    monkeypatch.setattr(collectives, "_world", lambda world, device: [[]] * world)
    assert collectives.shared("cuda").state == "passed"
    assert os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] == "1"


def test_exit_status_distinguishes_failures_from_skips() -> None:
    passed, failed, missing = CheckResult("passed", ""), CheckResult("failed", ""), CheckResult("not here", "")
    assert status({"a": passed, "b": missing}) == 0
    assert status({"a": passed, "b": failed}) == 1
    assert status({"a": missing}) == 3


def test_loss_curve_must_match_and_fall() -> None:
    reference = [6.0, 4.0, 2.0]
    assert training.compare_curves([6.0, 4.01, 2.02], reference).state == "passed"
    assert "differs by" in training.compare_curves([6.0, 4.5, 2.0], reference).text
    assert "does not fall" in training.compare_curves([6.0, 6.0, 6.0], [6.0, 6.0, 6.0]).text
    assert training.compare_curves([6.0, float("nan"), 2.0], reference).state == "failed"


def test_rejects_unknown_rows() -> None:
    with pytest.raises(ConfigError, match="no row 'nccl'.*there are quickstart, exact"):
        parse_rows("nccl")
    assert parse_rows("local,ipc") == ["ipc", "local"]
