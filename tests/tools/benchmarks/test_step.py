"""`bench.py step`: modelled packing, text lengths and unaccounted time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from benchmarks import step

pytestmark = pytest.mark.alone


def test_modelled_packing_matches_hand_computed_values() -> None:
    """Two ranks with at most 10 tokens: [9] | [7], then [5] | [2 4], as in the planner's test.

    In arrival order, two sequences padded take 18 tokens, so micro-batches have one: 5, 2, 4 on rank 0; 9, 7 on rank 1.
    """
    lengths = [5, 9, 2, 7, 4]
    packed = step.plan_costs(lengths, 2, 10, 0.0, "packed, balanced")
    assert packed == pytest.approx({"micro-batches": 2, "real tokens": 1, "busiest": 14 / 13.5, "waiting": 15 / 13.5})
    padded = step.plan_costs(lengths, 2, 10, 0.0, "padded, balanced")  # [2 4] is computed as [4 4]
    assert padded["real tokens"] == pytest.approx(27 / 29)
    in_order = step.plan_costs(lengths, 2, 10, 0.0, "packed, as they come")
    assert in_order == pytest.approx({"micro-batches": 3, "real tokens": 1, "busiest": 16 / 13.5, "waiting": 20 / 13.5})
    squares = step.plan_costs([2, 4], 2, 10, 1.0, "packed, balanced")  # 2 + 4 and 4 + 16
    assert squares["busiest"] == pytest.approx(20 / 13)


def test_text_length_counts_words_digits_and_symbols(tmp_path: Path) -> None:
    file = tmp_path / "texts.jsonl"
    file.write_text(json.dumps({"answer": "48/2 = 24 clips."}) + "\n" + json.dumps({"answer": "no"}) + "\n")
    assert step.text_lengths(file, "answer", 10) == [4 + 1 + 2 + 1 + 1, 1]


def test_share_of_a_step_outside_of_phases(tmp_path: Path) -> None:
    row = {"time/step": 10.0, "time/generate": 4.0, "time/actor_update": 5.0, "time/reward": 0.5, "actor/tokens": 9.0}
    rows = [{"step": 0, "eval/reward_greedy": 1.0}, {"step": 1, **row}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert step.outside_of_phases(tmp_path) == pytest.approx(0.1)
