"""Plan which rows move where: plain data, computed by each rank from what all ranks know.

The home of a row writes it into one shared memory for all its neighbors, and sends it to one of the ranks of each other
machine that want it. All ranks compute the same memory layouts, so no layout is communicated.
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
Flags = np.ndarray[Any, np.dtype[np.bool_]]

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
        self.column_groups = self._group_columns(
            lengths if isinstance(lengths, Mapping) else dict.fromkeys(kinds, lengths), parts
        )
        self.lengths = {name: group.lengths for group in self.column_groups for name in group.columns}
        self.members = list(next(members for members in machines if rank in members))
        self._wanted = self._wanted_by(self.members)
        self._first_receivers = np.zeros(len(wants), np.int64)  # spreads the homes over the receivers
        self._first_receivers[np.unique(self.homes)] = np.arange(len(np.unique(self.homes)))
        self._remote_sequences = np.flatnonzero(~np.isin(self.homes, self.members) & self._wanted.any(0))
        self._receivers = {
            (number, part): receivers
            for number, group in enumerate(self.column_groups)
            for part, receivers in self._assign_receivers(
                group, self.members, self._remote_sequences, self._wanted[:, self._remote_sequences]
            )
        }

    def _group_columns(
        self, lengths: Mapping[str, torch.Tensor], parts: Mapping[str, Sequence[Sequence[int] | None]]
    ) -> list[ColumnGroup]:
        names_by_group: dict[tuple[int, tuple[Part, ...]], list[str]] = {}
        for name, (_, tail) in self.kinds.items():
            needed = tuple(_normalize_part(indices, tail) for indices in parts.get(name, [None] * len(self.wants)))
            names_by_group.setdefault((id(lengths[name]), needed), []).append(name)
        return [
            ColumnGroup(tuple(names), lengths[names[0]].cpu().numpy().astype(np.int64), needed)
            for (_, needed), names in names_by_group.items()
        ]

    def _wanted_by(self, members: Sequence[int]) -> Flags:
        """Return [members, sequences]: which member wants which sequence."""
        wanted = np.zeros((len(members), len(self.homes)), bool)
        for row, member in zip(wanted, members, strict=True):
            row[self.wants[member]] = True
        return wanted

    def sequences_of(self, home: int) -> Numbers:
        """Return the sequences of a rank, ascending."""
        return np.flatnonzero(self.homes == home)

    def row_bytes(self, column: str, part: Part) -> int:
        dtype, tail = self.kinds[column]
        return dtype.itemsize * prod(tail if part is None else (len(part), *tail[1:]))

    def part(self, column: str, rank: int) -> Part:
        return next(group.parts[rank] for group in self.column_groups if column in group.columns)

    def blocks(self, chosen: Selection, exclude: Iterable[str] = ()) -> tuple[list[Block], int]:
        """Return the memory layout of selected rows and its size in bytes. Larger items come first, for alignment."""
        excluded = set(exclude)
        order = [
            (name, part, sequences)
            for group, part, sequences in chosen
            for name in group.columns
            if name not in excluded
        ]
        blocks, offset = [], 0
        for name, part, sequences in sorted(order, key=lambda block: -self.kinds[block[0]][0].itemsize):
            rows = int(self.lengths[name][sequences].sum())
            blocks.append(Block(name, part, sequences, rows, offset, rows * self.row_bytes(name, part)))
            offset += blocks[-1].size
        return blocks, offset

    def local_selection(self, home: int) -> Selection:
        """Return the rows that a rank of this machine writes for its neighbors."""
        local_sequences = self.sequences_of(home)
        selection = []
        for group in self.column_groups:
            for part, rows in _group_by_part(group, self.members, home):
                sequences = local_sequences[self._wanted[rows][:, local_sequences].any(0)]
                if len(sequences):
                    selection.append((group, part, sequences))
        return selection

    def needs_rows(self, reader: int, home: int) -> bool:
        """Return whether a rank of this machine needs rows that its neighbor `home` holds."""
        wanted = self._wanted[self.members.index(reader)] & (self.homes == home)
        return any(bool(group.lengths[wanted].any()) for group in self.column_groups)

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
        for (number, part), receivers in self._receivers.items():
            group, sequences = self.column_groups[number], self._remote_sequences[wanted & (receivers == receiver)]
            if part == group.parts[reader] and group.lengths[sequences].any():
                return True
        return False

    def iter_sends(self) -> Iterator[tuple[int, Selection]]:
        """Yield what this rank sends to other machines: (receiver, rows)."""
        for members in self.machines:
            if members == self.members or not len(self.local_sequences):
                continue
            wanted = self._wanted_by(members)[:, self.local_sequences]
            if not wanted.any():
                continue
            by_receiver: dict[int, list[tuple[ColumnGroup, Part, Numbers]]] = {}
            for group in self.column_groups:
                for part, receivers in self._assign_receivers(group, members, self.local_sequences, wanted):
                    for receiver in np.unique(receivers[receivers >= 0]).tolist():
                        sequences = self.local_sequences[receivers == receiver]
                        by_receiver.setdefault(receiver, []).append((group, part, sequences))
            yield from sorted(by_receiver.items())

    def _assign_receivers(
        self, column_group: ColumnGroup, members: Sequence[int], sequences: Numbers, wanted: Flags
    ) -> Iterator[tuple[Part, Numbers]]:
        """Yield each part that ranks of a machine need, with the rank that is sent each sequence (-1 for none).

        The sequences of one home that the same ranks want are split into runs with equal numbers of tokens, one for
        each of these ranks. The home and every rank of the machine compute the same.
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
                wanted_indices = wanted_indices[order]
                group = np.stack((candidate_set.ravel()[order], homes[wanted_indices]))
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


def _normalize_part(indices: Sequence[int] | None, tail: tuple[int, ...]) -> Part:
    return None if indices is None or list(indices) == list(range(tail[0])) else tuple(map(int, indices))


def _group_by_part(column_group: ColumnGroup, members: Sequence[int], exclude: int = -1) -> Iterable[Any]:
    """Return each needed part with the indices of the members that need it, excluding the rank `exclude`."""
    indices_by_part: dict[Part, list[int]] = {}
    for index, member in enumerate(members):
        if member != exclude:
            indices_by_part.setdefault(column_group.parts[member], []).append(index)
    return indices_by_part.items()
