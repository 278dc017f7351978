"""Rollback of a step whose policy moves too far from the sampling policy, with real updates on two ranks."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
MAKE_MODEL = (
    "import sys; sys.path.insert(0, 'tests/megatron'); import tiny; tiny.hf_model('qwen2').save_pretrained(sys.argv[1])"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model folder written by transformers, in a process of its own because Megatron must not share one."""
    folder = tmp_path_factory.mktemp("back") / "model"
    subprocess.run([sys.executable, "-c", MAKE_MODEL, str(folder)], cwd=ROOT, check=True, capture_output=True)
    return folder


@pytest.fixture(scope="module", params=["shared float32", "shared bfloat16", "split float32"])
def ranks(
    request: pytest.FixtureRequest, run_ranks: Callable[..., list[dict[str, Any]]], folder: Path
) -> list[dict[str, Any]]:
    """Return the ranks' results with two replicas of the policy, or a policy on the second rank alone."""
    return run_ranks(2, "tests/workers/ranks_kl_rollback.py", *request.param.split(), str(folder))


def test_step_within_the_limit_is_kept(ranks: list[dict[str, Any]]) -> None:
    for result in ranks:
        assert [rate for _, rate, _ in result["within limit"]] == pytest.approx([2e-5, 4e-5, 6e-5, 8e-5])
        assert all(kl <= 0.05 and not rolled_back for kl, _, rolled_back in result["within limit"])


def test_exceeding_step_restores_the_policy(ranks: list[dict[str, Any]]) -> None:
    """Weights, master weights, moments and counts are restored bitwise. The second of four updates exceeds the limit;
    the other two are skipped."""
    for result in ranks:
        first, second, third, fourth = result["exceeded"]
        assert "guards/ppo_kl" not in first and second["guards/ppo_kl"] == second["actor/ppo_kl"] > 0.05
        assert third == fourth == {}
        assert result["restored state"]
    assert ranks[0]["exceeded"] == ranks[1]["exceeded"]


def test_learning_rate_restarts_and_training_continues(ranks: list[dict[str, Any]]) -> None:
    for result in ranks:
        assert [rate for _, rate, _ in result["next step"]] == pytest.approx([2e-5, 4e-5])
        assert not any(rolled_back for _, _, rolled_back in result["next step"]) and result["trains on"]


def test_checkpoint_resumes_rate_and_step_counts(ranks: list[dict[str, Any]]) -> None:
    for result in ranks:
        assert result["checkpoint restored"] and result["resumes equally"] == [True, True]


def test_rolls_back_once_per_step(ranks: list[dict[str, Any]]) -> None:
    for result in ranks:
        assert result["rollbacks"] == [1, 1] and result["restored state twice"]
        assert result["NaN rolled back"] and result["restored state after NaN"]


def test_rollback_of_lazily_created_moments(ranks: list[dict[str, Any]]) -> None:
    """Here torch creates moments with the optimizer; the optimizers on GPUs create them in the first step."""
    for result in ranks:
        assert result["fresh optimizer"] == [True] * 4


def test_snapshot_size(ranks: list[dict[str, Any]]) -> None:
    """The snapshot holds weights and this rank's optimizer states, plus Megatron's padding."""
    copies = [result["bytes"] for result in ranks if result["bytes"]]
    assert copies
    for measured, expected_bytes in copies:
        assert expected_bytes <= measured < 1.01 * expected_bytes


def test_out_of_memory_is_known_on_all_ranks(ranks: list[dict[str, Any]]) -> None:
    """Ranks without the model know it, too."""
    for result in ranks:
        before, updates, after = result["memory"]
        assert before == {
            "guards/actor_token_budget": 48,
            "guards/actor_recomputes": 0,
            "guards/actor_out_of_memory": 0,
        }
        assert updates == 2
        assert after["guards/actor_token_budget"] < 48 and after["guards/actor_out_of_memory"] >= 1
    assert ranks[0]["memory"] == ranks[1]["memory"]


def test_each_policy_reports_its_own_rollback(units: dict[str, Any]) -> None:
    kl = {"actor/ppo_kl": 0.5}
    assert units["rollback_metrics"] == [kl | {"guards/ppo_kl": 0.5}, kl | {"guards/actor_b_ppo_kl": 0.5}]
