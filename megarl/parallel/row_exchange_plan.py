"""Which rows go from where to where: plain data, computed by every rank for itself from what all of them know.

Ranks on one machine read the same memory, so what leaves a home for a machine leaves it once: the home writes what its
neighbours want into one memory, and of what a machine lacks each sequence goes to one of the ranks there that want it,
from whose memory the others read. All of them lay such memory out by the same rule, so nobody has to say where what is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import torch

RowSpec = tuple[torch.dtype, tuple[int, ...]]
"""What the rows of a column are: their dtype, and the shape of each row."""
Part = tuple[int, ...] | None
"""Indices along dim 1 of a column that a rank needs; None for all of them."""
Numbers = np.ndarray[Any, np.dtype[np.int64]]


_ALIGNED = 64


@dataclass(frozen=True)
class Block:
    """Rows of one column and one part, of some sequences in ascending order, packed, at an offset in bytes."""

    column: str
    part: Part
    sequences: Numbers
    rows: int
    offset: int
    size: int


@dataclass(frozen=True)
class ColumnGroup:
    """Columns that travel alike: of the same lengths, and of which each rank needs the same part."""

    columns: tuple[str, ...]
    lengths: Numbers
    parts: tuple[Part, ...]


Selection = Sequence[tuple[ColumnGroup, Part, Numbers]]
"""Sequences of which a cut's columns go somewhere, in a part."""


