"""`bench.py flow`: generated rollouts, aggregation over ranks, and a small run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks import flow
from flow.answers import SIZES, Shape, answers, lengths, total_tokens

ROOT = Path(__file__).resolve().parents[3]

pytestmark = pytest.mark.nightly


def test_rollouts_have_the_requested_lengths() -> None:
    shape = Shape(6, samples=3, lengths="40-90", turns=3, layers=2, topk=4)
    for group in range(2):
        sizes = lengths(shape, group).tolist()
        rollouts = list(answers(shape, group))
        assert [len(rollout.prompt) + sum(len(ids) for ids, _ in rollout.turns) for rollout in rollouts] == sizes
        assert all(40 <= size <= 90 for size in sizes)
        for rollout, size in zip(rollouts, sizes, strict=True):
            assert rollout.prompt is rollouts[0].prompt
            assert [len(logprobs) == len(ids) for ids, logprobs in rollout.turns] == [True, False, True, False, True]
            assert (
                rollout.routing is not None
                and rollout.routing.shape == (size - 1, 2, 4)
                and rollout.routing.dtype == "uint8"
            )
    assert total_tokens(shape) == sum(int(lengths(shape, group).sum()) for group in range(2))


def test_metrics_are_medians_on_the_slowest_rank() -> None:
    def step(phase_seconds: float, plan_seconds: float, sent: int) -> dict[str, object]:
        parts = {"give": phase_seconds, "plan": plan_seconds, "model": 99.0}
        return dict(
            parts=parts, busy=phase_seconds, sent=sent, log_bytes=0, tokens=100, sequences=4, metrics={"x": 1.0}
        )

    baseline = [step(1.0, 0.1, 10), step(3.0, 0.1, 10), step(2.0, 0.4, 40)]
    changed = [step(4.0, 0.3, 20)] * 3
    by_rank = [dict.fromkeys(SIZES, baseline), dict.fromkeys(SIZES, changed)]
    result = flow.combine([{"by_rank": by_rank, "memory": {"step": 3}}, {"by_rank": by_rank, "memory": {"step": 5}}])
    assert result["memory"] == {"step": 5}
    assert result["full"]["parts"] == {"give": 4.0, "plan": 0.3}
    assert result["full"]["seconds"] == pytest.approx(4.3)
    assert (result["full"]["busy"], result["full"]["sent"], result["full"]["sent_by_all"]) == (4.0, 20, 30)
    assert flow.growth({"quarter": result["half"] | {"tokens": 25}, "full": result["full"]}) == 0.25


def test_compares_metrics_up_to_rounding() -> None:
    new_row = {"a": 1.0, "b": 100.0, "c": 0.0, "time/step": 1.0, "new": 3.0}
    assert flow.differing_metrics(new_row, {"a": 1.00005, "b": 100.02, "c": 0.0, "time/step": 9.0}) == ["b"]


def test_small_run_reports_consistent_totals(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", "tools/bench.py", "flow", "--ranks", "2", "--sequences", "16"]
    command += ["--samples", "4", "--lengths", "40-90", "--turns", "2", "--routing", "4", "2", "--pp", "2"]
    command += ["--engine-tp", "2", "--repeats", "1", "--updates", "2", "--json", str(tmp_path / "result.json")]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=400)
    assert process.returncode == 0, process.stderr
    tokens = total_tokens(Shape(16, 4, "40-90"))
    assert f"16 sequences, {tokens:,} tokens" in process.stdout
    (row,) = json.loads((tmp_path / "result.json").read_text())["rows"]
    result = row["sizes"]
    assert row["run"] == "now, 2 ranks" and row["host seconds of a step, slowest rank"] == result["full"]["seconds"]
    assert result["full"]["tokens"] == tokens
    assert result["half"]["tokens"] == sum(int(lengths(Shape(8, 4, "40-90"), group).sum()) for group in range(2))
    for size in ("half", "full"):
        assert result[size]["seconds"] == pytest.approx(sum(result[size]["parts"].values()))
        assert {"figures", "rewards", "columns", "rows to models", "numbers back", "log"} <= result[size][
            "parts"
        ].keys()
        # Routing records: the second stage has 2 of 4 layers, 2 experts of one byte each, sent for log-probs and for
        # every update, for all tokens but the last of each sequence.
        sequences = 16 if size == "full" else 8
        assert result[size]["sent"] > 2 * 2 * 2 * (result[size]["tokens"] - sequences)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--lengths", "many"], "--lengths: lengths are 2048-8192, 32768 or lognormal"),
        (["--ranks", "2", "--sequences", "40"], "--sequences 40 are not four times as many groups of 8 for each of "),
        (["--ranks", "1", "--sequences", "32", "--lengths", "9", "--against", "no-such"], "--against"),
    ],
)
def test_invalid_options_print_one_line(options: list[str], message: str) -> None:
    command = [sys.executable, "-W", "ignore", "tools/bench.py", "flow", *options]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=400)
    assert (
        process.returncode == 2
        and process.stderr.startswith(f"error: {message}")
        and len(process.stderr.splitlines()) == 1
    )
