"""Execute a rank's plan: pack, send, receive, forward, and pass each round's data to the engine process of this rank.

A message's data are its pieces, each at a multiple of `ALIGN` bytes, and then 8 bytes per piece: its hash at the owner
if it is to be verified, which the engine compares with a hash of its own tensor.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Container, Mapping, Sequence
from itertools import accumulate
from secrets import token_hex
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from megarl.models.fp8 import BLOCK, FP8, SCALE_SUFFIX, is_quantised, quantise
from megarl.models.layout_algebra import EngineSlot, Param
from megarl.models.registry import family_of
from megarl.reshard.plan.layout import ShardSlice
from megarl.reshard.plan.planner import RankPlan, ReshardPlan, Round, TensorPiece, align
from megarl.reshard.run import copies
from megarl.reshard.run.scale_grids import BlockScales, Grids, compute_scale_grids

Slice = list[Any]
"""[name, index, r0, r1, c0, c1, offset, hash_offset]: a box of an engine's tensor and its place in the bucket, see
engine.weight_loader."""

SendToEngine = Callable[[torch.Tensor, dict[str, Any], bool], None]
"""(buffer, write order, whether it is for the draft model): send to the engine process of this rank. May return
before the engine has written."""

WIRE_DTYPES = {1: FP8, 2: torch.bfloat16, 4: torch.float32}
"""Dtype by element size in bytes."""


class WeightSyncError(RuntimeError):
    """A weight sync failed; the message names the tensor or the ranks."""


class _Placed(NamedTuple):
    """A piece with the offsets of its bytes and of its hash in a buffer."""

    piece: TensorPiece
    offset: int
    hash_offset: int


class _Packed(NamedTuple):
    """A piece of this rank's shards to pack, with its rows and columns there, or of scales, in the grid."""

    placed: _Placed
    box: tuple[int, int, int, int]
    sample: int  # see `_sample_index`


class _WriteOrder(NamedTuple):
    draft: bool
    slices: list[tuple[int, Slice]]  # (sample index, slice), see `_sample_index`
    dtypes: dict[str, str]


class _PreparedRound(NamedTuple):
    """The work of this rank in a round.

    sends, receives: (peer, begin, end) of each message in the send or receive buffer. forwards: (offset in the previous
    round's receive buffer, offset in the send buffer, bytes) of pieces and hashes. orders: as many on all ranks, with
    different slices.
    """

    sends: list[tuple[int, int, int]]
    receives: list[tuple[int, int, int]]
    packs: list[_Packed]
    local_packs: list[_Packed]
    forwards: list[tuple[int, int, int]]
    orders: list[_WriteOrder]
    send_bytes: int
    receive_bytes: int


def is_fully_verified(sync_number: int, period: int) -> bool:
    """Return whether weight sync number `sync_number`, counted from 1, verifies all pieces."""
    return sync_number % period == 1 % period


