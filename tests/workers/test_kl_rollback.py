"""A policy that goes too far from the one that was sampled from, in real updates on two ranks."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
MAKE = (
    "import sys; sys.path.insert(0, 'tests/megatron'); import tiny; tiny.hf_model('qwen2').save_pretrained(sys.argv[1])"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model as transformers writes it, which must not be imported beside Megatron."""
    created = tmp_path_factory.mktemp("back") / "model"
    subprocess.run([sys.executable, "-c", MAKE, str(created)], cwd=ROOT, check=True, capture_output=True)
    return created


@pytest.fixture(scope="module", params=["shared float32", "shared bfloat16", "apart float32"])
def ranks(
    request: pytest.FixtureRequest, run_ranks: Callable[..., list[dict[str, Any]]], folder: Path
) -> list[dict[str, Any]]:
    """Of two replicas of the policy, and of a policy on the second rank alone."""
    return run_ranks(2, "tests/workers/ranks_kl_rollback.py", *request.param.split(), str(folder))


def test_a_step_that_goes_well_is_left_alone(ranks: list[dict[str, Any]]) -> None:
    for result in ranks:
        assert [rate for _, rate, _ in result["fine"]] == pytest.approx([2e-5, 4e-5, 6e-5, 8e-5])
        assert all(kl <= 0.05 and not back for kl, _, back in result["fine"])


def test_the_policy_is_what_it_was_before_the_step(ranks: list[dict[str, Any]]) -> None:
    """Bit by bit: weights, masters, moments, counts. The second of four updates says it; two are left out."""
    for result in ranks:
        first, second, third, fourth = result["wild"]
        assert "guards/ppo_kl" not in first and second["guards/ppo_kl"] == second["actor/ppo_kl"] > 0.05
        assert third == fourth == {}
        assert result["as before"]
    assert ranks[0]["wild"] == ranks[1]["wild"]


def test_the_learning_rate_begins_anew_and_training_goes_on(ranks: list[dict[str, Any]]) -> None:
    for result in ranks:
        assert [rate for _, rate, _ in result["after"]] == pytest.approx([2e-5, 4e-5])
        assert not any(back for _, _, back in result["after"]) and result["moved"]


def test_a_checkpoint_goes_on_with_the_rate_and_the_counts(ranks: list[dict[str, Any]]) -> None:
    for result in ranks:
        assert result["restored"] and result["goes on alike"] == [True, True]


def test_it_goes_back_each_time_once_a_step(ranks: list[dict[str, Any]]) -> None:
    for result in ranks:
        assert result["again"] == [1, 1] and result["as before twice"]
        assert result["not a number"] and result["as before thrice"]


def test_moments_that_are_made_in_the_first_step_are_as_before_it(ranks: list[dict[str, Any]]) -> None:
    """torch's are made here, with the optimizer; those that a GPU has are not."""
    for result in ranks:
        assert result["from nothing"] == [True] * 4


def test_what_the_copy_takes(ranks: list[dict[str, Any]]) -> None:
    """Weights and this rank's states, but for the padding of Megatron's buffers."""
    copies = [result["bytes"] for result in ranks if result["bytes"]]
    assert copies
    for retained, planned in copies:
        assert planned <= retained < 1.01 * planned


def test_memory_that_runs_out_is_known_on_all_ranks(ranks: list[dict[str, Any]]) -> None:
    """Also where the model is not: rows go where they went, whatever the model makes of them."""
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
