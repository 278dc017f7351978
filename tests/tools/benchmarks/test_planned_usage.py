"""`flow.planned`: planned memory and traffic of a step against measured ranks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from flow import planned
from flow.answers import Shape, answers

ROOT = Path(__file__).resolve().parents[3]

pytestmark = pytest.mark.nightly

SHAPE = Shape(64, 4, "2048-4096", 1, 4, 8)


@pytest.mark.parametrize("layout", ["--ranks 2 --pp 2", "--ranks 4 --tp 2", "--ranks 4 --pp 2 --engine-tp 2"])
def test_plan_matches_measured_ranks(layout: str, tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-W",
        "ignore",
        "tools/bench.py",
        "flow",
        "--planned",
        "--json",
        str(tmp_path / "result"),
    ]
    command += "--sequences 64 --samples 4 --lengths 2048-4096 --routing 4 8 --token-budget 8192".split()
    command += ["--repeats", "1", "--updates", "2", *layout.split()]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert process.returncode == 0, process.stderr
    rows = json.loads((tmp_path / "result").read_text())["rows"]
    result = {row["what"]: (row["planned, M"], row["measured, M"]) for row in rows if "what" in row}
    for short in ("recording", "cutting"):
        result.pop(short, None)  # may end before it was sampled
    assert {"rollouts", "forward", "advantages", "update"} <= result.keys()
    for exact in ("sent", "computed"):
        planned_bytes, counted = result.pop(exact)
        assert planned_bytes == counted, exact
    ratios = {
        name: round(planned_bytes / measured_bytes, 3) for name, (planned_bytes, measured_bytes) in result.items()
    }
    # Records in transit occupy memory that no process has read, so none counts it.
    assert 0.9 < ratios.pop("forward") < 1.25, ratios
    # Peaks of ranks do not coincide: one may compute advantages while another's message is still in two buffers.
    assert 0.85 < ratios.pop("advantages") < 1.1, ratios
    assert all(0.9 < ratio < 1.1 for ratio in ratios.values()), ratios


def test_home_ranks_and_lengths_match_the_generated_rollouts() -> None:
    assert planned.home_ranks(SHAPE, 4, 2).tolist() == [0] * 32 + [2] * 32
    sizes = planned.all_lengths(SHAPE)
    assert [len(remote.prompt) + len(remote.turns[0][0]) for remote in answers(SHAPE, 3)] == sizes[12:16].tolist()


PLAN_SCRIPT = """
import json, sys
sys.path.append("tools")
from flow import planned
order = json.loads(sys.argv[1])
job = planned.plan_job(order)
print(json.dumps([vars(job.step(rank, 0)) for rank in range(order["ranks"])]))
"""


def plan(**changes: Any) -> list[dict[str, Any]]:
    defaults = {"controller": "ppo", "updates": 1, "tp": 2, "pp": 1, "engine_tp": 1, "ranks": 4, "token_budget": 64}
    settings = defaults | {"per_machine": 4, "shape": vars(Shape(16, 4, "64"))} | changes
    command = [sys.executable, "-W", "ignore", "-c", PLAN_SCRIPT, json.dumps(settings)]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=True)
    result: list[dict[str, Any]] = json.loads(process.stdout.splitlines()[-1])
    return result


def test_rows_cross_machines_once() -> None:
    """One replica over two machines of two ranks.

    Rows homed on both machines stay. If all rows are homed on one, half go to the other: tokens in three passes, the
    returned values, and in two updates the 17 bytes per token that the loss reads (tokens, mask, weights, two columns).
    """
    both_changes, remote, together = plan(per_machine=2), plan(per_machine=2, engine_tp=4), plan(engine_tp=4)
    assert sum(rank["network"] for rank in (*both_changes, *together)) == 0
    assert sum(rank["network"] for rank in remote) == 512 * (3 * 4 + 3 * 4 + 2 * 17)
    assert [rank["computed"] for rank in both_changes + remote] == [5 * 512] * 8
