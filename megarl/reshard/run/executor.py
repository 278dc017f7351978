"""Execute a rank's plan: pack, send, receive, forward, and pass each round's data to the engine process of this rank.

A message's data are its pieces, each at a multiple of `ALIGN` bytes, and then 8 bytes per piece: its hash at the owner
if it is to be verified, which the engine compares with a hash of its own tensor.

With deltas (`Executor.keep_base`) a message between nodes carries only the words that have changed since the last
weight sync (`delta.py`). The sender compares its shards with a copy of the last ones. The receiver reads the last ones
back from its engine and applies the changes, so that all that follows is the same: forwarding, writing, hashes.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Container, Mapping, Sequence
from itertools import accumulate
from secrets import token_hex
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from megarl.models import int4
from megarl.models.fp8 import FP8, quantise
from megarl.models.layout_algebra import EngineSlot, Param, matrix_shape
from megarl.reshard.plan.layout import Plane, ShardSlice, planes
from megarl.reshard.plan.planner import RankPlan, ReshardPlan, Round, TensorPiece, align
from megarl.reshard.run import copies, delta
from megarl.reshard.run.scale_grids import BlockScales, Grids, compute_int4_scales, compute_scale_grids

Slice = list[Any]
"""[name, index, r0, r1, c0, c1, offset, hash_offset]: a box of an engine's tensor and its place in the bucket, see
engine.weight_loader."""

SendToEngine = Callable[[torch.Tensor, dict[str, Any], bool], None]
"""(buffer, write order, whether it is for the draft model): send to the engine process of this rank. May return
before the engine has written."""


class WeightSyncError(RuntimeError):
    """A weight sync failed; the message names the tensor or the ranks."""


class _Placed(NamedTuple):
    """A piece with the offsets of its bytes and of its hash in a buffer."""

    piece: TensorPiece
    offset: int
    hash_offset: int


class _Packed(NamedTuple):
    """A piece of this rank's shards to pack, with its rows and columns there, or of scales, in the grid.

    box: in elements of the parameter, or in scales.
    """

    placed: _Placed
    box: tuple[int, int, int, int]
    sample: int  # see `_sample_index`


class _Message(NamedTuple):
    """A message in the send or receive buffer: pieces in [begin, hashes), their hashes in [hashes, end).

    is_delta: the message may carry changes alone, if the sender has a base for them.
    """

    peer: int
    begin: int
    hashes: int
    end: int
    is_delta: bool

    def part_of(self, buffer: torch.Tensor, only_hashes: bool = False) -> torch.Tensor:
        return buffer[self.hashes if only_hashes else self.begin : self.end]

    def is_changes(self, sent: torch.Tensor) -> bool:
        """Return whether what is sent for this message are changes; otherwise it is whole."""
        return len(sent) < self.end - self.begin


class _WriteOrder(NamedTuple):
    draft: bool
    slices: list[tuple[int, Param, Slice]]  # (sample index, parameter, slice), see `_sample_index`
    dtypes: dict[str, str]


class _PreparedRound(NamedTuple):
    """The work of this rank in a round.

    sends, receives: in the send or receive buffer. delta_packs: those of `packs` whose messages may be deltas.
    forwards: (offset in the previous round's receive buffer, offset in the send buffer, bytes) of pieces and hashes.
    orders: as many on all ranks, with different slices. reads: for each of `receives`, what to read back
    from the engine if it is a delta.
    """

    sends: list[_Message]
    receives: list[_Message]
    packs: list[_Packed]
    delta_packs: list[_Packed]
    local_packs: list[_Packed]
    forwards: list[tuple[int, int, int]]
    orders: list[_WriteOrder]
    reads: list[list[_WriteOrder]]
    send_bytes: int
    receive_bytes: int


def is_fully_verified(sync_number: int, period: int) -> bool:
    """Return whether weight sync number `sync_number`, counted from 1, verifies all pieces."""
    return sync_number % period == 1 % period


def find_quantised_params(plan: ReshardPlan, rank: int) -> list[Param]:
    """Return the parameters that a rank of the job holds parts of and sends to the engines in FP8 or INT4."""
    hf, train, family = plan.hf, plan.train, plan.table
    trainer_rank, num_experts = train.trainer_rank(rank), family.num_experts(hf)
    if plan.assignment.wire not in ("fp8", "int4") or trainer_rank is None:
        return []
    count = num_experts // train.ep
    experts = range(train.ep_rank(trainer_rank) * count, (train.ep_rank(trainer_rank) + 1) * count)
    stage, num_layers = trainer_rank // train.stage_ranks, int(hf["num_hidden_layers"])
    has_draft = plan.engine.draft and stage == train.pp - 1
    draft_layers = range(num_layers, num_layers + family.num_mtp_layers(hf)) if has_draft else ()
    return [
        param
        for layer in (*sorted(train.stages[stage]), *draft_layers)
        for param in family.engine_layer(hf, layer, experts)
        if len(planes(param, plan.assignment.wire)) > 1
        and plan.engine.slot_of(param) is not None
        and train.has_param(trainer_rank, param, num_experts)
    ]


class Executor:
    """One rank's side of every weight sync, for a rank that trains, serves an engine, or both. Buffers are allocated
    for one weight sync and freed after it.

    plan: the same on all participating ranks.
    rank: this rank's number in the job.
    period: the number of weight syncs whose samples together verify each piece once. The first and every `period`-th
    sync verify all pieces.
    allocate(bytes): return a uint8 tensor that can be shared with the engine process.
    is_compared: returns whether comparisons cover a parameter; it may be the same tensor of an engine that has others.
    """

    def __init__(
        self,
        plan: ReshardPlan,
        rank: int,
        period: int,
        allocate: Callable[[int], torch.Tensor],
        is_compared: Callable[[Param], bool] = lambda param: True,
    ) -> None:
        self.plan, self.rank, self.period, self.is_compared = plan, rank, period, is_compared
        self.trainer_rank, engines = plan.train.trainer_rank(rank), plan.rank_map.engine_rank(rank)
        """This rank's number among the trainer's ranks; None if it does not train."""
        self.position = None if engines is None else engines % plan.engine.tp
        """This rank's number within its engine; None if it has none."""
        self.num_experts = plan.table.num_experts(plan.hf)
        self.allocate = allocate
        self.num_syncs = 0
        self.has_base = False
        """True if the next weight sync sends changes from what `keep_base` has kept; the same on all ranks."""
        self.sent_bytes, self.whole_bytes = 0, 0
        """Bytes that this rank sent between nodes in the last weight sync, and would have sent without deltas."""
        self._base: dict[str, torch.Tensor] = {}
        self._base_grids: Grids = {}
        self.quantised_params = find_quantised_params(plan, rank)
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
        sends, packs, delta_packs, forwards, send_end = [], [], [], [], 0
        for message in round_.sends:
            begin = send_end
            placed, send_end = _place_message(message.pieces, begin)
            sends.append(self._message(message.peer, begin, placed, send_end))
            direct = [self._pack_of(entry) for entry in placed[: len(message.direct)]]
            packs += direct
            delta_packs += direct if sends[-1].is_delta else []
            for piece, offset, hash_offset in placed[len(message.direct) :]:
                previous = received[_key(piece)]
                forwards += [(previous.offset, offset, piece.nbytes), (previous.hash_offset, hash_offset, 8)]
        receives, reads, written, receive_end = [], [], [], 0
        forwardable: dict[Any, _Placed] = {}
        for message in round_.receives:
            begin = receive_end
            placed, receive_end = _place_message(message.pieces, begin)
            receives.append(self._message(message.peer, begin, placed, receive_end))
            written += placed
            reads.append(self._orders_of(placed if receives[-1].is_delta else [], has_draft))
            forwardable |= {_key(entry.piece): entry for entry in placed[: len(message.direct)]}
        local, receive_end = _place_message(round_.local, receive_end)
        orders = self._orders_of(written + local, has_draft)
        local_packs = [self._pack_of(entry) for entry in local]
        all_packs = packs, delta_packs, local_packs
        prepared = _PreparedRound(sends, receives, *all_packs, forwards, orders, reads, send_end, receive_end)
        return prepared, forwardable

    def _message(self, peer: int, begin: int, placed: Sequence[_Placed], end: int) -> _Message:
        """Messages between nodes may be deltas. They forward nothing, since only ranks of a node forward."""
        per_node = self.plan.assignment.ranks_per_node
        is_between_nodes = peer // per_node != self.rank // per_node
        return _Message(peer, begin, placed[0].hash_offset if placed else end, end, is_between_nodes)

    def _orders_of(self, placed: Sequence[_Placed], has_draft: bool) -> list[_WriteOrder]:
        orders = [_WriteOrder(draft, [], {}) for draft in ((False, True) if has_draft else (False,))]
        for piece, offset, hash_offset in placed:
            slot, name, boxes = self._targets(piece)
            _, slices, dtypes = orders[slot.is_draft]
            dtypes[name] = str(self._plane(piece).dtype).removeprefix("torch.")
            sample = self._sample_index(piece)
            slices += [(sample, piece.param, [name, index, *box, offset, hash_offset]) for index, *box in boxes]
        return orders

    def _targets(self, piece: TensorPiece) -> tuple[EngineSlot, str, list[tuple[int, int, int, int, int]]]:
        """Return slot, tensor name, and (index, rows, columns) of each copy; several if an expert is replicated."""
        engine, position = self.plan.engine, self.position
        slot = engine.slot_of(piece.param)
        assert slot is not None and position is not None
        plane = self._plane(piece)  # the engine cuts it like the tensor
        box = _locate_piece([plane.scale(interval) for interval in engine.slices_of_rank(position, piece.param)], piece)
        is_stacked = slot.grid == "expert"
        indices = engine.expert_indices(position, piece.param, self.num_experts) if is_stacked else [-1]
        return slot, slot.name + plane.suffix, [(index, *box) for index in indices]

    def _plane(self, piece: TensorPiece) -> Plane:
        return planes(piece.param, self.plan.assignment.wire)[piece.is_scale]

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
        wait_for_engine: waits until the engine has executed everything passed on so far.
        compare_only: the engines write nothing, and compare what they hold with the hashes of all pieces, which alone
        are sent.
        share_buckets: called with both receive buffers before the first round. Collective over the ranks of an engine.

        While a round is on the wire, the previous round is passed on and written, and this rank's sends for the next
        round are packed. Between two rounds remains only what depends on the data just received: copying what is
        forwarded.

        The base of `keep_base` serves one sync.

        Raises WeightSyncError if a peer is lost. The caller of `send_to_engine` handles errors of the engine.
        """
        self.num_syncs += not compare_only
        verify_all = compare_only or is_fully_verified(self.num_syncs, self.period)
        verified_samples = range(self.period) if verify_all else [self.num_syncs % self.period]
        grids = self._scale_grids(local)
        self.sent_bytes = self.whole_bytes = 0
        has_base = self.has_base and not compare_only
        self.has_base = False
        receive_buffers = [self.allocate(self.receive_bytes) for _ in range(2)]
        send_buffers = [buffer.new_empty(self.send_bytes) for buffer in receive_buffers]
        if self.position is not None and self.prepared_rounds:
            share_buckets(receive_buffers)
        order = {"do": "compare" if compare_only else "write", "version": version, "sync_id": token_hex(8)}

        def pack_sends(step: _PreparedRound, buffer: torch.Tensor) -> None:
            if has_base:
                buffer.zero_()  # the bytes between two pieces would count as changes
            self._pack(step.packs, local, grids, buffer, verified_samples)

        def read_back(step: _PreparedRound, receives: Sequence[torch.Tensor], buffer: torch.Tensor) -> None:
            for message, part, reads in zip(step.receives, receives, step.reads, strict=True):
                for draft, all_slices, dtypes in reads if message.is_changes(part) else ():
                    if slices := [entry for _, _, entry in all_slices]:
                        send_to_engine(buffer, order | {"do": "read", "tensor_dtype": dtypes, "slices": slices}, draft)

        def pass_on(step: _PreparedRound, buffer: torch.Tensor) -> None:
            for draft, all_slices, dtypes in step.orders if self.position is not None else ():
                slices = [
                    entry if sample in verified_samples else [*entry[:-1], -1]
                    for sample, param, entry in all_slices
                    if not compare_only or self.is_compared(param)
                ]
                send_to_engine(buffer, order | {"tensor_dtype": dtypes, "slices": slices}, draft)

        for number, step in enumerate(self.prepared_rounds):
            current, other = number % 2, 1 - number % 2
            if number == 0:
                pack_sends(step, send_buffers[current])
            previous = receive_buffers[other][None]
            copies.pack([(previous[:, at : at + size], to) for at, to, size in step.forwards], send_buffers[current])
            what = f"the weight sync of version {version}, round {number} of {len(self.prepared_rounds)}"
            if number and has_base:  # the engine works while changes are encoded
                pass_on(self.prepared_rounds[number - 1], receive_buffers[other])
            sends = whole = [message.part_of(send_buffers[current], compare_only) for message in step.sends]
            receives = [message.part_of(receive_buffers[current], compare_only) for message in step.receives]
            if has_base:
                sends = self._encode(step, sends, send_buffers[current])
                receives = self._allocate_receives(step, sends, receive_buffers[current], what)
            self._count_bytes(step, sends, whole)
            requests = _transfer(
                [(message.peer, part) for message, part in zip(step.receives, receives, strict=True)],
                [(message.peer, part) for message, part in zip(step.sends, sends, strict=True)],
                what,
                self.rank,
            )
            if number and not has_base:
                pass_on(self.prepared_rounds[number - 1], receive_buffers[other])
            if has_base:
                read_back(step, receives, receive_buffers[current])
            self._pack(step.local_packs, local, grids, receive_buffers[current], verified_samples)
            if number + 1 < len(self.prepared_rounds):
                pack_sends(self.prepared_rounds[number + 1], send_buffers[other])
            wait_for_engine()  # the next round overwrites the buffer that was passed on
            _wait(requests, what, self.rank)
            for message, received in zip(step.receives, receives, strict=True):
                if has_base and message.is_changes(received):
                    num_hash_bytes = message.end - message.hashes
                    delta.apply(received[:-num_hash_bytes], receive_buffers[current][message.begin : message.hashes])
                    receive_buffers[current][message.hashes : message.end] = received[-num_hash_bytes:]
        if self.prepared_rounds:
            pass_on(self.prepared_rounds[-1], receive_buffers[(len(self.prepared_rounds) - 1) % 2])

    def keep_base(self, local: Mapping[str, torch.Tensor]) -> None:
        """Keep host copies of the shards that were just synced and that this rank sends to other nodes, so that the
        next weight sync sends changes alone. Call it on all participating ranks, and only if all engines have these
        weights."""
        pieces = [packed.placed.piece for step in self.prepared_rounds for packed in step.delta_packs]
        for name in sorted({piece.param.megatron for piece in pieces if not piece.is_scale}):
            shard = local[name]
            if name not in self._base:  # not pinned: torch rounds pinned memory up to powers of two
                self._base[name] = torch.empty(shard.shape, dtype=shard.dtype)
            self._base[name].copy_(shard)
        keys = {(piece.param.megatron, piece.source) for piece in pieces}
        self._base_grids = {key: grid.cpu() for key, grid in self._scale_grids(local).items() if key in keys}
        self.has_base = True

    def drop_base(self) -> None:
        """Send whole messages in the next weight sync, because not all engines have the last version."""
        self.has_base = False

    def _scale_grids(self, local: Mapping[str, torch.Tensor]) -> Grids:
        """Return the scales of quantised parameters. Collective over the ranks that train."""
        quantised = local, self.quantised_params, self.plan.train, self.trainer_rank or 0
        if self.plan.assignment.wire == "int4":
            return compute_int4_scales(*quantised)
        return compute_scale_grids(*quantised, self._reduce_max)

    def _encode(
        self, step: _PreparedRound, sends: Sequence[torch.Tensor], send_buffer: torch.Tensor
    ) -> list[torch.Tensor]:
        """Return the messages to send, with changes alone where that is smaller."""
        if not step.delta_packs:
            return list(sends)
        old = torch.zeros_like(send_buffer)
        self._pack(step.delta_packs, self._base, self._base_grids, old, ())
        result = []
        for message, whole in zip(step.sends, sends, strict=True):
            pieces = slice(message.begin, message.hashes)
            changes = delta.encode(send_buffer[pieces], old[pieces]) if message.is_delta else None
            result.append(whole if changes is None else torch.cat([changes, whole[message.hashes - message.begin :]]))
        return result

    def _allocate_receives(
        self, step: _PreparedRound, sends: Sequence[torch.Tensor], buffer: torch.Tensor, what: str
    ) -> list[torch.Tensor]:
        """Return where to receive each message, after exchanging the sizes of those that may be deltas."""
        sizes = [torch.tensor([len(send)], device=buffer.device) for send in sends]
        outgoing = [(message.peer, size) for message, size in zip(step.sends, sizes, strict=True) if message.is_delta]
        incoming = {
            message: torch.zeros(1, dtype=torch.int64, device=buffer.device)
            for message in step.receives
            if message.is_delta
        }
        receives = [(message.peer, size) for message, size in incoming.items()]
        _wait(_transfer(receives, outgoing, what, self.rank), what, self.rank)
        result = []
        for message in step.receives:
            whole = message.part_of(buffer)
            size = int(incoming[message]) if message in incoming else len(whole)
            result.append(whole if size == len(whole) else buffer.new_empty(size))
        return result

    def _count_bytes(
        self, step: _PreparedRound, sends: Sequence[torch.Tensor], whole_sends: Sequence[torch.Tensor]
    ) -> None:
        for message, send, whole in zip(step.sends, sends, whole_sends, strict=True):
            if message.is_delta:
                self.sent_bytes += len(send)
                self.whole_bytes += len(whole)

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
        """Write pieces of this rank's shards to a buffer, and the hashes of those that are to be verified.

        local, grids: on the buffer's device, or on the host.
        """
        boxes: list[copies.Box] = []
        to_quantise: list[copies.Box] = []
        scales: list[BlockScales] = []
        int4_boxes: list[copies.Box] = []
        int4_scales: list[torch.Tensor] = []
        to_hash: list[tuple[int, torch.Tensor]] = []  # (index of the hash as a word of the buffer, box)
        quantised_hashes: list[tuple[int, torch.Tensor]] = []
        shards: dict[str, torch.Tensor] = {}  # cached, since `local` may compute a tensor on each access
        for (piece, offset, hash_offset), (r0, r1, c0, c1), sample in packs:
            name, plane = piece.param.megatron, self._plane(piece)
            if not piece.is_scale and name not in shards:
                shards[name] = local[name]
            source = grids[name, piece.source] if piece.is_scale else shards[name]
            box = source.reshape(matrix_shape(source.shape))[r0:r1, c0:c1].to(buffer.device)
            # Hash the intended data, not the buffer that goes on the wire.
            if plane.dtype == FP8:
                to_quantise.append((box, offset))
                grid = grids[name, piece.source].to(buffer.device)
                scales.append(BlockScales(grid, piece.rows[0], piece.columns[0]))
                if sample in verified_samples:  # now, so that the quantised boxes of a round never live together
                    quantised_hashes.append((hash_offset // 8, copies.device_hashes([quantise(box, *scales[-1])])))
            elif plane.suffix == int4.PACKED_SUFFIX:
                (first, last), (left, right) = piece.rows, piece.columns
                groups = slice(left * plane.columns // int4.GROUP, right * plane.columns // int4.GROUP)
                int4_boxes.append((box, offset))
                int4_scales.append(grids[name, piece.source][first:last, groups].to(buffer.device))
                if sample in verified_samples:
                    packed = int4.quantise(box, int4_scales[-1])
                    quantised_hashes.append((hash_offset // 8, copies.device_hashes([packed])))
            else:
                boxes.append((box.to(plane.dtype), offset))
                if sample in verified_samples:
                    to_hash.append((hash_offset // 8, boxes[-1][0]))
        copies.pack(boxes, buffer)
        copies.pack_fp8(to_quantise, scales, buffer)
        copies.pack_int4(int4_boxes, int4_scales, buffer)
        if to_hash or quantised_hashes:
            words = buffer[: len(buffer) // 8 * 8].view(torch.int64)
            hashes = [copies.device_hashes([box for _, box in to_hash])] if to_hash else []
            indices = torch.tensor([index for index, _ in to_hash + quantised_hashes], device=buffer.device)
            words[indices] = torch.cat([*hashes, *(value for _, value in quantised_hashes)])

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
            plane, intervals = self._plane(piece), self.plan.train.slices_of_rank(self.trainer_rank, piece.param)
            r0, r1, c0, c1 = _locate_piece([plane.scale(interval) for interval in intervals], piece)
            box = r0 * plane.rows, r1 * plane.rows, c0 * plane.columns, c1 * plane.columns
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
