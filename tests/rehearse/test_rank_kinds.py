"""`rank_kinds` finds the coarsest partition of ranks into kinds whose groups look alike."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence

import pytest

from megarl.rehearse.rank_kinds import Family, choose_ranks, find_kinds

pytestmark = pytest.mark.alone


def device(*groups: tuple[int, ...]) -> Family:
    return Family(groups, False)


def test_places_do_not_separate_ranks() -> None:
    world = {"WORLD": device(tuple(range(4)))}
    assert find_kinds([0] * 4, world) == [(0, 1, 2, 3)]
    assert find_kinds("abab", world) == [(0, 2), (1, 3)]


def test_places_of_members_of_other_kinds_separate_ranks() -> None:
    assert find_kinds("abab", {"PIPELINE": device((0, 1), (2, 3))}) == [(0, 2), (1, 3)]
    assert find_kinds("abab", {"PIPELINE": device((0, 1), (3, 2))}) == [(0,), (1,), (2,), (3,)]


def test_membership_separates_ranks() -> None:
    assert find_kinds([0] * 4, {"FIRST_NODE": device((0, 1))}) == [(0, 1), (2, 3)]
    assert find_kinds([0] * 4, {"PAIRS": device((0, 1), (1, 2), (2, 3), (3, 0))}) == [(0, 1, 2, 3)]
    assert find_kinds([0] * 3, {"PAIRS": device((0, 1), (2, 1))}) == [(0, 2), (1,)]


def test_a_rank_with_a_part_separates_those_who_share_groups_with_it() -> None:
    families = {"TENSOR": device((0, 1), (2, 3), (4, 5)), "DATA": device((0, 2, 4), (1, 3, 5))}
    assert find_kinds([0] * 6, families) == [(0, 1, 2, 3, 4, 5)]
    assert find_kinds([1, 0, 0, 0, 0, 0], families) == [(0,), (1,), (2, 4), (3, 5)]


def test_chooses_the_first_and_the_last_rank() -> None:
    assert choose_ranks([(0, 2, 5), (1,), (3, 4)]) == [(0, 5), (1, 1), (3, 4)]


@pytest.mark.parametrize("members", [(0, 4), (1, 1), (-1, 0)])
def test_refuses_members_that_are_no_ranks(members: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="WRONG has the members"):
        find_kinds([0] * 4, {"WORLD": device((0, 1, 2, 3)), "WRONG": device(members)})


def partitions(ranks: Sequence[int]) -> Iterator[list[tuple[int, ...]]]:
    """Yield all partitions, each in the order of first ranks."""
    if not ranks:
        yield []
        return
    for rest in partitions(ranks[:-1]):
        yield [*rest, (ranks[-1],)]
        for number, part in enumerate(rest):
            yield [*rest[:number], (*part, ranks[-1]), *rest[number + 1 :]]


def is_equitable(kinds: Sequence[Sequence[int]], colors: Sequence[int], families: Mapping[str, Family]) -> bool:
    kind_of = {rank: kind for kind, ranks in enumerate(kinds) for rank in ranks}

    def look(rank: int) -> list[list[list[int]]]:
        groups = [[group for group in family.groups if rank in group] for family in families.values()]
        return [sorted([kind_of[member] for member in group] for group in part) for part in groups]

    return all(colors[a] == colors[b] and look(a) == look(b) for ranks in kinds for a in ranks for b in ranks)


def test_finds_the_coarsest_equitable_partition() -> None:
    """Every other equitable partition divides the kinds further."""
    numbers = random.Random(0)
    sizes = set()
    for _ in range(150):
        world = numbers.randint(2, 6)
        colors = [numbers.choice((0, 0, 0, 1)) for _ in range(world)]
        families = {}
        for name in "xy"[: numbers.randint(1, 2)]:
            order, size = numbers.sample(range(world), world), numbers.randint(1, 3)
            if numbers.random() < 0.5:
                order.sort()
            groups = [tuple(order[begin : begin + size]) for begin in range(0, world, size)]
            families[name] = device(*groups[: numbers.randint(1, len(groups))])
        kinds = find_kinds(colors, families)
        sizes.add(len(kinds))
        equitable = [item for item in partitions(range(world)) if is_equitable(item, colors, families)]
        assert kinds in equitable
        assert all(any(set(part) <= set(ranks) for ranks in kinds) for item in equitable for part in item)
    assert sizes >= {1, 2, 3, 4}


def test_finds_the_stages_of_a_large_job() -> None:
    tp, dp, pp = 8, 16, 16
    stage = tp * dp
    families = {
        "WORLD": device(tuple(range(stage * pp))),
        "TENSOR": device(*(tuple(range(begin, begin + tp)) for begin in range(0, stage * pp, tp))),
        "DATA": device(
            *(tuple(range(s * stage + t, (s + 1) * stage, tp)) for s in range(pp) for t in range(tp)),
        ),
        "PIPELINE": device(*(tuple(range(rank, stage * pp, stage)) for rank in range(stage))),
        "EMBEDDING": device(*((rank, rank + stage * (pp - 1)) for rank in range(stage))),
    }
    stages = [tuple(range(begin, begin + stage)) for begin in range(0, stage * pp, stage)]
    assert find_kinds([rank // stage for rank in range(stage * pp)], families) == stages
    last_rank_of_stages = {"PIPELINE": device(tuple(range(stage - 1, stage * pp, stage)))}
    kinds = find_kinds([rank // stage for rank in range(stage * pp)], last_rank_of_stages)
    assert kinds == sorted([*(ranks[:-1] for ranks in stages), *((ranks[-1],) for ranks in stages)])
