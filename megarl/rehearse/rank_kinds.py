"""Groups the ranks of a job into kinds, so that a rehearsal plays a few ranks of each kind instead of all.

The kinds are the coarsest equitable partition that refines the initial colors, as color refinement (1-WL) finds it:
the groups of two ranks of a kind have, family by family, members of the same sequence of kinds.

The sequence is ordered, since a rank's place in a group decides what it sends. But a rank's place does not by itself
separate it from the others, or every rank would be a kind. So to play one rank of a kind is to assume that ranks of a
kind behave alike whatever their places. Play a second rank and compare (`kind_order.compare_records`) to check that.
A rank that does have a part of its own, such as a source of data, needs a color of its own.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Family:
    """All groups that the ranks of a job create for one purpose, such as all tensor parallel groups."""

    groups: tuple[tuple[int, ...], ...]
    """Global ranks of each group, in the order of their creation."""
    is_host: bool
    """Whether the groups use gloo, for values on the host."""


def find_kinds(colors: Sequence[Hashable], families: Mapping[str, Family]) -> list[tuple[int, ...]]:
    """Return the ranks of each kind, in the order of their first ranks.

    colors: what tells ranks apart from the start, by rank, such as pipeline stage and roles.
    Raises ValueError if a group has a member twice, or one that is not a rank.
    """
    for name, family in families.items():
        for members in family.groups:
            if len(set(members)) < len(members) or not all(0 <= rank < len(colors) for rank in members):
                raise ValueError(f"a group of {name} has the members {members}, in a job of {len(colors)} ranks")
    kinds = _number(colors)
    count, previous_count = len(set(kinds)), 0
    while count > previous_count:
        for family in families.values():
            kinds = _refine(kinds, family)
        count, previous_count = len(set(kinds)), count
    result: dict[int, list[int]] = {}
    for rank, kind in enumerate(kinds):
        result.setdefault(kind, []).append(rank)
    return [tuple(ranks) for ranks in result.values()]


def choose_ranks(kinds: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
    """Return the first and the last rank of each kind; they are equal if the kind has a single rank."""
    return [(ranks[0], ranks[-1]) for ranks in kinds]


def _refine(kinds: list[int], family: Family) -> list[int]:
    """Separate ranks of a kind whose groups in the family differ."""
    sequences: list[list[int]] = [[] for _ in kinds]
    numbers: dict[tuple[int, ...], int] = {}
    for members in family.groups:
        number = numbers.setdefault(tuple(kinds[rank] for rank in members), len(numbers))
        for rank in members:
            sequences[rank].append(number)
    return _number([(kind, *sorted(sequences[rank])) for rank, kind in enumerate(kinds)])


def _number(colors: Sequence[Hashable]) -> list[int]:
    """Replace each color by the number of different colors before its first use."""
    numbers: dict[Hashable, int] = {}
    return [numbers.setdefault(color, len(numbers)) for color in colors]
