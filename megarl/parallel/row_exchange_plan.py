"""Plan which rows move where: plain data, computed by each rank from what all ranks know.

Ranks on one machine read the same memory, so rows leave a home for a machine once. The home writes the rows that its
neighbors want into one shared memory. Each sequence that another machine needs is sent to one of the ranks there that
want it, and the others read it from that rank's memory. All ranks compute the same memory layouts, so no layout is
communicated.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import torch

RowSpec = tuple[torch.dtype, tuple[int, ...]]
"""Rows of a column: their dtype and the shape of one row."""
Part = tuple[int, ...] | None
"""Indices along dim 1 of a column that a rank needs; None for all of them."""
Numbers = np.ndarray[Any, np.dtype[np.int64]]


_ALIGNED = 64


@dataclass(frozen=True)
class Block:
    """Packed rows of one column and one part, for some sequences in ascending order, at an offset in bytes."""

    column: str
    part: Part
    sequences: Numbers
    rows: int
    offset: int
    size: int


@dataclass(frozen=True)
class ColumnGroup:
    """Columns that travel together: they have the same lengths, and each rank needs the same part of them."""

    columns: tuple[str, ...]
    lengths: Numbers
    parts: tuple[Part, ...]


Selection = Sequence[tuple[ColumnGroup, Part, Numbers]]
"""(column group, part, sequences) triples: rows that go to one destination."""


class ExchangePlan:
    """One delivery as seen by `rank`. machines: the ranks of each machine."""

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
        distinct = {id(numbers): numbers for numbers in wants}  # ranks of a pipeline often share one list
        arrays = {key: np.asarray(numbers, np.int64) for key, numbers in distinct.items()}
        self.wants = [arrays[id(numbers)] for numbers in wants]
        self.local_sequences = self.sequences_of(rank)
        self.column_groups = tuple(self._group_columns(lengths, parts, len(wants)))
        self.lengths = {name: cut.lengths for cut in self.column_groups for name in cut.columns}
        self.members = list(next(members for members in machines if rank in members))
        self._wanted = self._wanted_by(self.members, np.arange(len(self.homes)))
        self._first_receivers = np.zeros(len(wants), np.int64)  # spreads the homes over the receivers
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
        names_by_group: dict[tuple[int, tuple[Part, ...]], list[str]] = {}
        for name, (_, tail) in self.kinds.items():
            column_lengths = lengths[name] if isinstance(lengths, Mapping) else lengths
            if name in parts:
                needed = tuple(_normalize_part(indices, tail[0]) for indices in parts[name])
            else:
                needed = (None,) * world
            names_by_group.setdefault((id(column_lengths), needed), []).append(name)
        for (_, needed), names in names_by_group.items():
            column_lengths = lengths[names[0]] if isinstance(lengths, Mapping) else lengths
            yield ColumnGroup(tuple(names), column_lengths.cpu().numpy().astype(np.int64), needed)

    def _wanted_by(self, members: Sequence[int], sequences: Numbers) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """Return [members, sequences]: which member wants which sequence."""
        wanted = np.zeros((len(members), len(self.homes)), bool)
        for row, member in zip(wanted, members, strict=True):
            row[self.wants[member]] = True
        return wanted[:, sequences]

    def sequences_of(self, home: int) -> Numbers:
        """Return the sequences of a rank, ascending."""
        return np.flatnonzero(self.homes == home)

    def row_bytes(self, column: str, part: Part) -> int:
        dtype, tail = self.kinds[column]
        return dtype.itemsize * prod(tail if part is None else (len(part), *tail[1:]))

    def part(self, column: str, rank: int) -> Part:
        return next(cut.parts[rank] for cut in self.column_groups if column in cut.columns)

    def blocks(self, chosen: Selection, exclude: Iterable[str] = ()) -> tuple[list[Block], int]:
        """Return the memory layout of selected rows and its size in bytes. Larger items come first, for alignment."""
        excluded = set(exclude)
        order = [
            (name, part, sequences, cut.lengths)
            for cut, part, sequences in chosen
            for name in cut.columns
            if name not in excluded
        ]
        blocks, offset = [], 0
        for name, part, sequences, lengths in sorted(order, key=lambda block: -self.kinds[block[0]][0].itemsize):
            rows = int(lengths[sequences].sum())
            blocks.append(Block(name, part, sequences, rows, offset, rows * self.row_bytes(name, part)))
            offset += blocks[-1].size
        return blocks, offset

    def local_selection(self, home: int) -> Selection:
        """Return the rows that a rank of this machine writes for its neighbors."""
        local_sequences = self.sequences_of(home)
        selection = []
        for cut in self.column_groups:
            for part, rows in _group_by_part(cut, self.members, home):
                sequences = local_sequences[self._wanted[rows][:, local_sequences].any(0)]
                if len(sequences):
                    selection.append((cut, part, sequences))
        return selection

    def needs_rows(self, reader: int, home: int) -> bool:
        """Return whether a rank of this machine needs rows that its neighbor `home` holds."""
        wanted = self._wanted[self.members.index(reader)] & (self.homes == home)
        return any(bool(cut.lengths[wanted].any()) for cut in self.column_groups)

    def inbox(self, receiver: int) -> tuple[list[tuple[int, int, int, list[Block]]], int]:
        """Return the layout of the memory in which a rank of this machine receives rows from other machines.

        One (home, start, bytes, blocks with offsets from the start) per message, by home; and the total size in bytes.
        """
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
        """Return whether a rank of this machine needs rows that its neighbor `receiver` is sent."""
        wanted = self._wanted[self.members.index(reader)][self._remote_sequences]
        return any(
            part == cut.parts[reader]
            and bool(cut.lengths[self._remote_sequences[wanted & (receivers == receiver)]].any())
            for (number, part), receivers in self._receivers.items()
            for cut in [self.column_groups[number]]
        )

    def iter_sends(self) -> Iterator[tuple[int, Selection]]:
        """Yield what this rank sends to other machines: (receiver, rows)."""
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
        self,
        column_group: ColumnGroup,
        members: Sequence[int],
        sequences: Numbers,
        wanted: np.ndarray[Any, np.dtype[np.bool_]],
    ) -> Iterator[tuple[Part, Numbers]]:
        """Yield each part that ranks of a machine need, with the rank that is sent each sequence (-1 for none).

        The sequences of one home that the same ranks want are split into runs with equal numbers of tokens, one for
        each of these ranks. The starting rank depends on the home alone, so the home and every rank of the machine
        compute the same.
        """
        homes = self.homes[sequences]
        for part, rows in _group_by_part(column_group, members):
            candidates = wanted[rows]
            receivers = np.full(len(sequences), -1, np.int64)
            count = candidates.sum(0)
            wanted_indices = np.flatnonzero(count)
            if len(wanted_indices):
                packed = np.packbits(candidates[:, wanted_indices], axis=0)
                _, candidate_set = np.unique(packed, axis=1, return_inverse=True)
                order = np.lexsort((sequences[wanted_indices], homes[wanted_indices], candidate_set.ravel()))
                wanted_indices, group = (
                    wanted_indices[order],
                    np.stack((candidate_set.ravel()[order], homes[wanted_indices][order])),
                )
                # + 1: sequences without tokens are assigned, too
                weights = column_group.lengths[sequences[wanted_indices]] + 1
                ends = np.cumsum(weights)
                group_starts = np.flatnonzero(np.r_[True, (group[:, 1:] != group[:, :-1]).any(0)])
                sizes = np.diff(np.r_[group_starts, len(wanted_indices)])
                group_offsets = np.repeat(np.r_[0, ends][group_starts], sizes)
                total = np.repeat(np.add.reduceat(weights, group_starts), sizes)
                turn = (2 * (ends - group_offsets) - weights) * count[wanted_indices] // (2 * total)
                turn = (turn + self._first_receivers[homes[wanted_indices]]) % count[wanted_indices]
                chosen = (np.cumsum(candidates[:, wanted_indices], axis=0) == turn + 1) & candidates[:, wanted_indices]
                receivers[wanted_indices] = np.asarray(members)[rows][chosen.argmax(0)]
            yield part, receivers


def _normalize_part(indices: Sequence[int] | None, size: int) -> Part:
    part = None if indices is None else tuple(map(int, indices))
    return None if part == tuple(range(size)) else part


def _group_by_part(
    column_group: ColumnGroup, members: Sequence[int], exclude: int = -1
) -> Iterator[tuple[Part, list[int]]]:
    """Yield each needed part with the indices of the members that need it, excluding the rank `exclude`."""
    indices_by_part: dict[Part, list[int]] = {}
    for index, member in enumerate(members):
        if member != exclude:
            indices_by_part.setdefault(column_group.parts[member], []).append(index)
    yield from indices_by_part.items()
