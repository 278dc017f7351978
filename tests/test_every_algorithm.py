"""One run trains two steps with every recipe, on real engines and Megatron."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from every_algorithm import STEPS, recipe_names
from training_run import make_folder, read_metrics, train

pytestmark = pytest.mark.nightly


def test_every_recipe_trains_two_steps(host: str, tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "q", "qwen3_moe")
    steps = STEPS * len(recipe_names())
    overrides = [f"run.num_rollout={steps}", "run.save_every=0", "algorithm=every_algorithm:EveryAlgorithm"]
    # At the quickstart's rate the policy would be nearly deterministic after 20 steps, and samples equal.
    overrides += ["actor_optimizer.lr=2e-5", "kl.apply_to=reward", "run.export=false"]
    train(folder, tmp_path / "run", *overrides, host=host)
    rows = [row for row in read_metrics(tmp_path / "run") if "recipe" in row]
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
