"""A push in rounds: what each rank sends, receives and keeps in each of them.

The layers of all stages go side by side, the first of each stage in the first slot, the second in the second ... A slot
takes as many rounds as its busiest rank needs for a staging buffer of bounded size: every transfer is cut into as many
parts. Slots that fit one round together are one. In a round a rank sends and receives all at once, and the ranks go
through the rounds in the same order, so nobody can wait for somebody who waits. What came in a round is forwarded
within the node in the next one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from megarl.config import ConfigError
from megarl.models.layout_algebra import HFConfig, Param
from megarl.models.registry import family_of
from megarl.reshard.plan.assignment import MIN_PIECE, Assignment
from megarl.reshard.plan.flows import Wire
from megarl.reshard.plan.layout import EngineLayout, TrainLayout

ALIGN = 16
"""Every piece of a message begins at a multiple of this many bytes."""
_OVERHEAD = ALIGN + 8  # bytes that a piece takes at the most beside its own: alignment, and the hash that follows it

RECEIVE, SEND, LOCAL, FORWARD_RECEIVE, FORWARD_SEND = range(5)


class TensorPiece(NamedTuple):
    """A box of HF tensor number `source` of a parameter: rows and columns [start, stop); a tensor of one dimension has
    one column. `item`: bytes of an element on the wire. `scale`: the box is one of the grid of 128 x 128 scales."""

    param: Param
    source: int
    rows: tuple[int, int]
    columns: tuple[int, int]
    item_bytes: int
    is_scale: bool

    @property
    def nbytes(self) -> int:
        return (self.rows[1] - self.rows[0]) * (self.columns[1] - self.columns[0]) * self.item_bytes


class PeerMessage(NamedTuple):
    """All that goes from one rank to another in a round: pieces of the sender's own shards, then those that it received
    in the round before and forwards."""

    peer: int
    direct: tuple[TensorPiece, ...]
    forward: tuple[TensorPiece, ...]

    @property
    def pieces(self) -> tuple[TensorPiece, ...]:
        return self.direct + self.forward


class Round(NamedTuple):
    """One message at most from and to each peer, in the order of peers. local: from the rank's own shards to the engine
    process beside it."""

    sends: tuple[PeerMessage, ...]
    receives: tuple[PeerMessage, ...]
    local: tuple[TensorPiece, ...]


def compute_offsets(pieces: Sequence[TensorPiece], first: int = 0) -> tuple[list[int], int]:
    """Where each piece begins in a buffer from `first` on, and where the next thing may begin."""
    found = []
    for piece in pieces:
        found.append(first)
        first += -(-piece.nbytes // ALIGN) * ALIGN
    return found, first


@dataclass(frozen=True)
class RoundBlock:
    """`parts` rounds of these (group, layer) from round `first` on, and one more where something is forwarded. That one
    may be the first of the next slot, too."""

    num_parts: int
    rounds: int
    members: tuple[tuple[int, int | None], ...]
    first_round: int = 0


class ReshardPlan:
    """How the whole model goes from the trainer's shards to the engines'.

    bucket_bytes: each rank stages at most this much for sending and as much for receiving, half of it per round, so
    that a round's transfer overlaps its neighbours' packing and unpacking. For the rest see `Assignment`. Raises
    ConfigError, also where the buckets are too small for the model's smallest step.
    """

    def __init__(
        self,
        hf: HFConfig,
        train: TrainLayout,
        engine: EngineLayout,
        ranks_per_node: int,
        bucket_bytes: int = 1 << 30,
        wire: Wire = "bf16",
        min_piece: int = MIN_PIECE,
    ) -> None:
        self.assignment = Assignment(hf, train, engine, ranks_per_node, wire, min_piece)
        self.hf, self.train, self.engine = hf, train, engine
        self.bucket_bytes = bucket_bytes
        self.rank_map, self.world = self.assignment.rank_map, self.assignment.world
        self.round_blocks = self._build_blocks()
        self.rounds = max((slot.first_round + slot.rounds for slot in self.round_blocks), default=0)
        self.list_transfers = self.assignment.list_transfers

    def blocks_in_round(self, number: int) -> list[tuple[RoundBlock, int]]:
        """The slots of round `number`, and which of the rounds of each that is."""
        return [
            (slot, number - slot.first_round)
            for slot in self.round_blocks
            if 0 <= number - slot.first_round < slot.rounds
        ]

    def has_draft(self, number: int) -> bool:
        """Whether any rank gets something for an engine's draft model in this round."""
        members = [member for slot, _ in self.blocks_in_round(number) for member in slot.members]
        return max((layer for _, layer in members if layer is not None), default=0) >= int(self.hf["num_hidden_layers"])

    def plan_rank(self, rank: int) -> RankPlan:
        """What one rank does."""
        return RankPlan(self, rank)

    def _build_blocks(self) -> list[RoundBlock]:
        groups = self.assignment.layer_groups
        order: dict[int, list[tuple[int, int | None]]] = {}
        for number, group in enumerate(groups):
            order.setdefault(group.stage, []).extend((number, layer) for layer in group.layers)
        for members in order.values():  # what is outside of the decoder comes before its layers
            members.sort(key=lambda member: -1 if member[1] is None else member[1])
        sizes, overheads, passed = self._count_bytes()
        forwards = np.array(passed.any(axis=(0, 2)))
        capacity = self.bucket_bytes // 2
        slots: list[RoundBlock] = []
        together: list[tuple[int, int | None]] = []  # members of the slot being made, which fit one round

        def close() -> None:
            if together:
                slots.append(RoundBlock(1, 1 + int(any(forwards[group] for group, _ in together)), tuple(together)))
                together.clear()

        for number in range(max(len(members) for members in order.values())):
            present = [members[number] for _, members in sorted(order.items()) if number < len(members)]
            index = [group for group, _ in together + present]
            if (sizes[:, index] + overheads[0][:, index]).sum(axis=1).max() <= capacity:
                together += present
                continue
            close()
            index = [group for group, _ in present]
            size, (whole, cut) = sizes[:, index].sum(axis=1), overheads[:, :, index].sum(axis=2)
            if (size + whole).max() <= capacity:
                together += present
                continue
            room = capacity - cut
            if room.min() <= 0:
                raise ConfigError(
                    f"a bucket of {self.bucket_bytes} bytes (rollout.push_bucket_mb) is too small to move this model "
                    f"in rounds: at least {2 * int(cut.max()) + 2 * ALIGN} are needed"
                )
            parts = int(np.ceil(size / room).max())
            slots.append(RoundBlock(parts, parts + int(any(forwards[group] for group in index)), tuple(present)))
        close()
        return self._overlap_blocks(slots, sizes, overheads, passed)

    def _overlap_blocks(
        self, slots: list[RoundBlock], sizes: np.ndarray, overheads: np.ndarray, passed: np.ndarray
    ) -> list[RoundBlock]:
        """With the round of each slot in which is only forwarded, for which the network would lie idle, made one with
        the first of the next, where both fit it."""
        found: list[RoundBlock] = []
        first = 0
        for slot in slots:
            if found and found[-1].rounds > found[-1].num_parts:
                before, now = ([group for group, _ in one.members] for one in (found[-1], slot))
                last = passed[:, before].sum(axis=1) / found[-1].num_parts
                last += np.where(last > 0, overheads[int(found[-1].num_parts > 1)][:, before].sum(axis=1), 0)
                begin = (sizes - passed)[:, now].sum(axis=1) / slot.num_parts
                begin += overheads[int(slot.num_parts > 1)][:, now].sum(axis=1)
                first -= int((last + begin).max() <= self.bucket_bytes // 2)
            found.append(replace(slot, first_round=first))
            first += slot.rounds
        return found

    def _count_bytes(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """[2 (send; receive and local), groups, world] bytes of a layer; [2, 2, groups, world] bytes that the pieces
        take beside them at the most, whole and when cut; of the former what is forwarded."""
        plan, line = self.assignment, self.assignment.byte_index
        entries, here, world, groups = plan.entries, plan.ranks_per_node, plan.world, len(plan.layer_groups)
        first = np.searchsorted(line.start, entries.lo, side="right") - 1
        last = np.searchsorted(line.start, entries.hi, side="left")
        largest = np.array(
            [
                max((cell.unit_bytes for flow in k.cell_groups for cell in flow.cells), default=0)
                for k in plan.layer_kinds
            ]
        )
        kind = np.array([group.kind for group in plan.layer_groups])
        size = entries.hi - entries.lo
        whole = (last - first) * _OVERHEAD
        figures = np.stack([size, whole, whole + np.minimum(largest[kind[entries.layer_group]], size)]).astype(
            np.float64
        )
        flat = np.zeros((3, 2, groups * world))
        direct = np.zeros((2, groups * world))

        def add(direction: int, rank: np.ndarray, chosen: np.ndarray, times: np.ndarray | int = 1) -> None:
            place = entries.layer_group[chosen] * world + rank
            for figure in range(3):
                weight = figures[figure][chosen] * times
                flat[figure, direction] += np.bincount(place, weight, groups * world)

        everything = np.ones(len(size), dtype=bool)
        add(0, entries.src, everything)
        direct[0] = flat[0, 0]
        direct[1] = np.bincount(entries.layer_group * world + entries.dst, size, groups * world)
        node = entries.dst // here * here
        copies = np.zeros(len(size), dtype=np.int64)
        for bit in range(here):
            takes = entries.receivers >> bit & 1 == 1
            copies += takes
            add(1, (node + bit)[takes], takes)
        add(0, entries.dst, everything, copies - 1)
        total = flat.reshape(3, 2, groups, world)
        passed = total[0] - direct.reshape(2, groups, world)
        for number, group in enumerate(plan.layer_groups):
            needs, holds = plan.matrices[group.kind]
            own = plan.ranks_on_stage(group.stage)
            flows = slice(plan.first_cell_group[group.kind], plan.first_cell_group[group.kind + 1] + 1)
            sizes = np.diff(line.cell_group_start[flows])
            cells = np.diff(np.searchsorted(line.start, line.cell_group_start[flows]))
            kept = (needs[:, own] & holds).T
            total[0, 1, number, own] += kept @ sizes
            total[1, 1, number, own] += kept @ cells * _OVERHEAD
            total[2, 1, number, own] += kept @ (cells * _OVERHEAD + np.minimum(largest[group.kind], sizes))
        return total[0], total[1:], passed


class _Table(NamedTuple):
    """The pieces of one layer of a group, in the order of rounds; arrays. step: of the slot's rounds. what: RECEIVE ...
    cell: index into the line's arrays. r0, r1: rows within the cell."""

    block_round: np.ndarray
    operation: np.ndarray
    peer: np.ndarray
    cell: np.ndarray
    r0: np.ndarray
    r1: np.ndarray


class RankPlan:
    """What one rank does, round by round. The tables are made at once, the rounds' objects as they are asked for."""

    def __init__(self, plan: ReshardPlan, rank: int) -> None:
        self.plan, self.rank = plan, rank
        self.rounds = plan.rounds
        operations = self._operations()
        self.tables: dict[tuple[int, int], _Table] = {}
        for slot in plan.round_blocks:
            for group, _ in slot.members:
                if (group, slot.num_parts) not in self.tables:
                    self.tables[group, slot.num_parts] = self._table(
                        operations[:, operations[0] == group], slot.num_parts
                    )

    def _operations(self) -> np.ndarray:
        """[6, N]: group, what, peer, order, lo, hi."""
        plan, rank = self.plan.assignment, self.rank
        entries, here = plan.entries, plan.ranks_per_node
        node, bit = rank // here, rank % here
        found = []

        def add(what: int, peer: np.ndarray, chosen: np.ndarray) -> None:
            number = np.nonzero(chosen)[0]
            kind = np.full(len(number), what)
            found.append(
                np.stack([entries.layer_group[number], kind, peer, number, entries.lo[number], entries.hi[number]])
            )

        mine = entries.dst == rank
        add(RECEIVE, entries.src[mine], mine)
        sent = entries.src == rank
        add(SEND, entries.dst[sent], sent)
        beside = (entries.dst // here == node) & ~mine & (entries.receivers >> bit & 1 == 1)
        add(FORWARD_RECEIVE, entries.dst[beside], beside)
        for other in range(here):
            if other != bit:
                takes = mine & (entries.receivers >> other & 1 == 1)
                add(FORWARD_SEND, np.full(int(takes.sum()), node * here + other), takes)
        own = plan.train.trainer_rank(rank)
        stage, within = divmod(own, plan.train.stage_ranks) if own is not None else (-1, 0)
        for number, group in enumerate(plan.layer_groups):
            if stage == group.stage:
                needs, holds = plan.matrices[group.kind]
                kept = np.nonzero(needs[:, rank] & holds[:, within])[0] + plan.first_cell_group[group.kind]
                columns = [np.full(len(kept), value) for value in (number, LOCAL, rank)]
                starts = plan.byte_index.cell_group_start
                found.append(np.stack([*columns, kept, starts[kept], starts[kept + 1]]))
        return np.concatenate(found, axis=1)

    def _table(self, operations: np.ndarray, parts: int) -> _Table:
        line = self.plan.assignment.byte_index
        _, what, peer, order, lo, hi = np.repeat(operations, parts, axis=1)
        part = np.tile(np.arange(parts), operations.shape[1])
        size = hi - lo
        begin = np.where(part == 0, lo, np.maximum(line.snap_to_cut(lo + size * part // parts), lo))
        end = np.where(part == parts - 1, hi, np.maximum(line.snap_to_cut(lo + size * (part + 1) // parts), lo))
        first = np.searchsorted(line.start, begin, side="right") - 1
        last = np.searchsorted(line.start, end, side="left")
        count = np.where(end > begin, last - first, 0)
        index = np.repeat(np.arange(len(count)), count)
        cell = first[index] + np.arange(len(index)) - np.repeat(np.cumsum(count) - count, count)
        width = self._row_bytes[cell]
        r0 = (np.maximum(begin[index], line.start[cell]) - line.start[cell]) // width
        r1 = (np.minimum(end[index], line.start[cell + 1]) - line.start[cell]) // width
        step = part + (what >= FORWARD_RECEIVE)
        sort = np.lexsort((r0, cell, order[index], peer[index], what[index], step[index]))
        columns = (step[index], what[index], peer[index], cell, r0, r1)
        return _Table(*(column[sort] for column in columns))

    @cached_property
    def _row_bytes(self) -> np.ndarray:
        """Bytes of a row of each cell of the line."""
        line = self.plan.assignment.byte_index
        return np.array([(c.c1 - c.c0) * c.item_bytes for c in line.cells], dtype=np.int64)[line.cell]

    def round(self, number: int) -> Round:
        """Round `number` of the plan's."""
        messages: dict[tuple[bool, int], tuple[list[TensorPiece], list[TensorPiece]]] = {}
        local: list[TensorPiece] = []
        slots = self.plan.blocks_in_round(number)
        for group, layer, parts, step in (
            (*member, slot.num_parts, step) for slot, step in slots for member in slot.members
        ):
            table = self.tables[group, parts]
            rows = slice(*np.searchsorted(table.block_round, [step, step + 1]))
            if rows.start == rows.stop:
                continue
            pieces = self._pieces(group, layer, table, rows)
            for what, peer, piece in zip(
                table.operation[rows].tolist(), table.peer[rows].tolist(), pieces, strict=True
            ):
                if what == LOCAL:
                    local.append(piece)
                else:
                    direct, forward = messages.setdefault((what in (SEND, FORWARD_SEND), peer), ([], []))
                    (direct if what in (SEND, RECEIVE) else forward).append(piece)
        made = [(sends, PeerMessage(peer, tuple(d), tuple(f))) for (sends, peer), (d, f) in sorted(messages.items())]
        sends = tuple(message for is_send, message in made if is_send)
        return Round(sends, tuple(message for is_send, message in made if not is_send), tuple(local))

    def _pieces(self, group: int, layer: int | None, table: _Table, rows: slice) -> list[TensorPiece]:
        plan = self.plan.assignment
        line, kind = plan.byte_index, plan.layer_kinds[plan.layer_groups[group].kind]
        numbers = table.cell[rows]
        experts = line.expert[numbers]
        wanted = sorted(set(experts.tolist()) - {-1})
        params = kind.params if layer is None else family_of(plan.hf).layer(plan.hf, layer, wanted)
        dense = [param for param in params if param.expert is None]
        routed = {expert: [param for param in params if param.expert == expert] for expert in wanted}
        seen = [0, 0]  # how many of the kind's parameters were not, and were, of the template's expert
        place = []
        for param in kind.params:
            place.append(seen[param.expert is not None])
            seen[param.expert is not None] += 1
        found = []
        for number, expert, r0, r1 in zip(
            line.cell[numbers].tolist(), experts.tolist(), table.r0[rows].tolist(), table.r1[rows].tolist(), strict=True
        ):
            cell = line.cells[number]
            param = (dense if expert < 0 else routed[expert])[place[cell.param]]
            found.append(
                TensorPiece(param, cell.source, (cell.r0 + r0, cell.r0 + r1), (cell.c0, cell.c1), cell.item, cell.scale)
            )
        return found
