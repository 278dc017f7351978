"""Bytes of a step: what is planned of them is what the ranks of a real step hold and send."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tools"))

from flow import planned  # noqa: E402
from flow.answers import Shape, answers  # noqa: E402

pytestmark = pytest.mark.nightly

SHAPE = Shape(64, 4, "2048-4096", 1, 4, 8)


@pytest.mark.parametrize("layout", ["--ranks 2 --pp 2", "--ranks 4 --tp 2", "--ranks 4 --pp 2 --engine-tp 2"])
def test_planned_is_measured(layout: str, tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", "tools/bench_flow.py", "--planned", "--json", str(tmp_path / "found")]
    command += "--sequences 64 --samples 4 --lengths 2048-4096 --routing 4 8 --token-budget 8192".split()
    command += ["--repeats", "1", "--updates", "2", *layout.split()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    (result,) = (of["beside"] for of in json.loads((tmp_path / "found").read_text())["now"].values())
    for short in ("recording", "cutting"):
        result.pop(short, None)  # may be over before it was looked at
    assert {"rollouts", "forward", "advantages", "update"} <= result.keys()
    for exact in ("sent", "computed"):
        said, counted = result.pop(exact)
        assert said == counted, exact
    off = {name: round(said / retained, 3) for name, (said, retained) in result.items()}
    # While records are sent there is memory that nobody has read from yet: no process counts it as its own.
    assert 0.9 < off.pop("forward") < 1.25, off
    # Of each rank what it holds at most, which is not at one time: one may be at the advantages while what another has
    # sent is still in both their hands.
    assert 0.85 < off.pop("advantages") < 1.1, off
    assert all(0.9 < share < 1.1 for share in off.values()), off


def test_sequences_are_at_home_where_the_ranks_have_them() -> None:
    assert planned.homes_of(SHAPE, 4, 2).tolist() == [0] * 32 + [2] * 32
    sizes = planned.lengths_of(SHAPE)
    assert [len(item.prompt) + len(item.turns[0][0]) for item in answers(SHAPE, 3)] == sizes[12:16].tolist()


ON_PAPER = """
import json, sys
sys.path.append("tools")
from flow import planned
order = json.loads(sys.argv[1])
paper = planned.paper_of(order)
print(json.dumps([vars(paper.step(rank, 0)) for rank in range(order["ranks"])]))
"""


def on_paper(**changes: Any) -> list[dict[str, Any]]:
    local = {"controller": "ppo", "updates": 1, "tp": 2, "pp": 1, "engine_tp": 1, "ranks": 4, "token_budget": 64}
    order = local | {"per_machine": 4, "shape": vars(Shape(16, 4, "64"))} | changes
    command = [sys.executable, "-W", "ignore", "-c", ON_PAPER, json.dumps(order)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=True)
    result: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return result


def test_rows_go_to_another_machine_once() -> None:
    """Two machines of two ranks, which are a replica. What is at home on both stays there; of what is all at home on
    one, half goes to the other: tokens in three passes, the numbers that come back, and in two updates what a loss
    reads, 17 bytes each: tokens, mask, weights and two columns."""
    both, item, together = on_paper(per_machine=2), on_paper(per_machine=2, engine_tp=4), on_paper(engine_tp=4)
    assert sum(rank["network"] for rank in (*both, *together)) == 0
    assert sum(rank["network"] for rank in item) == 512 * (3 * 4 + 3 * 4 + 2 * 17)
    assert [rank["computed"] for rank in both + item] == [5 * 512] * 8
