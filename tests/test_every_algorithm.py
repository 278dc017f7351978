"""Two steps of every recipe through the real engine, Megatron and reshard, one after the other in one run."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from every_algorithm import STEPS, names
from whole_run import make_folder, metrics_of, train

pytestmark = pytest.mark.nightly


def test_two_steps_of_every_recipe(host: str, tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "q", "qwen3_moe")
    steps = STEPS * len(names())
    overrides = [f"run.num_rollout={steps}", "run.save_every=0", "algorithm=every_algorithm:EveryAlgorithm"]
    train(folder, tmp_path / "run", *overrides, "kl.apply_to=reward", "run.export=false", host=host)
    rows = [row for row in metrics_of(tmp_path / "run") if "recipe" in row]
    assert [int(row["recipe"]) for row in rows] == [step // STEPS for step in range(steps)]
    for row in rows:
        name = names()[int(row["recipe"])]
        odd = [key for key, value in row.items() if isinstance(value, float) and not math.isfinite(value)]
        assert not odd, (name, odd)
        assert row["actor/skipped"] == 0 and row["actor/grad_norm"] > 0, (name, row)
        assert ("critic/grad_norm" in row) == (name in ("ppo", "vapo", "pf_ppo")), name
        looked = row["rollout/logprob_diff_mean"] if "rollout/logprob_diff_mean" in row else None
        assert looked is not None and looked < 1e-5, name  # of the engine's log-probs: each push has arrived
    assert {name: rows[2 * i]["rollout/num_gen_batches"] for i, name in enumerate(names()) if name == "dapo"}