class ExchangePlan:
    """One delivery, as `rank` sees it. `machines`: the ranks of each."""

    def __init__(
        self,
        kinds: Mapping[str, RowSpec],
        lengths: torch.Tensor | Mapping[str, torch.Tensor],
        homes: torch.Tensor,
        wants: Sequence[Sequence[int]],
        parts: Mapping[str, Sequence[Sequence[int] | None]],
        machines: Sequence[Sequence[int]],
        rank: int,
    ) -> None:
        self.kinds, self.machines, self.rank = kinds, machines, rank
        self.homes = homes.cpu().numpy().astype(np.int64)
        distinct = {id(numbers): numbers for numbers in wants}  # ranks of a pipeline are often given the same list
        arrays = {key: np.asarray(numbers, np.int64) for key, numbers in distinct.items()}
        self.wants = [arrays[id(numbers)] for numbers in wants]
        self.local_sequences = self.sequences_of(rank)
        self.column_groups = tuple(self._group_columns(lengths, parts, len(wants)))
        self.lengths = {name: cut.lengths for cut in self.column_groups for name in cut.columns}
        self.members = list(next(members for members in machines if rank in members))
        self._wanted = self._wanted_by(self.members, np.arange(len(self.homes)))
        self._first_receivers = np.zeros(len(wants), np.int64)  # who of several homes begins with which receiver
        self._first_receivers[np.unique(self.homes)] = np.arange(len(np.unique(self.homes)))
        self._remote_sequences = np.flatnonzero(~np.isin(self.homes, self.members) & self._wanted.any(0))
        self._receivers = {
            (number, part): receivers
            for number, cut in enumerate(self.column_groups)
            for part, receivers in self._assigned(
                cut, self.members, self._remote_sequences, self._wanted[:, self._remote_sequences]
            )
        }

    def _group_columns(
        self,
        lengths: torch.Tensor | Mapping[str, torch.Tensor],
        parts: Mapping[str, Sequence[Sequence[int] | None]],
        world: int,
    ) -> Iterator[ColumnGroup]:
        alike: dict[tuple[int, tuple[Part, ...]], list[str]] = {}
        for name, (_, tail) in self.kinds.items():
            of_all = lengths[name] if isinstance(lengths, Mapping) else lengths
            if name in parts:
                needed = tuple(_normalize_part(indices, tail[0]) for indices in parts[name])
            else:
                needed = (None,) * world
            alike.setdefault((id(of_all), needed), []).append(name)
        for (_, needed), names in alike.items():
            of_all = lengths[names[0]] if isinstance(lengths, Mapping) else lengths
            yield ColumnGroup(tuple(names), of_all.cpu().numpy().astype(np.int64), needed)

    def _wanted_by(self, members: Sequence[int], sequences: Numbers) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """[members, sequences]: which of them wants which."""
        wanted = np.zeros((len(members), len(self.homes)), bool)
        for row, member in zip(wanted, members, strict=True):
            row[self.wants[member]] = True
        return wanted[:, sequences]

    def sequences_of(self, home: int) -> Numbers:
        """The sequences of a rank, ascending."""
        return np.flatnonzero(self.homes == home)

    def row_bytes(self, column: str, part: Part) -> int:
        dtype, tail = self.kinds[column]
        return dtype.itemsize * prod(tail if part is None else (len(part), *tail[1:]))

    def part(self, column: str, rank: int) -> Part:
        return next(cut.parts[rank] for cut in self.column_groups if column in cut.columns)

    def blocks(self, chosen: Selection, without: Iterable[str] = ()) -> tuple[list[Block], int]:
        """The layout of memory in which chosen rows lie, and its bytes: larger items first, so that each is aligned."""
        left_out = set(without)
        order = [
            (name, part, sequences, cut.lengths)
            for cut, part, sequences in chosen
            for name in cut.columns
            if name not in left_out
        ]
        blocks, offset = [], 0
        for name, part, sequences, lengths in sorted(order, key=lambda block: -self.kinds[block[0]][0].itemsize):
            rows = int(lengths[sequences].sum())
            blocks.append(Block(name, part, sequences, rows, offset, rows * self.row_bytes(name, part)))
            offset += blocks[-1].size
        return blocks, offset

    def local_selection(self, home: int) -> Selection:
        """What a rank of this machine writes for its neighbours."""
        mine = self.sequences_of(home)
        chosen = []
        for cut in self.column_groups:
            for part, rows in _group_by_part(cut, self.members, home):
                sequences = mine[self._wanted[rows][:, mine].any(0)]
                if len(sequences):
                    chosen.append((cut, part, sequences))
        return chosen

    def needs_rows(self, reader: int, home: int) -> bool:
        """Whether a rank of this machine needs rows that a neighbour of it holds."""
        wanted = self._wanted[self.members.index(reader)] & (self.homes == home)
        return any(bool(cut.lengths[wanted].any()) for cut in self.column_groups)

    def inbox(self, receiver: int) -> tuple[list[tuple[int, int, int, list[Block]]], int]:
        """The memory in which a rank of this machine is sent rows by those of others: (home, start, bytes, blocks with
        offsets from the start) of each message, by home, and the bytes of all."""
        by_home: dict[int, list[tuple[ColumnGroup, Part, Numbers]]] = {}
        for (number, part), receivers in self._receivers.items():
            sequences = self._remote_sequences[receivers == receiver]
            homes = self.homes[sequences]
            for home in np.unique(homes):
                by_home.setdefault(int(home), []).append((self.column_groups[number], part, sequences[homes == home]))
        sections, start = [], 0
        for home, chosen in sorted(by_home.items()):
            blocks, size = self.blocks(chosen)
            sections.append((home, start, size, blocks))
            start += -(-size // _ALIGNED) * _ALIGNED
        return sections, start

    def needs_forwarded(self, reader: int, receiver: int) -> bool:
        """Whether a rank of this machine needs rows that a neighbour of it is sent."""
        wanted = self._wanted[self.members.index(reader)][self._remote_sequences]
        return any(
            part == cut.parts[reader]
            and bool(cut.lengths[self._remote_sequences[wanted & (receivers == receiver)]].any())
            for (number, part), receivers in self._receivers.items()
            for cut in [self.column_groups[number]]
        )

    def iter_sends(self) -> Iterator[tuple[int, Selection]]:
        """What this rank sends to other machines: (receiver, rows)."""
        for members in self.machines:
            if members == self.members or not len(self.local_sequences):
                continue
            wanted = self._wanted_by(members, self.local_sequences)
            if not wanted.any():
                continue
            to: dict[int, list[tuple[ColumnGroup, Part, Numbers]]] = {}
            for cut in self.column_groups:
                for part, receivers in self._assigned(cut, members, self.local_sequences, wanted):
                    for receiver in np.unique(receivers[receivers >= 0]):
                        to.setdefault(int(receiver), []).append(
                            (cut, part, self.local_sequences[receivers == receiver])
                        )
            yield from sorted(to.items())

    def _assigned(
        self, cut: ColumnGroup, members: Sequence[int], sequences: Numbers, wanted: np.ndarray[Any, np.dtype[np.bool_]]
    ) -> Iterator[tuple[Part, Numbers]]:
        """For each part that ranks of a machine need: which of them is sent each of some sequences, -1 for none.

        The sequences of one home that the same ranks want are cut into stretches of equal tokens, one for each of
        these. Where one home begins depends on the home; so the home alone can tell, and every rank of the machine.
        """
        homes = self.homes[sequences]
        for part, rows in _group_by_part(cut, members):
            able = wanted[rows]
            receivers = np.full(len(sequences), -1, np.int64)
            count = able.sum(0)
            taken = np.flatnonzero(count)
            if len(taken):
                packed = np.packbits(able[:, taken], axis=0)
                _, who = np.unique(packed, axis=1, return_inverse=True)
                order = np.lexsort((sequences[taken], homes[taken], who.ravel()))
                taken, group = taken[order], np.stack((who.ravel()[order], homes[taken][order]))
                weights = cut.lengths[sequences[taken]] + 1  # also of sequences without a token each is somebody's
                ends = np.cumsum(weights)
                first = np.flatnonzero(np.r_[True, (group[:, 1:] != group[:, :-1]).any(0)])
                sizes = np.diff(np.r_[first, len(taken)])
                before = np.repeat(np.r_[0, ends][first], sizes)
                total = np.repeat(np.add.reduceat(weights, first), sizes)
                turn = (2 * (ends - before) - weights) * count[taken] // (2 * total)
                turn = (turn + self._first_receivers[homes[taken]]) % count[taken]
                chosen = (np.cumsum(able[:, taken], axis=0) == turn + 1) & able[:, taken]
                receivers[taken] = np.asarray(members)[rows][chosen.argmax(0)]
            yield part, receivers


def _normalize_part(indices: Sequence[int] | None, size: int) -> Part:
    part = None if indices is None else tuple(map(int, indices))
    return None if part == tuple(range(size)) else part


def _group_by_part(cut: ColumnGroup, members: Sequence[int], but: int = -1) -> Iterator[tuple[Part, list[int]]]:
    """The members that need each part, as indices; without the rank `but`."""
    found: dict[Part, list[int]] = {}
    for index, member in enumerate(members):
        if member != but:
            found.setdefault(cut.parts[member], []).append(index)
    yield from found.items()
