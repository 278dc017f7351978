"""Execute a plan for all ranks in one process, with element numbers as values.

Only the plan comes from the planner: shards and the expected engine tensors are built here from the layouts, and the
received tensors are compared with them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np

from megarl.models import blocks, int4
from megarl.models.fp8 import is_quantised
from megarl.models.layout_algebra import PADDING, HFConfig, Param, Sharding, split_with
from megarl.models.registry import family_of
from megarl.reshard.plan.layout import EngineLayout, ShardSlice, TrainLayout
from megarl.reshard.plan.planner import ALIGN, PeerMessage, RankPlan, ReshardPlan, Round, TensorPiece

UNWRITTEN = -1  # padding, or not written yet
FP8_GRIDS = {True: (128, 128)}
INT4_GRIDS = {False: (1, 2), True: (1, 32)}
"""Rows and columns of a matrix that an element of its scales (True) or of its packed values (False) stands for."""

Key = tuple[str, int, tuple[int, int], tuple[int, int], bool]


class Result(NamedTuple):
    """Unaligned weight bytes by (sender, receiver), and the largest used fraction of half a bucket."""

    bytes: Counter[tuple[int, int]]
    fullest: float


class Model:
    """Tensors whose values are element numbers; scales, and packed values, are numbered after the weights."""

    def __init__(self, hf: HFConfig, train: TrainLayout, engine: EngineLayout, wire: str) -> None:
        family = family_of(hf)
        self.train, self.engine, self.wire = train, engine, wire
        self.train_ranks = train.ranks or tuple(range(train.world))
        self.experts = family.num_experts(hf)
        count = int(hf["num_hidden_layers"]) + family.num_mtp_layers(hf)
        rows = [row for layer in range(count) for row in family.layer(hf, layer, range(self.experts))]
        self.params = {row.megatron: row for row in blocks.embedding(hf) + rows + blocks.final_params(hf)}
        self.full: dict[str, np.ndarray] = {}
        self.grid: dict[tuple[str, bool], np.ndarray] = {}
        number = 0
        for param in self.params.values():
            for name, shape in param.hf:
                matrix = (shape + (1,))[:2]
                self.full[name] = number + np.arange(prod(shape)).reshape(matrix)
                number += prod(shape)
        for param in self.params.values():
            for name, _ in param.hf:
                for is_scale, units in self.grids_of(param).items():
                    shape = tuple(-(-n // unit) for n, unit in zip(self.full[name].shape, units, strict=True))
                    self.grid[name, is_scale] = number + np.arange(prod(shape)).reshape(shape)
                    number += prod(shape)
        self.shards: dict[tuple[str, int], np.ndarray] = {}
        self.pack_cache: dict[tuple[int, Key], np.ndarray] = {}
        self.unpack_cache: dict[tuple[int, Key], list[tuple[str, tuple[Any, ...], tuple[slice, slice]]]] = {}

    def grids_of(self, param: Param) -> dict[bool, tuple[int, int]]:
        """Return the units of the grids that are sent of a parameter, by whether they are its scales."""
        if self.wire == "int4" and int4.is_quantised(param):
            return INT4_GRIDS
        return FP8_GRIDS if self.wire == "fp8" and is_quantised(param) else {}

    def make_shard(self, param: Param, cut: Sharding, size: int, part: int) -> np.ndarray:
        """Return the shard that a sharding makes of the full tensors, by gather and slice."""
        dim, slices = split_with(param, cut, size, part)
        result = []
        for source, start, stop in slices:
            if source == PADDING:
                shape = list(self.full[param.hf[0].name].shape)
                shape[dim] = stop - start
                result.append(np.full(shape, UNWRITTEN))
            else:
                result.append(self.full[param.hf[source].name].take(range(start, stop), axis=dim))
        return np.concatenate(result, axis=dim)

    def pack(self, rank: int, piece: TensorPiece) -> np.ndarray:
        """Return a piece of a rank's shard."""
        assert rank in self.train_ranks, f"rank {rank} sends and does not train"
        rank = self.train_ranks.index(rank)
        part = self.train.shard_index(rank, piece.param.expert is not None)
        assert self.train.has_param(rank, piece.param, self.experts), f"rank {rank} sends what it has not: {piece}"
        key = part, key_of(piece)
        if key not in self.pack_cache:
            shard_slices = [h for h in self.train.slices_of_rank(rank, piece.param) if h.source == piece.source]
            units = self.grids_of(piece.param).get(piece.is_scale)
            self.pack_cache[key] = (
                self._weights(part, shard_slices, piece) if units is None else self._cells(shard_slices, piece, units)
            )
        return self.pack_cache[key]

    def _weights(self, part: int, shard_slices: Sequence[ShardSlice], piece: TensorPiece) -> np.ndarray:
        name = piece.param.megatron
        if (name, part) not in self.shards:
            size = self.train.num_shards(piece.param.expert is not None)
            self.shards[name, part] = self.make_shard(piece.param, piece.param.sharding, size, part)
        common = [(h, both) for h in shard_slices if (both := overlap(h.start, h.stop, h.dim, piece))]
        assert len(common) == 1, f"a piece in {len(common)} intervals of part {part}: {piece}"
        (h, both), *_ = common
        # The shard has the other dimension in full; along this one, the interval starts at its offset.
        result = self.shards[name, part][both.shifted(h.offset - h.start)]
        assert result.shape == tuple(stop - start for start, stop in box(piece)), f"part {part} has not all of {piece}"
        return result

    def _cells(self, shard_slices: Sequence[ShardSlice], piece: TensorPiece, units: tuple[int, int]) -> np.ndarray:
        """Return a piece of a grid; a rank knows the cell of every block that it has a part of."""
        result = np.full([stop - start for start, stop in box(piece)], UNWRITTEN)
        grid = self.grid[piece.param.hf[piece.source].name, piece.is_scale]
        for h in shard_slices:
            unit = units[h.dim]
            assert self.wire == "fp8" or h.start % 32 == h.stop % 32 == 0 or h.dim == 0
            if common := overlap(h.start // unit, -(-h.stop // unit), h.dim, piece):
                result[common.source_box] = grid[common.shifted(0)]
        assert (result != UNWRITTEN).all(), f"no block of some scales: {piece}"
        return result

    def unpack(self, position: int, tensors: dict[str, np.ndarray], piece: TensorPiece, values: np.ndarray) -> None:
        """Write a piece into an engine rank's tensors; each element must be needed and written once."""
        key = position, key_of(piece)
        if key not in self.unpack_cache:
            self.unpack_cache[key] = self._find_targets(position, piece)
        written = 0
        for name, target, source_box in self.unpack_cache[key]:
            assert (tensors[name][target] == UNWRITTEN).all(), f"{name} is written twice by {piece}"
            tensors[name][target] = values[source_box]
            written += values[source_box].size
        copies = len(self.engine.expert_indices(position, piece.param, self.experts))
        assert len(self.unpack_cache[key]) == copies or piece.is_scale, f"a piece in several intervals: {piece}"
        assert written == copies * values.size > 0, f"engine rank {position} does not need all of {piece}"

    def _find_targets(
        self, position: int, piece: TensorPiece
    ) -> list[tuple[str, tuple[Any, ...], tuple[slice, slice]]]:
        engine_slot = self.engine.slot_of(piece.param)
        assert engine_slot is not None
        units = self.grids_of(piece.param).get(piece.is_scale, (1, 1))
        result = []
        for h in self.engine.slices_of_rank(position, piece.param):
            unit = units[h.dim]
            assert h.offset % unit == 0 and h.start % unit == 0
            if h.source != piece.source:
                continue
            if common := overlap(h.start // unit, -(-h.stop // unit), h.dim, piece):
                target = common.shifted(h.offset // unit - h.start // unit)
                for index in self.engine.expert_indices(position, piece.param, self.experts):
                    name = engine_slot.name + (".scale" if piece.is_scale else "")
                    result.append((name, (index, *target), common.source_box))
        return result

    def engine_tensors(self, position: int) -> dict[str, np.ndarray]:
        """Return the expected tensors of an engine rank; their first dimension stacks experts, or is 1."""
        parts: dict[str, list[tuple[int, int, int, np.ndarray]]] = {}
        for param in self.params.values():
            engine_slot = self.engine.slot_of(param)
            indices = self.engine.expert_indices(position, param, self.experts)
            if engine_slot is None or not indices:
                continue
            size, part = self.engine.num_shards(engine_slot.grid), self.engine.shard_index(position, engine_slot.grid)
            shard = self.make_shard(param, engine_slot.sharding, size, part)
            dim = split_with(param, engine_slot.sharding, size, part).dim
            grids = self.grids_of(param)
            if False not in grids:  # the elements are sent, too
                entries = parts.setdefault(engine_slot.name, [])
                entries += [(index, dim, engine_slot.offset, shard) for index in indices]
            for is_scale, units in grids.items():
                # The first element of each block gives its cell.
                corners = shard[:: units[0], :: units[1]]
                cells = np.full(corners.shape, UNWRITTEN)
                for name, _ in param.hf:
                    is_source = np.isin(corners, self.full[name])
                    element = corners[is_source] - self.full[name][0, 0]
                    row, column = np.divmod(element, self.full[name].shape[1])
                    cells[is_source] = self.grid[name, is_scale][row // units[0], column // units[1]]
                entries = parts.setdefault(engine_slot.name + ".scale" * is_scale, [])
                entries += [(index, dim, engine_slot.offset // units[dim], cells) for index in indices]
        result = {}
        for name, entries in parts.items():
            shape = [max(e[0] for e in entries) + 1, *entries[0][3].shape]
            dim = entries[0][1]
            shape[1 + dim] = max(offset + values.shape[dim] for _, _, offset, values in entries)
            result[name] = np.full(shape, UNWRITTEN)
            for index, dim, offset, values in entries:
                target = result[name][index].swapaxes(0, dim)
                target[offset : offset + values.shape[dim]] = values.swapaxes(0, dim)
        return result


class Overlap(NamedTuple):
    """The intersection of a piece and an interval, as indices of the piece (inner) and of the tensor (outer)."""

    source_box: tuple[slice, slice]
    target_box: tuple[tuple[int, int], tuple[int, int]]
    dim: int

    def shifted(self, by: int) -> tuple[slice, slice]:
        """Return tensor indices shifted by `by` along the interval's dimension."""
        rows, columns = (
            slice(start + by * (dim == self.dim), stop + by * (dim == self.dim))
            for dim, (start, stop) in enumerate(self.target_box)
        )
        return rows, columns


def overlap(start: int, stop: int, dim: int, piece: TensorPiece) -> Overlap | None:
    edges = [list(interval) for interval in box(piece)]
    first = [interval[0] for interval in edges]
    edges[dim] = [max(start, edges[dim][0]), min(stop, edges[dim][1])]
    if edges[dim][0] >= edges[dim][1]:
        return None
    rows, columns = ((a, b) for a, b in edges)
    source_box = slice(rows[0] - first[0], rows[1] - first[0]), slice(columns[0] - first[1], columns[1] - first[1])
    return Overlap(source_box, (rows, columns), dim)


def box(piece: TensorPiece) -> tuple[tuple[int, int], tuple[int, int]]:
    return piece.rows, piece.columns


def key_of(piece: TensorPiece) -> Key:
    return piece.param.megatron, piece.source, piece.rows, piece.columns, piece.is_scale


def piece_keys(message: PeerMessage) -> tuple[list[Key], list[Key]]:
    return [key_of(piece) for piece in message.direct], [key_of(piece) for piece in message.forward]


def staged_bytes(pieces: Sequence[TensorPiece]) -> int:
    """Return a message's bytes in a buffer: pieces aligned to `ALIGN`, followed by hashes of 8 bytes each."""
    return sum(-(-nbytes // ALIGN) * ALIGN for nbytes in (*(piece.nbytes for piece in pieces), 8 * len(pieces)))


def simulate(plan: ReshardPlan, hf: HFConfig, wire: str, ranks_per_node: int) -> Result:
    """Execute the plan and check it.

    Raises AssertionError if a rank waits for a message that nobody sends, sends elements that it does not have, exceeds
    its bucket, or if an engine tensor differs from a gather and slice in the end.
    """
    train, engine = plan.train, plan.engine
    model = Model(hf, train, engine, wire)
    expected = [model.engine_tensors(position) for position in range(engine.tp)]
    engine_ranks = engine.ranks or model.train_ranks
    world = max(*model.train_ranks, *engine_ranks) + 3  # with some idle ranks at the end
    position = {rank: number % engine.tp for number, rank in enumerate(engine_ranks)}
    tensors = {
        rank: {name: np.full_like(w, UNWRITTEN) for name, w in expected[engine_position].items()}
        for rank, engine_position in position.items()
    }
    ranks = [RankPlan(plan, rank) for rank in range(world)]
    received: list[dict[Key, np.ndarray]] = [{} for _ in range(world)]
    total: Counter[tuple[int, int]] = Counter()
    fullest = 0.0
    for number in range(plan.rounds):
        rounds: list[Round] = [rank.round(number) for rank in ranks]
        posted = {(rank, m.peer): m for rank, transfers in enumerate(rounds) for m in transfers.sends}
        assert len(posted) == sum(len(transfers.sends) for transfers in rounds), (
            f"round {number}: two messages between two ranks"
        )
        arrived: list[dict[Key, np.ndarray]] = [{} for _ in range(world)]
        for rank, transfers in enumerate(rounds):
            send_bytes = sum(staged_bytes(m.pieces) for m in transfers.sends)
            receive_bytes = sum(staged_bytes(m.pieces) for m in transfers.receives) + staged_bytes(transfers.local)
            fullest = max(fullest, 2 * max(send_bytes, receive_bytes) / plan.bucket_bytes)
            assert max(send_bytes, receive_bytes) <= plan.bucket_bytes // 2, (
                f"round {number}, rank {rank}: {send_bytes} out, {receive_bytes} in"
            )
            assert rank in position or not (transfers.receives or transfers.local), (
                f"round {number}: rank {rank} has no engine"
            )
            for message in transfers.receives:
                description = f"round {number}, {message.peer} -> {rank}"
                sent = posted.pop((message.peer, rank), None)
                assert sent is not None, f"{description}: nobody sends it"
                assert piece_keys(sent) == piece_keys(message), f"{description}: the ends differ"
                assert [p.nbytes for p in sent.pieces] == [p.nbytes for p in message.pieces], description
                assert message.pieces and message.peer != rank, description
                for piece in message.direct:
                    key = key_of(piece)
                    assert key not in arrived[rank], f"{description}: twice in a round: {key}"
                    arrived[rank][key] = model.pack(message.peer, piece)
                    model.unpack(position[rank], tensors[rank], piece, arrived[rank][key])
                if message.forward:
                    assert message.peer // ranks_per_node == rank // ranks_per_node, (
                        f"{description}: forwarded to a node"
                    )
                for piece in message.forward:
                    key = key_of(piece)
                    assert key in received[message.peer], f"{description}: not received the round before: {key}"
                    model.unpack(position[rank], tensors[rank], piece, received[message.peer][key])
                total[message.peer, rank] += sum(piece.nbytes for piece in message.pieces)
            for piece in transfers.local:
                model.unpack(position[rank], tensors[rank], piece, model.pack(rank, piece))
        assert not posted, f"round {number}: nobody receives {sorted(posted)}"
        received = arrived
    for rank, engine_position in position.items():
        for name, expected_tensor in expected[engine_position].items():
            assert np.array_equal(tensors[rank][name], expected_tensor), (
                f"rank {rank}: {name} differs from a gather and slice"
            )
    return Result(total, fullest)
