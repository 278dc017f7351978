"""Episodes and their branches, with values computed by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from thread_ranks import ThreadRank, as_ranks

from megarl.types import Episodes, Prompt, Rollout, Rollouts, Status, TrainBatch, Turn, as_branches
from megarl.types.episodes import assign_episode_ids

pytestmark = pytest.mark.alone

EPISODES = Episodes.from_ids(torch.tensor([7, 3, 3, 9]))


def make_rollout(group: int, actions: int, episode: int = -1, status: Status = "stop") -> Rollout:
    turns = (Turn((1, 2)), Turn(range(3, 3 + actions), (0.0,) * actions, True, 0))
    return Rollout(Prompt("p", ()), turns, status, float(group), group=group, tool_calls=1, episode=episode)


ROLLOUTS = [
    make_rollout(0, 4),
    *as_branches([make_rollout(0, 3), make_rollout(0, 5)], 0),
    make_rollout(1, 2),
    *as_branches([make_rollout(1, 1), make_rollout(1, 1), make_rollout(1, 6)], 0),
]
EPISODE_IDS = [0, 1, 1, 3, 4, 4, 4]


def test_episode_operations() -> None:
    assert len(EPISODES) == 3 and EPISODES.episode_ids.tolist() == [0, 1, 1, 2] and EPISODES.sizes.tolist() == [1, 2, 1]
    assert EPISODES.first.tolist() == [0, 1, 3] and EPISODES.last.tolist() == [0, 2, 3]
    assert EPISODES.is_last.tolist() == [True, False, True, True]
    actions = torch.tensor([4, 3, 5, 2])
    assert (
        EPISODES.sum_branches(actions).tolist() == [4, 8, 2] and EPISODES.sum_branches(actions).dtype == actions.dtype
    )
    assert EPISODES.take_last(actions).tolist() == [4, 5, 2]
    assert EPISODES.expand(torch.tensor([0.5, 1.5, 2.5])).tolist() == [0.5, 1.5, 1.5, 2.5]
    assert EPISODES.merge_cu_seqlens(torch.tensor([0, 10, 16, 30, 35])).tolist() == [0, 10, 30, 35]
    assert EPISODES.sequence_indices([2, 1]) == [3, 1, 2]


@pytest.mark.parametrize("count", [0, 1, 5])
def test_single_branch_episodes_change_nothing(count: int) -> None:
    episodes, x = Episodes.from_ids(torch.arange(count)), torch.randn(count, dtype=torch.float64)
    assert len(episodes) == count and bool(episodes.is_last.all())
    for result in (episodes.take_last(x), episodes.sum_branches(x), episodes.expand(x)):
        assert torch.equal(result, x)
    cu = torch.arange(count + 1) * 3
    assert torch.equal(episodes.merge_cu_seqlens(cu), cu) and episodes.sequence_indices(range(count)) == list(
        range(count)
    )
    assert torch.equal(Episodes.from_ids(torch.arange(count)).episode_ids, episodes.episode_ids)


def test_assign_episode_ids() -> None:
    group, episode = torch.tensor([0, 0, 0, 0, 1, 1, 1]), torch.tensor([-1, -1, 2, 2, 2, 5, 5])
    assert assign_episode_ids(group, episode).tolist() == [0, 1, 2, 2, 4, 5, 5]
    assert assign_episode_ids(group, torch.full((7,), -1)).tolist() == list(range(7))
    assert assign_episode_ids(group[:0], episode[:0]).tolist() == []
    with pytest.raises(ValueError, match="^branches of an episode are not adjacent$"):
        assign_episode_ids(torch.zeros(3), torch.tensor([1, -1, 1]))
    with pytest.raises(ValueError, match="^branches of an episode differ in home$"):
        assign_episode_ids(group, episode, home=torch.tensor([0, 0, 0, 1, 0, 0, 0]))


def test_branches_take_the_status_of_the_last() -> None:
    parts = [make_rollout(0, 3), make_rollout(0, 5, status="length")]
    first, last = as_branches(parts, 4)
    assert (first.status, first.episode) == (last.status, last.episode) == ("length", 4)
    assert as_branches(parts[:1], 4) == (parts[0],) and parts[0].episode == -1
    with pytest.raises(ValueError, match="differ in status"):
        Rollouts.gather([replace(item, episode=4) for item in parts])


def test_ranks_agree_on_gathered_episodes() -> None:
    """Rank 1 has no rollouts, the others a group each."""
    local_rollouts: list[list[Rollout]] = [ROLLOUTS[:3], [], ROLLOUTS[3:]]

    def work(rank: ThreadRank) -> list[list[int]]:
        local = local_rollouts[rank.rank]
        rollouts = Rollouts.gather(local, [item.group for item in local], rank)
        selected = rollouts.select(torch.tensor([False, True, True, True, False, False, False]))
        rescored = rollouts.replace_local([replace(item, reward=9.0) for item in rollouts.local])
        return [item.episode.tolist() for item in (rollouts, rescored, selected, Rollouts.concat([selected, rollouts]))]

    (first, *other_ranks) = as_ranks(3, work)
    assert other_ranks == [first, first]
    assert first[0] == first[1] == EPISODE_IDS and first[2] == [1, 1, 3]
    assert first[3] == [1, 1, 3, *(4 + number for number in EPISODE_IDS)]  # ids of the two batches stay distinct


def test_merge_branches() -> None:
    rollouts = Rollouts.gather(ROLLOUTS)
    full = rollouts.merge_branches()
    assert (
        len(full) == 4
        and full.local == tuple(ROLLOUTS[i] for i in (0, 2, 3, 6))
        and full.local_indices.tolist() == [0, 1, 2, 3]
    )
    assert full.actions.tolist() == [4, 8, 2, 8] and full.turns.tolist() == full.tool_calls.tolist() == [1, 2, 1, 3]
    assert full.length.tolist() == [6, 7, 4, 8] and full.reward.tolist() == [0, 0, 1, 1]
    assert full.merge_branches() is full
    unbranched = Rollouts.gather([ROLLOUTS[0], ROLLOUTS[3]])
    assert unbranched.merge_branches() is unbranched


def test_reports_failures_once_per_episode() -> None:
    """Failures and unscored reasons."""
    aborted = as_branches([make_rollout(0, 1), replace(make_rollout(0, 1, status="aborted"), failure="late")], 0)
    failed = as_branches([replace(make_rollout(1, 1), unscored={"a": "it raised"})] * 2, 0)
    rollouts = Rollouts.gather([*aborted, *failed])
    assert rollouts.failures == ("late",) and rollouts.unscored_reasons == (("a", "it raised", "p"),)
    assert rollouts.has_status("aborted").tolist() == [True, True, False, False]


def test_batch_tracks_its_episodes() -> None:
    batch = TrainBatch.from_rollouts(ROLLOUTS)
    assert batch.cu_seqlens.tolist() == [0, 6, 11, 18, 22, 25, 28, 36]
    assert batch.cu_episodes.tolist() == [0, 6, 18, 22, 36]
    mini = batch.select(batch.episodes.sequence_indices([3, 1]))
    assert mini.cu_episodes.tolist() == [0, 14, 26] and len(mini.episodes) == 2
    unbranched = TrainBatch.from_rollouts([ROLLOUTS[0], ROLLOUTS[3]])
    assert unbranched.episode is None and torch.equal(unbranched.cu_episodes, unbranched.cu_seqlens)

    def work(rank: ThreadRank) -> list[list[int]]:
        local = [ROLLOUTS[3:], ROLLOUTS[:3]][rank.rank]
        part = TrainBatch.from_rollouts(Rollouts.gather(local, [item.group for item in local], rank))
        return [part.cu_episodes.tolist(), part.episodes.episode_ids.tolist(), part.local_episodes.episode_ids.tolist()]

    rows = [0, 1, 1, 2, 3, 3, 3]
    assert as_ranks(2, work) == [[[0, 4, 18], rows, [0, 1, 1, 1]], [[0, 6, 18], rows, [0, 1, 1]]]
