"""`bench.py scale`: fitted constants of the host-time model, and planned work per rank."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks import scale
from benchmarks.scale import Constants, Step, Work

ROOT = Path(__file__).resolve().parents[3]

pytestmark = pytest.mark.alone

CONSTANTS = {
    "columns": [2e-9, 0.001],
    "micro-batches": [5e-8, 1e-9, 0.002],
    "numbers back": [1e-9, 0.0, 0.01],
    "rows to models": [1e-9, 1e-10, 0.003],
}


def test_fit_recovers_the_constants() -> None:
    constants = Constants(CONSTANTS, (0.0, 0.0), 0, 0.0)
    works = [
        Work(owner_bytes, record, computed, record / 2)
        for owner_bytes in (0.0, 1e6, 2e6)
        for record in (32.0, 128.0)
        for computed in (3e6, 5e6)
    ]
    result = scale.fit_constants([Step(work, constants.seconds(work), 0.0) for work in works])
    for part, expected in CONSTANTS.items():
        assert result[part] == pytest.approx(expected, rel=1e-6, abs=1e-12)


def test_fit_drops_negative_terms() -> None:
    steps = [
        Step(Work(owner_bytes, 0.0, 0.0, 0.0), {"columns": max(0.0, owner_bytes - 1.0)}, 0.0)
        for owner_bytes in (1.0, 2.0, 3.0)
    ]
    ((slope, offset),) = scale.fit_constants(steps).values()
    assert slope > 0 and offset == 0.0


PLAN_SCRIPT = """
import json, sys
sys.path.append("tools")
from benchmarks import scale
from megarl.config import load_config
config = load_config("configs/deepseek_v3_671b.yaml", ["train.routing_replay=true"])
paper, homes, routing, layers = scale.job(config, 32, 512)
sent = {rank: vars(paper.step(rank, 0)) for rank in (32, 33)}
print(json.dumps([homes.tolist(), layers, routing.topk, sent]))
"""


def test_plans_a_job_of_512_ranks() -> None:
    """671B on 512 ranks: 58 MoE layers over 16 stages, 32 engines, each homed on its first rank."""
    process = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PLAN_SCRIPT],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
        check=True,
    )
    owners, layers, topk, sent = json.loads(process.stdout.splitlines()[-1])
    assert owners == list(range(0, 512, 16))
    assert sum(layers, []) == list(range(58)) and layers[0] == [] and len(layers[1]) == 4 and topk == 8
    assert sent["33"]["machine"] == sent["33"]["network"] == 0  # no home sequences, and its stage returns no logprobs
    # Routing of the other machines' layers, for policy log-probs and one pass of updates.
    assert sent["32"]["network"] > 2 * 511 * 8 * (58 - 4) * 0.9
