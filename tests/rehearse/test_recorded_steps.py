"""A rehearsed step communicates exactly like a real one, operation by operation, on every rank.

Real ranks build Megatron's local layers on gloo, rehearsed ones those of Transformer Engine. Left out is what differs
between the two: context parallelism, where the CPU's attention gathers all keys and values instead of passing them
round a ring; experts with `etp`, whose gathers of unequal sizes are an all-to-all on the CPU; and sparse attention,
whose indexer's projections are column parallel on the CPU and replicated on a GPU. Host groups are left out, since a
rehearsal exchanges values of the host by a barrier.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from rank_jobs import ROOT, RankJobs

sys.path.insert(0, str(Path(__file__).parent))

import recorded_steps  # noqa: E402

from megarl.rehearse import nccl_order  # noqa: E402

Events = list[dict[str, Any]]
CASES = [(world, name) for world, steps in recorded_steps.STEPS.items() for name in steps]


@pytest.fixture(scope="module")
def records(
    run_ranks: RankJobs, tmp_path_factory: pytest.TempPathFactory
) -> dict[tuple[int, str], list[tuple[Events, Events]]]:
    """Return the real and the rehearsed record of each rank, by number of ranks and name of the step."""
    folder = tmp_path_factory.mktemp("rehearsed")
    worlds = list(recorded_steps.STEPS)
    rehearsal = subprocess.Popen(
        [sys.executable, "-W", "ignore", str(ROOT / "tests/rehearse/rehearsed_steps.py"), str(folder)]
        + [str(world) for world in worlds],
        env=dict(os.environ, PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1"),
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        real = {world: run_steps(run_ranks, world) for world in worlds}
        _, errors = rehearsal.communicate(timeout=300)
    finally:
        rehearsal.kill()
    assert rehearsal.returncode == 0, errors[-3000:]
    result = {}
    for world, name in CASES:
        rehearsed = [json.loads(Path(folder, f"{world}_{rank}.json").read_text())[name] for rank in range(world)]
        result[world, name] = list(zip([item[name] for item in real[world]], rehearsed, strict=True))
    return result


def run_steps(run_ranks: RankJobs, world: int) -> list[dict[str, Events]]:
    """Return each rank's records by step."""
    texts, _ = run_ranks.run(world, "tests/rehearse/ranks_recorded_steps.py", str(world), record=False)
    return [json.loads(text.rpartition("RESULT ")[2]) for text in texts]


def summarize(event: dict[str, Any]) -> tuple[Any, ...]:
    """Return what must be equal."""
    if event["do"] == "wait":
        return "wait", event["op"]
    is_batched = event["batch"] is not None
    return event["op"], event["kind"], event["members"], event["bytes"], event["peer"], is_batched


@pytest.mark.parametrize(("world", "name"), CASES)
def test_equals_real_ranks(records: Any, world: int, name: str) -> None:
    """Operations, members, bytes, peers, and waits, in order."""
    for rank, (real, rehearsed) in enumerate(records[world, name]):
        for number, (expected, event) in enumerate(zip(real, rehearsed, strict=False)):
            assert summarize(event) == summarize(expected), (rank, number, expected.get("calls"), event.get("calls"))
        assert len(real) == len(rehearsed) > 10, rank


@pytest.mark.parametrize(("world", "name"), [case for case in CASES if "EP2" in case[1]])
def test_all_to_alls_exchange_as_many_bytes(records: Any, world: int, name: str) -> None:
    """Real routing is not balanced: what all ranks of a group send and receive is compared in sum. Before experts each
    rank sends, and after them it receives, as much as in balanced routing."""
    count, sums = 0, defaultdict[tuple[Any, ...], list[int]](lambda: [0, 0, 0, 0])
    for real, rehearsed in records[world, name]:
        for expected, event in zip(real, rehearsed, strict=True):
            if event.get("kind") != "all_to_all_single":
                continue
            totals = [sum(item[key]) for item in (expected, event) for key in ("sends", "receives")]
            assert totals[0] == totals[2] or totals[1] == totals[3]
            total = sums[event["op"], *event["members"]]
            total[:] = map(sum, zip(total, totals, strict=True))
            count += 1
    assert count > 20 and all(total == [total[0]] * 4 for total in sums.values())


@pytest.mark.parametrize(("world", "name"), CASES)
def test_no_rank_would_wait_for_ever(records: Any, world: int, name: str) -> None:
    for number in range(2):
        nccl_order.check([pair[number] for pair in records[world, name]])
