"""A weight sync in rounds: what each rank sends, receives and forwards in each of them.

The layers of all stages proceed side by side, in blocks that take as many rounds as the bounded staging buffer of their
busiest rank needs. All ranks go through the same rounds, each exchanging everything at once, so nothing deadlocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from megarl.config import ConfigError
from megarl.models.layout_algebra import HFConfig, Param
from megarl.reshard.plan.assignment import MIN_PIECE, Assignment, set_bits
from megarl.reshard.plan.cells import LayerTable
from megarl.reshard.plan.layout import EngineLayout, TrainLayout, Wire

ALIGN = 16
"""Every piece of a message starts at a multiple of this many bytes."""


def align(nbytes: Any) -> Any:
    """Round a number of bytes, or an array of them, up to a multiple of `ALIGN`."""
    return -(-nbytes // ALIGN) * ALIGN


_OVERHEAD = ALIGN + 8  # maximum extra bytes per piece: alignment and hash

RECEIVE, SEND, LOCAL, FORWARD_RECEIVE, FORWARD_SEND = range(5)


class TensorPiece(NamedTuple):
    """A box of HF tensor number `source` of a parameter: rows and columns [start, stop). A one-dimensional tensor has
    one column.

    item_bytes: bytes of an element on the wire. is_scale: the box is one of the scales. Rows and columns are counted in
    elements of the `layout.Plane`: a byte with two codes of INT4, a scale, or else an element.
    """

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
    """Everything that one rank sends another in a round: pieces of the sender's shards, then pieces that it received
    in the previous round and forwards."""

    peer: int
    direct: tuple[TensorPiece, ...]
    forward: tuple[TensorPiece, ...]

    @property
    def pieces(self) -> tuple[TensorPiece, ...]:
        return self.direct + self.forward


class Round(NamedTuple):
    """At most one message from and to each peer, in peer order. local: pieces from the rank's own shards to the
    engine process of the same rank."""

    sends: tuple[PeerMessage, ...]
    receives: tuple[PeerMessage, ...]
    local: tuple[TensorPiece, ...]


@dataclass(frozen=True)
class RoundBlock:
    """The rounds of some (group, layer) members.

    They take `num_parts` rounds from `first_round` on, and one more if anything is forwarded; `rounds` is the total.
    The extra round may overlap the first one of the next block.
    """

    num_parts: int
    rounds: int
    members: tuple[tuple[int, int | None], ...]
    first_round: int = 0


class ReshardPlan:
    """Plan to move the whole model from the trainer's shards to the engines'.

    bucket_bytes: each rank stages at most this much for sending and as much for receiving, half of it per round, so
    that a round's transfer overlaps packing and unpacking of its neighbours. For the other arguments see `Assignment`.
    Raises ConfigError as `Assignment` does, and if the buckets are too small to divide the model into rounds.
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
        table: LayerTable | None = None,
    ) -> None:
        self.assignment = Assignment(hf, train, engine, ranks_per_node, wire, min_piece, table)
        self.hf, self.train, self.engine, self.table = hf, train, engine, self.assignment.table
        self.bucket_bytes = bucket_bytes
        self.rank_map, self.world = self.assignment.rank_map, self.assignment.world
        self.round_blocks = self._build_blocks()
        self.rounds = max((block.first_round + block.rounds for block in self.round_blocks), default=0)
        self.list_transfers = self.assignment.list_transfers

    def blocks_in_round(self, number: int) -> list[tuple[RoundBlock, int]]:
        """Return the blocks of round `number`, each with the index of the round within the block."""
        return [
            (block, number - block.first_round)
            for block in self.round_blocks
            if 0 <= number - block.first_round < block.rounds
        ]

    def has_draft(self, number: int) -> bool:
        """Return whether any rank receives something for an engine's draft model in this round."""
        members = [member for block, _ in self.blocks_in_round(number) for member in block.members]
        return max((layer for _, layer in members if layer is not None), default=0) >= int(self.hf["num_hidden_layers"])

    def _build_blocks(self) -> list[RoundBlock]:
        groups = self.assignment.layer_groups
        members_by_stage: dict[int, list[tuple[int, int | None]]] = {}
        for number, group in enumerate(groups):
            members_by_stage.setdefault(group.stage, []).extend((number, layer) for layer in group.layers)
        for members in members_by_stage.values():  # parameters outside of the decoder come before its layers
            members.sort(key=lambda member: -1 if member[1] is None else member[1])
        sizes, overheads, forwarded = self._count_bytes()
        capacity = self.bucket_bytes // 2

        def fits_round(members: list[tuple[int, int | None]]) -> bool:
            index = [group for group, _ in members]
            return bool((sizes[:, index] + overheads[0][:, index]).sum(axis=1).max() <= capacity)

        steps: list[tuple[int, list[tuple[int, int | None]]]] = []  # number of parts, and members that move together
        for number in range(max(len(members) for members in members_by_stage.values())):
            present = [members[number] for _, members in sorted(members_by_stage.items()) if number < len(members)]
            if steps and steps[-1][0] == 1 and fits_round(steps[-1][1] + present):
                steps[-1][1].extend(present)
            elif fits_round(present):
                steps.append((1, present))
            else:
                index = [group for group, _ in present]
                cut = overheads[1][:, index].sum(axis=1)
                if cut.max() >= capacity:
                    raise ConfigError(
                        f"a bucket of {self.bucket_bytes} bytes (rollout.weight_sync_bucket_mb) is too small to move "
                        f"this model in rounds: at least {2 * int(cut.max()) + 2 * ALIGN} are needed"
                    )
                steps.append((int(np.ceil(sizes[:, index].sum(axis=1) / (capacity - cut)).max()), present))

        blocks: list[RoundBlock] = []
        first = 0
        for parts, members in steps:
            index = [group for group, _ in members]
            if blocks and blocks[-1].rounds > blocks[-1].num_parts:
                # Overlap the forward-only round of the previous block with the first one of this, if both fit into one.
                previous = [group for group, _ in blocks[-1].members]
                forward_bytes = forwarded[:, previous].sum(axis=1) / blocks[-1].num_parts
                overhead = overheads[int(blocks[-1].num_parts > 1)][:, previous].sum(axis=1)
                forward_bytes += np.where(forward_bytes > 0, overhead, 0)
                first_bytes = (sizes - forwarded)[:, index].sum(axis=1) / parts
                first_bytes += overheads[int(parts > 1)][:, index].sum(axis=1)
                first -= int((forward_bytes + first_bytes).max() <= capacity)
            rounds = parts + int(forwarded[:, index].any())
            blocks.append(RoundBlock(parts, rounds, tuple(members), first))
            first += rounds
        return blocks

    def _count_bytes(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return bytes per layer, by direction (send; receive and local), layer group and rank.

        First [2, groups, world] bytes of the pieces; then [2, 2, groups, world] the maximum extra bytes of the pieces,
        whole and when cut; then, of the first, the bytes that are forwarded.
        """
        plan, byte_index = self.assignment, self.assignment.byte_index
        entries, ranks_per_node, world, groups = plan.entries, plan.ranks_per_node, plan.world, len(plan.layer_groups)
        first = np.searchsorted(byte_index.start, entries.lo, side="right") - 1
        last = np.searchsorted(byte_index.start, entries.hi, side="left")
        unit_bytes = [
            [cell.unit_bytes for group in kind.cell_groups for cell in group.cells] for kind in plan.layer_kinds
        ]
        largest = np.array([max(values, default=0) for values in unit_bytes])
        kind = np.array([group.kind for group in plan.layer_groups])
        size = entries.hi - entries.lo
        whole = (last - first) * _OVERHEAD
        cut = whole + np.minimum(largest[kind[entries.layer_group]], size)
        quantities = np.stack([size, whole, cut])

        def add_up(rank: np.ndarray, group: np.ndarray, weights: np.ndarray) -> np.ndarray:
            sums = [np.bincount(group * world + rank, weight, groups * world) for weight in weights]
            return np.stack(sums).reshape(len(sums), groups, world)

        bit, entry = set_bits(entries.receivers, ranks_per_node)
        receiver = entries.dst[entry] // ranks_per_node * ranks_per_node + bit
        sent = add_up(entries.src, entries.layer_group, quantities)
        received = add_up(receiver, entries.layer_group[entry], quantities[:, entry])
        num_forwards = np.bincount(entry, minlength=len(size)) - 1
        forwards = add_up(entries.dst, entries.layer_group, quantities * num_forwards)
        entering = add_up(entries.dst, entries.layer_group, quantities[:1])
        forwarded = np.stack([forwards[0], received[0] - entering[0]])
        total = np.stack([sent + forwards, received], axis=1)
        for number, group in enumerate(plan.layer_groups):
            needs, holds = plan.matrices[group.kind]
            stage_ranks = plan.ranks_on_stage(group.stage)
            cell_groups = slice(plan.first_cell_group[group.kind], plan.first_cell_group[group.kind + 1] + 1)
            starts = byte_index.cell_group_start[cell_groups]
            sizes, whole = np.diff(starts), np.diff(np.searchsorted(byte_index.start, starts)) * _OVERHEAD
            stays_local = (needs[:, stage_ranks] & holds).T
            for quantity, value in enumerate((sizes, whole, whole + np.minimum(largest[group.kind], sizes))):
                total[quantity, 1, number, stage_ranks] += stays_local @ value
        return total[0], total[1:], forwarded


class _Table(NamedTuple):
    """The pieces of one layer of a group, in round order; arrays.

    block_round: round within the block. operation: RECEIVE, SEND, ... cell: index into the byte index's arrays. r0, r1:
    rows within the cell.
    """

    block_round: np.ndarray
    operation: np.ndarray
    peer: np.ndarray
    cell: np.ndarray
    r0: np.ndarray
    r1: np.ndarray


class RankPlan:
    """One rank's part of the plan, round by round. The tables are built at once, the `Round` objects on demand."""

    def __init__(self, plan: ReshardPlan, rank: int) -> None:
        self.plan, self.rank = plan, rank
        operations = self._operations()
        self.tables: dict[tuple[int, int], _Table] = {}
        for block in plan.round_blocks:
            for group, _ in block.members:
                if (key := (group, block.num_parts)) not in self.tables:
                    self.tables[key] = self._table(operations[:, operations[0] == group], block.num_parts)

    def _operations(self) -> np.ndarray:
        """Return [6, N]: group, operation, peer, order, lo, hi."""
        plan, rank = self.plan.assignment, self.rank
        entries, ranks_per_node = plan.entries, plan.ranks_per_node
        node, bit = rank // ranks_per_node, rank % ranks_per_node
        operations = []

        is_received = entries.dst == rank
        in_node = (entries.dst // ranks_per_node == node) & (entries.receivers >> bit & 1 == 1)
        received, sent = np.flatnonzero(is_received), np.flatnonzero(entries.src == rank)
        forwarded_to_rank = np.flatnonzero(in_node & ~is_received)
        other_bit, forward = set_bits(entries.receivers[received] & ~(1 << bit), ranks_per_node)
        for operation, peer, chosen in (
            (RECEIVE, entries.src[received], received),
            (SEND, entries.dst[sent], sent),
            (FORWARD_RECEIVE, entries.dst[forwarded_to_rank], forwarded_to_rank),
            (FORWARD_SEND, node * ranks_per_node + other_bit, received[forward]),
        ):
            kind = np.full(len(chosen), operation)
            columns = entries.layer_group[chosen], kind, peer, chosen, entries.lo[chosen], entries.hi[chosen]
            operations.append(np.stack(columns))
        trainer_rank = plan.train.trainer_rank(rank)
        stage, stage_position = divmod(trainer_rank, plan.train.stage_ranks) if trainer_rank is not None else (-1, 0)
        for number, group in enumerate(plan.layer_groups):
            if stage == group.stage:
                needs, holds = plan.matrices[group.kind]
                stays_local = np.nonzero(needs[:, rank] & holds[:, stage_position])[0]
                local_groups = stays_local + plan.first_cell_group[group.kind]
                constants = [np.full(len(local_groups), value) for value in (number, LOCAL, rank)]
                starts = plan.byte_index.cell_group_start
                operations.append(np.stack([*constants, local_groups, starts[local_groups], starts[local_groups + 1]]))
        return np.concatenate(operations, axis=1)

    def _table(self, operations: np.ndarray, parts: int) -> _Table:
        byte_index = self.plan.assignment.byte_index
        _, operation, peer, order, lo, hi = np.repeat(operations, parts, axis=1)
        part = np.tile(np.arange(parts), operations.shape[1])
        size = hi - lo
        begin = np.where(part == 0, lo, np.maximum(byte_index.snap_to_cut(lo + size * part // parts), lo))
        end = np.where(part == parts - 1, hi, np.maximum(byte_index.snap_to_cut(lo + size * (part + 1) // parts), lo))
        first = np.searchsorted(byte_index.start, begin, side="right") - 1
        last = np.searchsorted(byte_index.start, end, side="left")
        count = np.where(end > begin, last - first, 0)
        index = np.repeat(np.arange(len(count)), count)
        cell = first[index] + np.arange(len(index)) - np.repeat(np.cumsum(count) - count, count)
        row_bytes = byte_index.row_bytes[cell]
        r0 = (np.maximum(begin[index], byte_index.start[cell]) - byte_index.start[cell]) // row_bytes
        r1 = (np.minimum(end[index], byte_index.start[cell + 1]) - byte_index.start[cell]) // row_bytes
        block_round = part + (operation >= FORWARD_RECEIVE)
        sort = np.lexsort((r0, cell, order[index], peer[index], operation[index], block_round[index]))
        columns = (block_round[index], operation[index], peer[index], cell, r0, r1)
        return _Table(*(column[sort] for column in columns))

    def round(self, number: int) -> Round:
        """Build round `number` of the plan."""
        messages: dict[tuple[bool, int], tuple[list[TensorPiece], list[TensorPiece]]] = {}
        local: list[TensorPiece] = []
        members = [(*m, block.num_parts, i) for block, i in self.plan.blocks_in_round(number) for m in block.members]
        for group, layer, parts, block_round in members:
            table = self.tables[group, parts]
            rows = slice(*np.searchsorted(table.block_round, [block_round, block_round + 1]))
            if rows.start == rows.stop:
                continue
            pieces = self._pieces(group, layer, table, rows)
            operations, peers = table.operation[rows].tolist(), table.peer[rows].tolist()
            for operation, peer, piece in zip(operations, peers, pieces, strict=True):
                if operation == LOCAL:
                    local.append(piece)
                else:
                    direct, forward = messages.setdefault((operation in (SEND, FORWARD_SEND), peer), ([], []))
                    (direct if operation in (SEND, RECEIVE) else forward).append(piece)
        sends: dict[bool, list[PeerMessage]] = {True: [], False: []}
        for (is_send, peer), (direct, forward) in sorted(messages.items()):
            sends[is_send].append(PeerMessage(peer, tuple(direct), tuple(forward)))
        return Round(tuple(sends[True]), tuple(sends[False]), tuple(local))

    def _pieces(self, group: int, layer: int | None, table: _Table, rows: slice) -> list[TensorPiece]:
        plan = self.plan.assignment
        byte_index, kind = plan.byte_index, plan.layer_kinds[plan.layer_groups[group].kind]
        numbers = table.cell[rows]
        experts = byte_index.expert[numbers]
        expert_ids = sorted(set(experts.tolist()) - {-1}) or [0]
        params = kind.params if layer is None else self.plan.table.engine_layer(plan.hf, layer, expert_ids)
        params_of = {expert: [param for param in params if param.expert in (None, expert)] for expert in expert_ids}
        params_of[-1] = params_of[expert_ids[0]]  # like kind.params, with another expert
        pieces = []
        columns = (byte_index.cell[numbers], experts, table.r0[rows], table.r1[rows])
        for number, expert, r0, r1 in zip(*(column.tolist() for column in columns), strict=True):
            cell = byte_index.cells[number]
            param = params_of[expert][cell.param]
            row_range, column_range = (cell.r0 + r0, cell.r0 + r1), (cell.c0, cell.c1)
            pieces.append(TensorPiece(param, cell.source, row_range, column_range, cell.item_bytes, cell.is_scale))
        return pieces
