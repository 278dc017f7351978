"""One run trains two steps with every recipe, on real engines and Megatron, and a second one replays it."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from every_algorithm import STEPS, recipe_names
from training_run import assert_replays, make_folder, read_metrics, train

pytestmark = pytest.mark.nightly


TOTAL_STEPS = STEPS * len(recipe_names())
OVERRIDES = [
    *(f"run.num_rollout={TOTAL_STEPS}", "run.save_every=0", "algorithm=every_algorithm:EveryAlgorithm"),
    # At the quickstart's rate the policy would be nearly deterministic after 20 steps, and samples equal.
    *("actor_optimizer.lr=2e-5", "kl.apply_to=reward"),
    "train.routing_replay=true",  # without it, a tie of two experts changes the log-probs of a whole rollout
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("quickstart") / "q", "qwen3_moe")


@pytest.fixture(scope="module")
def run_dir(folder: Path, host: str) -> Path:
    train(folder, folder.parent / "run", *OVERRIDES, host=host)
    return folder.parent / "run"


def test_every_recipe_trains_two_steps(run_dir: Path) -> None:
    steps = TOTAL_STEPS
    rows = [row for row in read_metrics(run_dir) if "recipe" in row]
    assert [int(row["recipe"]) for row in rows] == [step // STEPS for step in range(steps)]
    for row in rows:
        name = recipe_names()[int(row["recipe"])]
        nonfinite = [key for key, value in row.items() if isinstance(value, float) and not math.isfinite(value)]
        assert not nonfinite, (name, nonfinite)
        assert row["actor/skipped"] == 0, (name, row)
        assert row["actor/grad_norm"] > 0 or row["rollout/zero_spread_frac"] == 1, (name, row)
        assert ("critic/grad_norm" in row) == (name in ("ppo", "vapo", "pf_ppo")), name
        mismatch = row["rollout/logprob_diff_mean"] if "rollout/logprob_diff_mean" in row else None
        assert mismatch is not None and mismatch < 1e-5, name  # every weight sync reached the engine
    for name, first, second in zip(recipe_names(), rows[::STEPS], rows[1::STEPS], strict=True):
        assert max(first["actor/grad_norm"], second["actor/grad_norm"]) > 0, name
    assert {name: rows[2 * i]["rollout/num_gen_batches"] for i, name in enumerate(recipe_names()) if name == "dapo"}


def test_replay_repeats_every_recipe_bitwise(run_dir: Path, folder: Path) -> None:
    """DAPO samples several times in a step, ReMax also generates greedily, PF-PPO has a buffer; all use a tool."""
    assert_replays(lambda target, replay: train(folder, target, *OVERRIDES, replay), run_dir)
