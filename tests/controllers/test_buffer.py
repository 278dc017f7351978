"""Rollouts kept on the ranks that made them: the newest, the same drawn everywhere, saved and dealt out anew."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from thread_ranks import as_ranks

from megarl.config import ConfigError
from megarl.controllers.pf_ppo import Buffer
from megarl.observe.rollout_log import part_file
from megarl.types import Everyone, Prompt, Rollout, Rollouts, Turn


def share(everyone: Everyone, step: int, world: int) -> Rollouts:
    """Six rollouts of a step, dealt out; routing of three tokens each."""
    routing = torch.zeros(2, 1, 1, dtype=torch.uint8)
    mine = range(everyone.rank, 6, world)
    turns = (Turn((9,)), Turn((1, 2), (-0.5, -1.5), True, step))
    here = [Rollout(Prompt(f"{step}-{i}", ()), turns, reward=10.0 * step + i, routing=routing, group=i) for i in mine]
    return Rollouts.of(here, list(mine), everyone, step)


def test_all_ranks_keep_and_draw_the_same(tmp_path: Path) -> None:
    def work(everyone: Everyone, world: int) -> tuple[list[float], list[float], set[int]]:
        buffer = Buffer(8)
        buffer.add(share(everyone, 1, world))
        buffer.add(share(everyone, 2, world))
        assert buffer._kept is not None and len(buffer) == 8
        assert not bool(buffer._kept.routed.any())
        drawn = buffer.drawn(3, torch.Generator().manual_seed(5))
        assert drawn is not None and len(drawn) == 3
        whole = buffer.drawn(100, torch.Generator().manual_seed(5))
        assert whole is not None
        folder = tmp_path / str(world)
        buffer.save()(folder)
        everyone.objects(None)
        return buffer._kept.reward.tolist(), drawn.reward.tolist(), {r.prompt.id == "2-0" for r in whole.here}

    alone = as_ranks(1, lambda everyone: work(everyone, 1))[0]
    assert alone[0] == [14.0, 15.0, *(20.0 + i for i in range(6))]
    for found in as_ranks(3, lambda everyone: work(everyone, 3)):
        assert found[:2] == alone[:2]

    def restored(everyone: Everyone) -> tuple[list[float], int]:
        buffer = Buffer(8)
        buffer.restore(tmp_path / "3", everyone)
        assert buffer._kept is not None
        return buffer._kept.reward.tolist(), len(buffer._kept.here)

    two = as_ranks(2, restored)  # of three: the third rank's are the first's
    assert [found[0] for found in two] == [alone[0]] * 2 and sum(found[1] for found in two) == 8


def test_damage_is_said_on_all_ranks(tmp_path: Path) -> None:
    def save(everyone: Everyone) -> None:
        buffer = Buffer(8)
        buffer.add(share(everyone, 1, 2))
        buffer.save()(tmp_path)

    as_ranks(2, save)
    part_file(tmp_path / "buffer", 0, 1).write_bytes(b"no parquet")

    def restored(everyone: Everyone) -> str:
        with pytest.raises(ConfigError) as caught:
            Buffer(8).restore(tmp_path, everyone)
        return str(caught.value)

    said = as_ranks(2, restored)
    assert said[0] == said[1] and "rank_00001.parquet" in said[0]


def test_nothing_is_drawn_from_nothing() -> None:
    assert Buffer(3).drawn(2, torch.Generator()) is None and len(Buffer(3)) == 0
