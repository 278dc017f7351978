"""A model on some of a job's ranks is, bit for bit, what it is in a job of its own, whatever the others do."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Run = Callable[..., list[dict[str, Any]]]
SCRIPT = "tests/parallel/ranks_rank_subset.py"
ACTOR: dict[str, Any] = dict(family="qwen3_moe", role="actor", layout=dict(tp=2, ep=2), steps=2)
STAGES: dict[str, Any] = dict(family="deepseek_v3", role="critic", layout=dict(pp=2), steps=3)
REPLICAS: dict[str, Any] = dict(family="qwen3_moe", role="critic", layout=dict(ep=2), steps=3)
TIED: dict[str, Any] = dict(family="qwen3", role="actor", layout=dict(pp=2), steps=2)
CONTEXT: dict[str, Any] = dict(family="deepseek_v2", role="actor", layout=dict(cp=2, etp=2), steps=1)
FOUR: dict[str, Any] = dict(family="qwen3_moe", role="actor", layout=dict(tp=2, pp=2), steps=1)


def run(ranks: Run, world: int, folder: Path, *parts: dict[str, Any]) -> list[dict[str, Any]]:
    folder.mkdir()
    return ranks(world, SCRIPT, str(folder), *map(json.dumps, parts), timeout=240.0)


@pytest.fixture(scope="module")
def alone(run_ranks: Run, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[dict[str, Any]]]:
    """What each rank finds of a model in a job of its own ranks, and of another that goes on from its checkpoint."""

    def of(part: dict[str, Any], more: int = 0) -> list[dict[str, Any]]:
        members = list(range(4 if part is FOUR else 2))
        parts = [part | dict(name="first", members=members)]
        if more:
            parts.append(part | dict(name="more", members=members, origin="first", steps=more))
        return run(run_ranks, len(members), tmp_path_factory.mktemp("alone") / "of", *parts)

    return of


def test_two_models_on_their_own_ranks(run_ranks: Run, alone: Any, tmp_path: Path) -> None:
    """The critic is done before the actor begins, and has saved; each goes on where the other has been."""
    actual = run(
        run_ranks,
        4,
        tmp_path / "job",
        ACTOR | dict(name="actor", members=[0, 1], after="critic"),
        STAGES | dict(name="critic", members=[2, 3]),
        ACTOR | dict(name="actor, moved", members=[2, 3], origin="actor", steps=1),
        STAGES | dict(name="critic, moved", members=[1, 3], origin="critic", steps=1),
    )
    actor, critic = alone(ACTOR, more=1), alone(STAGES, more=1)
    assert [sorted(result) for result in actual] == [
        ["actor"],
        ["actor", "critic, moved"],
        ["actor, moved", "critic"],
        ["actor, moved", "critic", "critic, moved"],
    ]
    for place in (0, 1):
        assert actual[place]["actor"] == actor[place]["first"]
        assert actual[2 + place]["critic"] == critic[place]["first"]
        assert actual[2 + place]["actor, moved"] == actor[place]["more"]
        assert actual[(1, 3)[place]]["critic, moved"] == critic[place]["more"]
    figures = actual[0]["actor"]["figures"]
    assert len(figures) == 2 and figures[0] != figures[1] and figures[0]["actor/grad_norm"] > 0
    assert {"actor/moe_load_balancing_loss", "actor/moe_z_loss"} <= figures[0].keys()


def test_ranks_that_are_not_neighbours(run_ranks: Run, alone: Any, tmp_path: Path) -> None:
    actual = run(
        run_ranks,
        4,
        tmp_path / "job",
        REPLICAS | dict(name="critic", members=[0, 2]),
        TIED | dict(name="actor", members=[1, 3]),
    )
    actor, critic = alone(TIED), alone(REPLICAS)
    for place in (0, 1):
        assert actual[1 + 2 * place] == {"actor": actor[place]["first"]}
        assert actual[2 * place] == {"critic": critic[place]["first"]}


def test_some_of_all(run_ranks: Run, alone: Any, tmp_path: Path) -> None:
    """Ranks that two models share take turns; one of them is on all ranks, and goes on as another layout's."""
    actual = run(
        run_ranks,
        4,
        tmp_path / "job",
        FOUR | dict(name="all", members=[0, 1, 2, 3]),
        CONTEXT | dict(name="some", members=[2, 3]),
        ACTOR | dict(name="fewer", members=[0, 3], origin="all", steps=0),
    )
    full, some = alone(FOUR), alone(CONTEXT)
    assert [result["all"] for result in actual] == [result["first"] for result in full]
    assert [actual[rank]["some"] for rank in (2, 3)] == [result["first"] for result in some]
    assert {actual[rank]["fewer"]["export"] for rank in (0, 3)} == {actual[0]["all"]["export"]}