class Executor:
    """One rank's side of every weight sync, for a rank that trains, serves an engine, or both. Buffers are allocated
    for one weight sync and freed after it.

    plan: the same on all participating ranks.
    rank: this rank's number in the job.
    period: the number of weight syncs whose samples together verify each piece once. The first and every `period`-th
    sync verify all pieces.
    allocate(bytes): return a uint8 tensor that can be shared with the engine process.
    """

    def __init__(self, plan: ReshardPlan, rank: int, period: int, allocate: Callable[[int], torch.Tensor]) -> None:
        self.plan, self.rank, self.period = plan, rank, period
        self.trainer_rank, engines = plan.train.trainer_rank(rank), plan.rank_map.engine_rank(rank)
        """This rank's number among the trainer's ranks; None if it does not train."""
        self.position = None if engines is None else engines % plan.engine.tp
        """This rank's number within its engine; None if it has none."""
        self.num_experts = family_of(plan.hf).num_experts(plan.hf)
        self.allocate = allocate
        self.num_syncs = 0
        self.quantised_params = self._find_quantised_params()
        rank_plan = RankPlan(plan, rank)
        self.prepared_rounds: list[_PreparedRound] = []
        received: dict[Any, _Placed] = {}
        for number in range(plan.rounds):
            prepared, received = self._prepare_round(rank_plan.round(number), received, plan.has_draft(number))
            self.prepared_rounds.append(prepared)
        self.send_bytes = max((step.send_bytes for step in self.prepared_rounds), default=0)
        self.receive_bytes = max((step.receive_bytes for step in self.prepared_rounds), default=0)
        if max(self.send_bytes, self.receive_bytes) > plan.bucket_bytes // 2:
            raise AssertionError("a round is larger than half a bucket")  # a bug in the planner

    def _prepare_round(
        self, round_: Round, received: Mapping[Any, _Placed], has_draft: bool
    ) -> tuple[_PreparedRound, dict[Any, _Placed]]:
        """Lay out a round. received: what the previous one received directly, by `_key`; also returned for this one."""
        sends, packs, forwards, send_end = [], [], [], 0
        for message in round_.sends:
            begin = send_end
            placed, send_end = _place_message(message.pieces, begin)
            sends.append((message.peer, begin, send_end))
            packs += [self._pack_of(entry) for entry in placed[: len(message.direct)]]
            for piece, offset, hash_offset in placed[len(message.direct) :]:
                previous = received[_key(piece)]
                forwards += [(previous.offset, offset, piece.nbytes), (previous.hash_offset, hash_offset, 8)]
        receives, written, receive_end = [], [], 0
        forwardable: dict[Any, _Placed] = {}
        for message in round_.receives:
            begin = receive_end
            placed, receive_end = _place_message(message.pieces, begin)
            receives.append((message.peer, begin, receive_end))
            written += placed
            forwardable |= {_key(entry.piece): entry for entry in placed[: len(message.direct)]}
        local, receive_end = _place_message(round_.local, receive_end)
        orders = [_WriteOrder(draft, [], {}) for draft in ((False, True) if has_draft else (False,))]
        for piece, offset, hash_offset in written + local:
            slot, name, boxes = self._targets(piece)
            _, slices, dtypes = orders[slot.is_draft]
            dtypes[name] = str(WIRE_DTYPES[piece.item_bytes]).removeprefix("torch.")
            sample = self._sample_index(piece)
            slices += [(sample, [name, index, *box, offset, hash_offset]) for index, *box in boxes]
        local_packs = [self._pack_of(entry) for entry in local]
        prepared = _PreparedRound(sends, receives, packs, local_packs, forwards, orders, send_end, receive_end)
        return prepared, forwardable

    def _targets(self, piece: TensorPiece) -> tuple[EngineSlot, str, list[tuple[int, int, int, int, int]]]:
        """Return slot, tensor name, and (index, rows, columns) of each copy; several if an expert is replicated."""
        engine, position = self.plan.engine, self.position
        slot = engine.slot_of(piece.param)
        assert slot is not None and position is not None
        intervals = engine.slices_of_rank(position, piece.param)
        if piece.is_scale:  # the engine cuts the grid like the tensor
            intervals = [
                ShardSlice(source, dim, start // BLOCK, -(-stop // BLOCK), offset // BLOCK)
                for source, dim, start, stop, offset in intervals
            ]
        box = _locate_piece(intervals, piece)
        is_stacked = slot.grid == "expert"
        indices = engine.expert_indices(position, piece.param, self.num_experts) if is_stacked else [-1]
        return slot, slot.name + (SCALE_SUFFIX if piece.is_scale else ""), [(index, *box) for index in indices]

    def sync(
        self,
        local: Mapping[str, torch.Tensor],
        send_to_engine: SendToEngine,
        version: int,
        wait_for_engine: Callable[[], Any] = lambda: None,
        compare_only: bool = False,
        share_buckets: Callable[[list[torch.Tensor]], Any] = lambda buckets: None,
    ) -> None:
        """Send this rank's shards (canonical name -> tensor), and pass on what arrives. Collective over all
        participating ranks; a rank that only trains passes nothing on.

        send_to_engine: sends a buffer and its write order to the engine. It may return before the engine has written.
        wait_for_engine: waits until the engine has written everything passed on so far.
        compare_only: the engines write nothing, and compare what they hold with the hashes of all pieces.
        share_buckets: called with both receive buffers before the first round. Collective over the ranks of an engine.

        While a round is on the wire, the previous round is passed on and written, and this rank's sends for the next
        round are packed. Between two rounds remains only what depends on the data just received: copying what is
        forwarded.

        Raises WeightSyncError if a peer is lost. The caller of `send_to_engine` handles errors of the engine.
        """
        self.num_syncs += not compare_only
        verify_all = compare_only or is_fully_verified(self.num_syncs, self.period)
        verified_samples = range(self.period) if verify_all else [self.num_syncs % self.period]
        grids = compute_scale_grids(
            local, self.quantised_params, self.plan.train, self.trainer_rank or 0, self._reduce_max
        )
        receive_buffers = [self.allocate(self.receive_bytes) for _ in range(2)]
        send_buffers = [buffer.new_empty(self.send_bytes) for buffer in receive_buffers]
        if self.position is not None and self.prepared_rounds:
            share_buckets(receive_buffers)
        order = {"do": "compare" if compare_only else "write", "version": version, "sync_id": token_hex(8)}

        def pass_on(step: _PreparedRound, buffer: torch.Tensor) -> None:
            for draft, all_slices, dtypes in step.orders if self.position is not None else ():
                slices = [entry if sample in verified_samples else [*entry[:-1], -1] for sample, entry in all_slices]
                send_to_engine(buffer, order | {"tensor_dtype": dtypes, "slices": slices}, draft)

        for number, step in enumerate(self.prepared_rounds):
            current, other = number % 2, 1 - number % 2
            if number == 0:
                self._pack(step.packs, local, grids, send_buffers[current], verified_samples)
            previous = receive_buffers[other][None]
            copies.pack([(previous[:, at : at + size], to) for at, to, size in step.forwards], send_buffers[current])
            what = f"the weight sync of version {version}, round {number} of {len(self.prepared_rounds)}"
            receives = [(peer, receive_buffers[current][begin:end]) for peer, begin, end in step.receives]
            sends = [(peer, send_buffers[current][begin:end]) for peer, begin, end in step.sends]
            requests = _transfer(receives, sends, what, self.rank)
            if number:
                pass_on(self.prepared_rounds[number - 1], receive_buffers[other])
            self._pack(step.local_packs, local, grids, receive_buffers[current], verified_samples)
            if number + 1 < len(self.prepared_rounds):
                self._pack(self.prepared_rounds[number + 1].packs, local, grids, send_buffers[other], verified_samples)
            wait_for_engine()  # the next round overwrites the buffer that was passed on
            _wait(requests, what, self.rank)
        if self.prepared_rounds:
            pass_on(self.prepared_rounds[-1], receive_buffers[(len(self.prepared_rounds) - 1) % 2])

    def _sample_index(self, piece: TensorPiece) -> int:
        """Return in which of `period` weight syncs a piece is verified; the same on all ranks."""
        return zlib.crc32(repr(_key(piece)).encode()) % self.period

    def _pack(
        self,
        packs: Sequence[_Packed],
        local: Mapping[str, torch.Tensor],
        grids: Grids,
        buffer: torch.Tensor,
        verified_samples: Container[int],
    ) -> None:
        """Write pieces of this rank's shards to a buffer, and the hashes of those that are to be verified."""
        boxes: list[copies.Box] = []
        to_quantise: list[copies.Box] = []
        scales: list[BlockScales] = []
        to_hash: list[tuple[int, torch.Tensor]] = []  # (index of the hash as a word of the buffer, box)
        fp8_hashes: list[tuple[int, torch.Tensor]] = []
        shards: dict[str, torch.Tensor] = {}  # cached, since `local` may compute a tensor on each access
        for (piece, offset, hash_offset), (r0, r1, c0, c1), sample in packs:
            name, dtype = piece.param.megatron, WIRE_DTYPES[piece.item_bytes]
            if not piece.is_scale and name not in shards:
                shards[name] = local[name]
            source = grids[name, piece.source] if piece.is_scale else shards[name]
            box = source.view(len(source), -1)[r0:r1, c0:c1]
            # Hash the intended data, not the buffer that goes on the wire.
            if dtype == FP8:
                to_quantise.append((box, offset))
                scales.append(BlockScales(grids[name, piece.source], piece.rows[0], piece.columns[0]))
                if sample in verified_samples:  # now, so that the quantised boxes of a round never live together
                    fp8_hashes.append((hash_offset // 8, copies.device_hashes([quantise(box, *scales[-1])])))
            else:
                boxes.append((box.to(dtype), offset))
                if sample in verified_samples:
                    to_hash.append((hash_offset // 8, boxes[-1][0]))
        copies.pack(boxes, buffer)
        copies.pack_fp8(to_quantise, scales, buffer)
        if to_hash or fp8_hashes:
            words = buffer[: len(buffer) // 8 * 8].view(torch.int64)
            hashes = [copies.device_hashes([box for _, box in to_hash])] if to_hash else []
            indices = torch.tensor([index for index, _ in to_hash + fp8_hashes], device=buffer.device)
            words[indices] = torch.cat([*hashes, *(value for _, value in fp8_hashes)])

    def _find_quantised_params(self) -> list[Param]:
        """Return the parameters that this rank holds parts of and sends to the engines in FP8."""
        plan = self.plan
        hf, train, family = plan.hf, plan.train, family_of(plan.hf)
        if plan.assignment.wire != "fp8" or self.trainer_rank is None:
            return []
        count = self.num_experts // train.ep
        experts = range(train.ep_rank(self.trainer_rank) * count, (train.ep_rank(self.trainer_rank) + 1) * count)
        layers = int(hf["num_hidden_layers"]) + (family.num_mtp_layers(hf) if plan.engine.draft else 0)
        return [
            param
            for layer in range(layers)
            for param in family.layer(hf, layer, experts)
            if is_quantised(param)
            and plan.engine.slot_of(param) is not None
            and train.has_param(self.trainer_rank, param, self.num_experts)
        ]

    def _reduce_max(self, tensors: list[torch.Tensor], ranks: Sequence[int]) -> list[torch.Tensor]:
        """Elementwise maximum, see `scale_grids.MaxReduce`. NCCL's all-reduce may lose a NaN."""
        maximum = torch.cat([tensor.reshape(-1) for tensor in tensors])
        peers = self.plan.rank_map.train[list(ranks)].tolist()
        received = {rank: torch.empty_like(maximum) for rank in peers if rank != self.rank}
        what = "the exchange of scales"
        requests = _transfer(list(received.items()), [(rank, maximum) for rank in received], what, self.rank)
        _wait(requests, what, self.rank)
        for values in received.values():
            maximum = torch.maximum(maximum, values)
        parts = maximum.split([tensor.numel() for tensor in tensors])
        return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]

    def _pack_of(self, placed: _Placed) -> _Packed:
        piece = placed.piece
        if piece.is_scale:  # the grid is whole on each rank
            box = (*piece.rows, *piece.columns)
        else:
            assert self.trainer_rank is not None
            box = _locate_piece(self.plan.train.slices_of_rank(self.trainer_rank, piece.param), piece)
        return _Packed(placed, box, self._sample_index(piece))


def _transfer(
    receives: Sequence[tuple[int, torch.Tensor]], sends: Sequence[tuple[int, torch.Tensor]], what: str, rank: int
) -> list[tuple[dist.Work, int]]:
    """Start receiving from and sending to these ranks, in one group on NCCL; return each request with its peer."""
    operations = [dist.P2POp(dist.irecv, tensor, peer) for peer, tensor in receives]
    operations += [dist.P2POp(dist.isend, tensor, peer) for peer, tensor in sends]
    if not operations:
        return []
    peers = [operation.peer for operation in operations]
    try:
        works = dist.batch_isend_irecv(operations)
    except RuntimeError as error:  # a peer was already lost
        among = ", ".join(map(str, sorted(set(peers))))
        raise WeightSyncError(f"{what} failed between ranks {rank} and one of {among}: {error}") from error
    if len(works) == len(peers):
        return list(zip(works, peers, strict=True))
    return [(work, peers[0]) for work in works]  # NCCL returns one request for the group


def _wait(requests: Sequence[tuple[dist.Work, int]], what: str, rank: int) -> None:
    for request, peer in requests:
        try:
            request.wait()
        except RuntimeError as error:
            raise WeightSyncError(f"{what} failed between ranks {rank} and {peer}: {error}") from error


def _locate_piece(intervals: Sequence[ShardSlice], piece: TensorPiece) -> tuple[int, int, int, int]:
    """Return rows and columns of a piece within the local tensor made of these intervals."""
    for interval in intervals:
        low, high = (piece.rows, piece.columns)[interval.dim]
        if interval.source == piece.source and interval.start <= low and high <= interval.stop:
            shift = interval.offset - interval.start
            rows = [edge + shift * (interval.dim == 0) for edge in piece.rows]
            columns = [edge + shift * (interval.dim == 1) for edge in piece.columns]
            return rows[0], rows[1], columns[0], columns[1]
    raise AssertionError(f"{piece.param.megatron} is not on this rank")  # a bug in the planner


def _place_message(pieces: Sequence[TensorPiece], begin: int) -> tuple[list[_Placed], int]:
    """Lay out the pieces of a message and then their hashes from offset `begin` on; return them with the end offset."""
    *offsets, hash_offset = accumulate((align(piece.nbytes) for piece in pieces), initial=begin)
    placed = [
        _Placed(piece, offset, hash_offset + 8 * number)
        for number, (piece, offset) in enumerate(zip(pieces, offsets, strict=True))
    ]
    return placed, hash_offset + align(8 * len(placed))


def _key(piece: TensorPiece) -> tuple[Any, ...]:
    """Return what identifies a piece, without its Param."""
    return (piece.param.hf[piece.source].name, piece.rows, piece.columns, piece.is_scale)
