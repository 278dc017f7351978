"""Muon by Megatron's layer-wise optimizer: its updates, and all that plans, keeps or moves its states."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
CASES = ("DP 2", "TP 2, EP 2, distributed", "bf16, buckets")
MORE_CASES = ("TP 2", "PP 2", "MLA, EP 2", "critic, CP 2", "LoRA, TP 2, ETP 2")


def check(numbers: dict[str, Any]) -> None:
    """Check that updates are those of the reference, that all states return, and that no more memory was planned or
    needed, up to the padding of small buffers, and up to buckets that are packed one by one."""
    numbers = dict(numbers)
    for part in ("weights", "gradients", "optimizer"):
        if f"planned {part}" in numbers:
            assert abs(numbers.pop(f"planned {part}")) < 0.15, part
    assert numbers.pop("norm", 0.0) < 1e-6
    for step in ("step 1", "step 2"):  # of the learning rate
        assert numbers.pop(step, 0.0) < 1e-3
    assert numbers.pop("other layout") < 0.5  # in bf16 a rounding of a weight
    assert set(numbers.values()) == {True}, numbers


@pytest.fixture(scope="module")
def results(run_ranks: Callable[..., list[dict[str, Any]]], tmp_path_factory: pytest.TempPathFactory) -> Any:
    return run_ranks(2, "tests/megatron/ranks_muon.py", str(tmp_path_factory.mktemp("checkpoints")), ";".join(CASES))


@pytest.mark.parametrize("case", CASES)
def test_updates_and_states(results: list[dict[str, Any]], case: str) -> None:
    for result in results:
        check(result[case])


def test_rank_without_the_model_takes_no_part(run_ranks: Callable[..., list[dict[str, Any]]]) -> None:
    first, second, other = run_ranks(3, "tests/megatron/ranks_muon.py", "beside")
    assert first == second and first["actor/grad_norm"] > 1 and first["actor/skipped"] == 0.0
    assert other == {}


@pytest.mark.nightly
def test_updates_and_states_in_more_layouts(run_ranks: Callable[..., list[dict[str, Any]]], tmp_path: Path) -> None:
    for result in run_ranks(2, "tests/megatron/ranks_muon.py", str(tmp_path), ";".join(MORE_CASES)):
        assert set(result) == set(MORE_CASES)
        for numbers in result.values():
            check(numbers)


@pytest.mark.parametrize("package", ["megarl.megatron", "megarl"])
def test_megatron_core_imports_on_any_python(package: str) -> None:
    """Also where a program or a fork's module imports it first. On a CPU `megarl.megatron` imports no compiler."""
    code = (
        "import sys, torch\n"
        "compile_ = torch.compile\n"
        f"import {package}\n"
        "from megatron.core.optimizer import HAVE_EMERGING_OPTIMIZERS\n"
        "assert HAVE_EMERGING_OPTIMIZERS and torch.compile is compile_\n"
        f"assert {package != 'megarl.megatron'} or 'torch._dynamo' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
