"""Episodes and their branches: which sequences they are, and what is said of them once, by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from thread_ranks import Thread, as_ranks

from megarl.types import Episodes, Prompt, Rollout, Rollouts, Status, TrainBatch, Turn, as_branches
from megarl.types.episodes import numbered

FOUR = Episodes.of(torch.tensor([7, 3, 3, 9]))


def conversation(group: int, actions: int, episode: int = -1, status: Status = "stop") -> Rollout:
    turns = (Turn((1, 2)), Turn(range(3, 3 + actions), (0.0,) * actions, True, 0))
    return Rollout(Prompt("p", ()), turns, status, float(group), group=group, tool_calls=1, episode=episode)


GIVEN = [
    conversation(0, 4),
    *as_branches([conversation(0, 3), conversation(0, 5)], 0),
    conversation(1, 2),
    *as_branches([conversation(1, 1), conversation(1, 1), conversation(1, 6)], 0),
]
NUMBERS = [0, 1, 1, 3, 4, 4, 4]


def test_by_hand() -> None:
    assert len(FOUR) == 3 and FOUR.row.tolist() == [0, 1, 1, 2] and FOUR.sizes.tolist() == [1, 2, 1]
    assert FOUR.first.tolist() == [0, 1, 3] and FOUR.last.tolist() == [0, 2, 3]
    assert FOUR.is_last.tolist() == [True, False, True, True]
    actions = torch.tensor([4, 3, 5, 2])
    assert FOUR.sums(actions).tolist() == [4, 8, 2] and FOUR.sums(actions).dtype == actions.dtype
    assert FOUR.whole(actions).tolist() == [4, 5, 2]
    assert FOUR.each(torch.tensor([0.5, 1.5, 2.5])).tolist() == [0.5, 1.5, 1.5, 2.5]
    assert FOUR.starts(torch.tensor([0, 10, 16, 30, 35])).tolist() == [0, 10, 30, 35]
    assert FOUR.sequences([2, 1]) == [3, 1, 2]


@pytest.mark.parametrize("count", [0, 1, 5])
def test_what_is_alone_is_as_it_was(count: int) -> None:
    episodes, x = Episodes.alone(count), torch.randn(count, dtype=torch.float64)
    assert len(episodes) == count and bool(episodes.is_last.all())
    for found in (episodes.whole(x), episodes.sums(x), episodes.each(x)):
        assert torch.equal(found, x)
    cu = torch.arange(count + 1) * 3
    assert torch.equal(episodes.starts(cu), cu) and episodes.sequences(range(count)) == list(range(count))
    assert torch.equal(Episodes.of(torch.arange(count)).row, episodes.row)


def test_numbers_by_hand() -> None:
    group, episode = torch.tensor([0, 0, 0, 0, 1, 1, 1]), torch.tensor([-1, -1, 2, 2, 2, 5, 5])
    assert numbered(group, episode).tolist() == [0, 1, 2, 2, 4, 5, 5]
    assert numbered(group, torch.full((7,), -1)).tolist() == list(range(7))
    assert numbered(group[:0], episode[:0]).tolist() == []
    with pytest.raises(ValueError, match="^branches of an episode do not follow each other$"):
        numbered(torch.zeros(3), torch.tensor([1, -1, 1]))
    with pytest.raises(ValueError, match="^branches of an episode have another home each$"):
        numbered(group, episode, home=torch.tensor([0, 0, 0, 1, 0, 0, 0]))


def test_an_episode_has_ended_as_its_last_branch() -> None:
    parts = [conversation(0, 3), conversation(0, 5, status="length")]
    first, last = as_branches(parts, 4)
    assert (first.status, first.episode) == (last.status, last.episode) == ("length", 4)
    assert as_branches(parts[:1], 4) == (parts[0],) and parts[0].episode == -1
    with pytest.raises(ValueError, match="have another status each"):
        Rollouts.of([replace(one, episode=4) for one in parts])


def test_figures_of_several_ranks() -> None:
    """Rank 1 has nothing, the others a group each; all know which are branches of one."""
    shares: list[list[Rollout]] = [GIVEN[:3], [], GIVEN[3:]]

    def work(rank: Thread) -> list[list[int]]:
        mine = shares[rank.rank]
        rollouts = Rollouts.of(mine, [one.group for one in mine], rank)
        kept = rollouts.select(torch.tensor([False, True, True, True, False, False, False]))
        again = rollouts.with_([replace(one, reward=9.0) for one in rollouts.here])
        return [one.episode.tolist() for one in (rollouts, again, kept, Rollouts.joined([kept, rollouts]))]

    (first, *others) = as_ranks(3, work)
    assert others == [first, first]
    assert first[0] == first[1] == NUMBERS and first[2] == [1, 1, 3]
    assert first[3] == [1, 1, 3, *(4 + number for number in NUMBERS)]  # no episode of one is one of the other


def test_whole_episodes() -> None:
    rollouts = Rollouts.of(GIVEN)
    whole = rollouts.whole_episodes()
    assert (
        len(whole) == 4 and whole.here == tuple(GIVEN[i] for i in (0, 2, 3, 6)) and whole.own.tolist() == [0, 1, 2, 3]
    )
    assert whole.actions.tolist() == [4, 8, 2, 8] and whole.turns.tolist() == whole.tool_calls.tolist() == [1, 2, 1, 3]
    assert whole.length.tolist() == [6, 7, 4, 8] and whole.reward.tolist() == [0, 0, 1, 1]
    assert whole.whole_episodes() is whole
    plain = Rollouts.of([GIVEN[0], GIVEN[3]])
    assert plain.whole_episodes() is plain


def test_what_is_said_of_an_episode_is_said_once() -> None:
    """Why one was cut off, and why one has no reward."""
    aborted = as_branches([conversation(0, 1), replace(conversation(0, 1, status="aborted"), failure="late")], 0)
    failed = as_branches([replace(conversation(1, 1), unscored={"a": "it raised"})] * 2, 0)
    rollouts = Rollouts.of([*aborted, *failed])
    assert rollouts.failures == ("late",) and rollouts.unscored_for == (("a", "it raised", "p"),)
    assert rollouts.are("aborted").tolist() == [True, True, False, False]


def test_batches_know_theirs() -> None:
    batch = TrainBatch.from_rollouts(GIVEN)
    assert batch.cu_seqlens.tolist() == [0, 6, 11, 18, 22, 25, 28, 36]
    assert batch.cu_episodes.tolist() == [0, 6, 18, 22, 36]
    mini = batch.select(batch.episodes.sequences([3, 1]))
    assert mini.cu_episodes.tolist() == [0, 14, 26] and len(mini.episodes) == 2
    plain = TrainBatch.from_rollouts([GIVEN[0], GIVEN[3]])
    assert plain.episode is None and torch.equal(plain.cu_episodes, plain.cu_seqlens)

    def work(rank: Thread) -> list[list[int]]:
        mine = [GIVEN[3:], GIVEN[:3]][rank.rank]
        part = TrainBatch.from_rollouts(Rollouts.of(mine, [one.group for one in mine], rank))
        return [part.cu_episodes.tolist(), part.episodes.row.tolist(), part.episodes_here.row.tolist()]

    rows = [0, 1, 1, 2, 3, 3, 3]
    assert as_ranks(2, work) == [[[0, 4, 18], rows, [0, 1, 1, 1]], [[0, 6, 18], rows, [0, 1, 1]]]
