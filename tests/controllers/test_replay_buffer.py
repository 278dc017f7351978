"""The replay buffer: every rank keeps its own rollouts, all sample the same, and a restore reshards them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from thread_ranks import as_ranks

from megarl.config import ConfigError
from megarl.controllers.pf_ppo import ReplayBuffer
from megarl.observe.rollout_log import part_file
from megarl.types import Comm, Prompt, Rollout, Rollouts, Turn

pytestmark = pytest.mark.alone


def make_rollouts(comm: Comm, step: int, world: int) -> Rollouts:
    """Return this rank's share of six rollouts of a step, with routing."""
    routing = torch.zeros(2, 1, 1, dtype=torch.uint8)
    indices = range(comm.rank, 6, world)
    turns = (Turn((9,)), Turn((1, 2), (-0.5, -1.5), True, step))
    local = [
        Rollout(Prompt(f"{step}-{i}", ()), turns, reward=10.0 * step + i, routing=routing, group=i) for i in indices
    ]
    return Rollouts.gather(local, list(indices), comm, step)


def test_all_ranks_keep_and_sample_the_same(tmp_path: Path) -> None:
    def work(comm: Comm, world: int) -> tuple[list[float], list[float], set[int]]:
        buffer = ReplayBuffer(8)
        buffer.add(make_rollouts(comm, 1, world))
        buffer.add(make_rollouts(comm, 2, world))
        assert buffer._rollouts is not None and len(buffer) == 8
        assert not bool(buffer._rollouts.routed_tokens.any())
        drawn = buffer.sample(3, torch.Generator().manual_seed(5))
        assert drawn is not None and len(drawn) == 3
        full = buffer.sample(100, torch.Generator().manual_seed(5))
        assert full is not None
        folder = tmp_path / str(world)
        buffer.save()(folder)
        comm.all_gather_objects(None)
        return buffer._rollouts.reward.tolist(), drawn.reward.tolist(), {r.prompt.id == "2-0" for r in full.local}

    single_rank = as_ranks(1, lambda comm: work(comm, 1))[0]
    assert single_rank[0] == [14.0, 15.0, *(20.0 + i for i in range(6))]
    for result in as_ranks(3, lambda comm: work(comm, 3)):
        assert result[:2] == single_rank[:2]

    def restore(comm: Comm) -> tuple[list[float], int]:
        buffer = ReplayBuffer(8)
        buffer.restore(tmp_path / "3", comm)
        assert buffer._rollouts is not None
        return buffer._rollouts.reward.tolist(), len(buffer._rollouts.local)

    restored = as_ranks(2, restore)  # the first rank also restores the third's
    assert [result[0] for result in restored] == [single_rank[0]] * 2 and sum(result[1] for result in restored) == 8


def test_damaged_file_raises_on_all_ranks(tmp_path: Path) -> None:
    def save(comm: Comm) -> None:
        buffer = ReplayBuffer(8)
        buffer.add(make_rollouts(comm, 1, 2))
        buffer.save()(tmp_path)

    as_ranks(2, save)
    part_file(tmp_path / "buffer", 0, 1).write_bytes(b"no parquet")

    def restore(comm: Comm) -> str:
        with pytest.raises(ConfigError) as error:
            ReplayBuffer(8).restore(tmp_path, comm)
        return str(error.value)

    errors = as_ranks(2, restore)
    assert errors[0] == errors[1] and "rank_00001.parquet" in errors[0]


def test_empty_buffer_samples_nothing() -> None:
    assert ReplayBuffer(3).sample(2, torch.Generator()) is None and len(ReplayBuffer(3)) == 0
