"""A model on a subset of a job's ranks is bitwise what it is in a job of its own."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

RunRanks = Callable[..., list[dict[str, Any]]]
SCRIPT = "tests/parallel/ranks_rank_subset.py"
TENSOR_PARALLEL_ACTOR: dict[str, Any] = dict(family="qwen3_moe", role="actor", layout=dict(tp=2, ep=2), steps=2)
PIPELINE_CRITIC: dict[str, Any] = dict(family="deepseek_v3", role="critic", layout=dict(pp=2), steps=3)
REPLICATED_CRITIC: dict[str, Any] = dict(family="qwen3_moe", role="critic", layout=dict(ep=2), steps=3)
TIED_ACTOR: dict[str, Any] = dict(family="qwen3", role="actor", layout=dict(pp=2), steps=2)
CONTEXT_PARALLEL_ACTOR: dict[str, Any] = dict(family="deepseek_v2", role="actor", layout=dict(cp=2, etp=2), steps=1)
FOUR_RANK_ACTOR: dict[str, Any] = dict(family="qwen3_moe", role="actor", layout=dict(tp=2, pp=2), steps=1)


def run(ranks: RunRanks, world: int, folder: Path, *parts: dict[str, Any]) -> list[dict[str, Any]]:
    folder.mkdir()
    return ranks(world, SCRIPT, str(folder), *map(json.dumps, parts), timeout=240.0)


@pytest.fixture(scope="module")
def run_alone(run_ranks: RunRanks, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[dict[str, Any]]]:
    """Return a function that trains a model in a job of its own, and optionally resumes it in a second model."""

    def results_of(part: dict[str, Any], resumed_steps: int = 0) -> list[dict[str, Any]]:
        members = list(range(4 if part is FOUR_RANK_ACTOR else 2))
        parts = [part | dict(name="first", members=members)]
        if resumed_steps:
            parts.append(part | dict(name="resumed", members=members, origin="first", steps=resumed_steps))
        return run(run_ranks, len(members), tmp_path_factory.mktemp("alone") / "job", *parts)

    return results_of


def test_models_on_disjoint_ranks_move_to_other_ranks(run_ranks: RunRanks, run_alone: Any, tmp_path: Path) -> None:
    """The critic saves before the actor starts; then each resumes on ranks that the other had."""
    actual = run(
        run_ranks,
        4,
        tmp_path / "job",
        TENSOR_PARALLEL_ACTOR | dict(name="actor", members=[0, 1], after="critic"),
        PIPELINE_CRITIC | dict(name="critic", members=[2, 3]),
        TENSOR_PARALLEL_ACTOR | dict(name="actor, moved", members=[2, 3], origin="actor", steps=1),
        PIPELINE_CRITIC | dict(name="critic, moved", members=[1, 3], origin="critic", steps=1),
    )
    actor, critic = run_alone(TENSOR_PARALLEL_ACTOR, resumed_steps=1), run_alone(PIPELINE_CRITIC, resumed_steps=1)
    assert [sorted(result) for result in actual] == [
        ["actor"],
        ["actor", "critic, moved"],
        ["actor, moved", "critic"],
        ["actor, moved", "critic", "critic, moved"],
    ]
    for position in (0, 1):
        assert actual[position]["actor"] == actor[position]["first"]
        assert actual[2 + position]["critic"] == critic[position]["first"]
        assert actual[2 + position]["actor, moved"] == actor[position]["resumed"]
        assert actual[(1, 3)[position]]["critic, moved"] == critic[position]["resumed"]
    metrics = actual[0]["actor"]["metrics"]
    assert len(metrics) == 2 and metrics[0] != metrics[1] and metrics[0]["actor/grad_norm"] > 0
    assert {"actor/moe_load_balancing_loss", "actor/moe_z_loss"} <= metrics[0].keys()


def test_models_on_interleaved_ranks(run_ranks: RunRanks, run_alone: Any, tmp_path: Path) -> None:
    actual = run(
        run_ranks,
        4,
        tmp_path / "job",
        REPLICATED_CRITIC | dict(name="critic", members=[0, 2]),
        TIED_ACTOR | dict(name="actor", members=[1, 3]),
    )
    actor, critic = run_alone(TIED_ACTOR), run_alone(REPLICATED_CRITIC)
    for position in (0, 1):
        assert actual[1 + 2 * position] == {"actor": actor[position]["first"]}
        assert actual[2 * position] == {"critic": critic[position]["first"]}


def test_models_on_overlapping_ranks(run_ranks: RunRanks, run_alone: Any, tmp_path: Path) -> None:
    """Models that share ranks take turns; one is on all ranks, and another layout resumes from it."""
    actual = run(
        run_ranks,
        4,
        tmp_path / "job",
        FOUR_RANK_ACTOR | dict(name="all", members=[0, 1, 2, 3]),
        CONTEXT_PARALLEL_ACTOR | dict(name="some", members=[2, 3]),
        TENSOR_PARALLEL_ACTOR | dict(name="fewer", members=[0, 3], origin="all", steps=0),
    )
    full, some = run_alone(FOUR_RANK_ACTOR), run_alone(CONTEXT_PARALLEL_ACTOR)
    assert [result["all"] for result in actual] == [result["first"] for result in full]
    assert [actual[rank]["some"] for rank in (2, 3)] == [result["first"] for result in some]
    assert {actual[rank]["fewer"]["export"] for rank in (0, 3)} == {actual[0]["all"]["export"]}
