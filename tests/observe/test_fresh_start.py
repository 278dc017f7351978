"""How a fresh start in a run folder without a checkpoint is described."""

from __future__ import annotations

from pathlib import Path

import pytest

from megarl.observe.run_folder import describe_fresh_start, last_step

pytestmark = pytest.mark.alone


@pytest.mark.parametrize(
    ("metrics", "step"),
    [
        (None, 0),
        (b"", 0),
        (b'{"step": 0, "eval/reward_greedy": 0}\n', 0),
        (b'{"step": 1}\n{"step": 2}\n{"step": 3, "a"', 2),
        (b"\xff\xfe", 0),
    ],
)
def test_fresh_start_names_the_last_step_with_metrics(tmp_path: Path, metrics: bytes | None, step: int) -> None:
    if metrics is not None:
        (tmp_path / "metrics.jsonl").write_bytes(metrics)
    assert last_step(tmp_path) == step
    assert describe_fresh_start(tmp_path).startswith("no checkpoint in the run folder yet: starting afresh")
    assert (f"metrics of {step} steps exist" in describe_fresh_start(tmp_path)) == bool(step)
