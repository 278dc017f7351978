"""Runs a rank's plan: packs, sends, receives, forwards, and hands every round's data to the engine process beside it.

The data of a message are its pieces, each at a multiple of `ALIGN` bytes, and then 8 bytes for each of them: the hash
of the piece at its owner, where it is to be verified. A forwarder passes the hash on with the piece, so whoever changes
a bit on the way, the engine finds another hash in its own tensor.

On an FP8 wire matrices are quantised at their owner: before the first round the ranks that have parts of a block agree
on its scale, and what is packed then is FP8, or a box of the grid of scales.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Container, Mapping, Sequence
from secrets import token_hex
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from megarl.models.fp8 import BLOCK, FP8, SCALE_SUFFIX, is_quantised, quantise
from megarl.models.layout_algebra import EngineSlot, Param
from megarl.models.registry import family_of
from megarl.reshard.plan.layout import ShardSlice
from megarl.reshard.plan.planner import ALIGN, PeerMessage, ReshardPlan, Round, TensorPiece, compute_offsets
from megarl.reshard.run import copies
from megarl.reshard.run.checksum import device_hashes
from megarl.reshard.run.scale_grids import Grids, compute_scale_grids

Slice = list[Any]
"""[name, index, r0, r1, c0, c1, offset, hash_offset]: a box of an engine's tensor and its place, see
engine.weight_loader."""

SendToEngine = Callable[[torch.Tensor, dict[str, Any], bool], None]
"""Gives a buffer and the order to write it to the engine process beside this rank, for its draft model or not. It may
return before that has written."""

WIRE_DTYPES = {1: FP8, 2: torch.bfloat16, 4: torch.float32}
"""Types by bytes of an element."""


class WeightSyncError(RuntimeError):
    """A push that failed; names the tensor or the ranks."""


class _PlacedMessage(NamedTuple):
    """A message, or what is kept here, with places in this rank's buffer: of the pieces, of their hashes.

    sources: of the pieces of own shards, the shard's name, rows and columns (of scales: in the grid), and the lot (see
    `_sample_index`). forwards: the places in the buffer of the round before of the pieces to forward, and of their hashes.
    """

    message: PeerMessage
    begin: int
    end: int
    piece_offsets: list[int]
    hash_offset: int
    sources: list[tuple[str, int, int, int, int, int]]
    forwards: list[tuple[int, int]]


class _WriteOrder(NamedTuple):
    draft: bool
    slices: list[tuple[int, Slice]]  # with the lot of the piece, see `_sample_index`
    dtypes: dict[str, str]


class _PreparedRound(NamedTuple):
    sends: list[_PlacedMessage]
    receives: list[_PlacedMessage]
    local: _PlacedMessage
    orders: list[_WriteOrder]  # the same on all ranks but for what is in them


def is_fully_verified(push: int, period: int) -> bool:
    """Whether all pieces of a push, counted from 1, are verified."""
    return push % period == 1 % period


class Executor:
    """One rank's side of every push: of one that trains, or is an engine's, or both. Buffers are allocated for a push
    and freed after it.

    plan: the same on all ranks that take part. rank: this one, of the job. period: how many pushes it takes until each
    piece was among the sample that is verified in every push; the first and every `period`-th push are verified in
    full. allocate(bytes): a uint8 tensor that the engine process can be given.
    """

    def __init__(self, plan: ReshardPlan, rank: int, period: int, allocate: Callable[[int], torch.Tensor]) -> None:
        self.plan, self.rank, self.period = plan, rank, period
        self.trainer_rank, engines = plan.train.trainer_rank(rank), plan.rank_map.engine_rank(rank)
        """Which of the trainer's ranks this is."""
        self.position = None if engines is None else engines % plan.engine.tp
        """Which of its engine's ranks this is."""
        self.num_experts = family_of(plan.hf).num_experts(plan.hf)
        self.allocate = allocate
        self.num_syncs = 0
        self.quantised_params = self._find_quantised_params()
        mine = plan.plan_rank(rank)
        self.prepared_rounds: list[_PreparedRound] = []
        for number in range(plan.rounds):
            before = self.prepared_rounds[-1].receives if number else []
            self.prepared_rounds.append(self._prepare_round(mine.round(number), before, plan.has_draft(number)))
        self.send_bytes = max((step.sends[-1].end for step in self.prepared_rounds if step.sends), default=0)
        self.receive_bytes = max((step.local.end for step in self.prepared_rounds), default=0)
        if max(self.send_bytes, self.receive_bytes) > plan.bucket_bytes // 2:
            raise AssertionError("a round is larger than half a bucket")  # the planner's fault

    def _prepare_round(self, round_: Round, before: Sequence[_PlacedMessage], has_draft: bool) -> _PreparedRound:
        came = {
            _key(piece): (parcel.piece_offsets[number], parcel.hash_offset + 8 * number)
            for parcel in before
            for number, piece in enumerate(parcel.message.direct)
        }
        sends, _ = _place_messages(round_.sends, 0, came, self._source)
        receives, end = _place_messages(round_.receives, 0)
        (local,), _ = _place_messages([PeerMessage(self.rank, round_.local, ())], end, came, self._source)
        orders = [_WriteOrder(draft, [], {}) for draft in ((False, True) if has_draft else (False,))]
        for parcel in (*receives, local):
            for number, (piece, place) in enumerate(zip(parcel.message.pieces, parcel.piece_offsets, strict=True)):
                slot, name, boxes = self._targets(piece)
                _, slices, dtypes = orders[slot.is_draft]
                dtypes[name] = str(WIRE_DTYPES[piece.item_bytes]).removeprefix("torch.")
                hash_place, lot = parcel.hash_offset + 8 * number, self._sample_index(piece)
                slices += [(lot, [name, index, *box, place, hash_place]) for index, *box in boxes]
        return _PreparedRound(sends, receives, local, orders)

    def _targets(self, piece: TensorPiece) -> tuple[EngineSlot, str, list[tuple[int, int, int, int, int]]]:
        """The engine's tensor, and index, rows and columns in it; several where an expert is there more than once."""
        engine, position = self.plan.engine, self.position
        slot = engine.slot_of(piece.param)
        assert slot is not None and position is not None
        held = engine.slices_of_rank(position, piece.param)
        box = _locate_piece(_to_scale_slices(held) if piece.is_scale else held, piece)
        stacked = slot.grid == "expert"
        indices = engine.expert_indices(position, piece.param, self.num_experts) if stacked else [-1]
        return slot, slot.name + (SCALE_SUFFIX if piece.is_scale else ""), [(index, *box) for index in indices]

    def sync(
        self,
        local: Mapping[str, torch.Tensor],
        hand_over: SendToEngine,
        version: int,
        settle: Callable[[], Any] = lambda: None,
        compares: bool = False,
        share: Callable[[list[torch.Tensor]], Any] = lambda buckets: None,
    ) -> None:
        """Send this rank's shards (canonical name -> tensor), and hand over what comes. Collective over all ranks that
        take part; one that only trains hands nothing over. compares: the engines write nothing, and hold what they have
        against the hashes of all pieces.

        share: is given the two buffers that will be handed over, before the first round. Collective over the ranks of
        an engine. settle: returns when all that was handed over here is written; of a `hand_over` that returns before.
        While a round is on the wire, the round before is handed over and
        written, and what this rank sends in the next one is packed. Between two rounds only that has to be done which
        needs what came in the first: copying what is forwarded.

        Raises PushError where a peer is lost. What the engines say is for the caller of `hand_over` to see.
        """
        self.num_syncs += not compares
        # The first push and every `period`-th are verified in full.
        in_full = compares or is_fully_verified(self.num_syncs, self.period)
        lots = range(self.period) if in_full else [self.num_syncs % self.period]
        grids = compute_scale_grids(
            local, self.quantised_params, self.plan.train, self.trainer_rank or 0, self._reduce_max
        )
        received = [self.allocate(self.receive_bytes) for _ in range(2)]
        out = [torch.empty(self.send_bytes, dtype=torch.uint8, device=received[0].device) for _ in range(2)]
        if self.position is not None and self.prepared_rounds:
            share(received)
        order = {"do": "compare" if compares else "write", "version": version, "push": token_hex(8)}

        def give(step: _PreparedRound, buffer: torch.Tensor) -> None:
            for draft, all_slices, dtypes in step.orders if self.position is not None else ():
                slices = [entry if lot in lots else [*entry[:-1], -1] for lot, entry in all_slices]
                hand_over(buffer, order | {"tensor_dtype": dtypes, "slices": slices}, draft)

        for number, step in enumerate(self.prepared_rounds):
            mine, other = number % 2, 1 - number % 2
            if number == 0:
                self._pack(step.sends, local, grids, out[mine], lots)
            self._pack_forwards(step.sends, out[mine], received[other])
            what = f"the push of version {version}, round {number} of {len(self.prepared_rounds)}"
            requests = self._exchange(step, out[mine], received[mine], what)
            if number:
                give(self.prepared_rounds[number - 1], received[other])
            self._pack([step.local], local, grids, received[mine], lots)
            if number + 1 < len(self.prepared_rounds):
                self._pack(self.prepared_rounds[number + 1].sends, local, grids, out[other], lots)
            settle()  # into what was handed over comes the next round
            _wait(requests, what, self.rank)
        if self.prepared_rounds:
            give(self.prepared_rounds[-1], received[(len(self.prepared_rounds) - 1) % 2])

    def _sample_index(self, piece: TensorPiece) -> int:
        """In which of `period` pushes a piece is verified; the same on all ranks."""
        return zlib.crc32(repr(_key(piece)).encode()) % self.period

    def _exchange(
        self, step: _PreparedRound, out: torch.Tensor, received: torch.Tensor, what: str
    ) -> list[tuple[dist.Work, int]]:
        """Start all transfers of a round."""
        takes = [(parcel.message.peer, received[parcel.begin : parcel.end]) for parcel in step.receives]
        gives = [(parcel.message.peer, out[parcel.begin : parcel.end]) for parcel in step.sends]
        return _transfer(takes, gives, what, self.rank)

    def _pack(
        self,
        parcels: Sequence[_PlacedMessage],
        local: Mapping[str, torch.Tensor],
        grids: Grids,
        out: torch.Tensor,
        lots: Container[int],
    ) -> None:
        """Fill parcels with pieces of this rank's shards and, of those that are to be verified, their hashes."""
        boxes: list[copies.Box] = []
        shards: list[copies.Box] = []  # to quantise
        scaled: list[copies.BlockScales] = []
        hashed: list[torch.Tensor] = []
        hash_places: list[int] = []
        of_copies: list[tuple[int, torch.Tensor]] = []
        wholes: dict[str, torch.Tensor] = {}  # `local` may compute a tensor each time it is asked for one
        for parcel in parcels:
            direct = zip(parcel.message.direct, parcel.piece_offsets, parcel.sources, strict=False)
            for number, (piece, place, (name, r0, r1, c0, c1, lot)) in enumerate(direct):
                if not piece.is_scale and name not in wholes:
                    wholes[name] = local[name]
                whole = grids[name, piece.source] if piece.is_scale else wholes[name]
                box = (whole if whole.dim() == 2 else whole[:, None])[r0:r1, c0:c1]
                at = (piece.rows[0], piece.columns[0])
                if WIRE_DTYPES[piece.item_bytes] == FP8:
                    shards.append((box, place))
                    scaled.append(copies.BlockScales(grids[name, piece.source], *at))
                else:
                    box = box.to(WIRE_DTYPES[piece.item_bytes])
                    boxes.append((box, place))
                if lot in lots:
                    # Of what is meant to arrive, not of the buffer that goes on the wire.
                    meant = quantise(box, scaled[-1].grid, *at) if WIRE_DTYPES[piece.item_bytes] == FP8 else box
                    hash_place = parcel.hash_offset // 8 + number
                    if meant is box:
                        hashed.append(meant)
                        hash_places.append(hash_place)
                    else:  # at once, or the quantised copies of a whole round would be there together
                        of_copies.append((hash_place, device_hashes([meant])))
        copies.pack(boxes, out)
        copies.pack_fp8(shards, scaled, out)
        if hashed or of_copies:
            words = out[: len(out) // 8 * 8].view(torch.int64)
            found = [*([device_hashes(hashed)] if hashed else []), *(one for _, one in of_copies)]
            hash_places += [place for place, _ in of_copies]
            words[torch.tensor(hash_places, device=out.device)] = torch.cat(found)

    def _pack_forwards(self, parcels: Sequence[_PlacedMessage], out: torch.Tensor, kept: torch.Tensor) -> None:
        """Fill parcels with pieces to forward and their hashes, from `kept`, the buffer of the round before."""
        boxes: list[copies.Box] = []
        for parcel in parcels:
            to_forward = zip(parcel.message.forward, parcel.forwards, strict=True)
            for number, (piece, (place, hash_place)) in enumerate(to_forward, len(parcel.message.direct)):
                boxes.append((kept[None, place : place + piece.nbytes], parcel.piece_offsets[number]))
                boxes.append((kept[None, hash_place : hash_place + 8], parcel.hash_offset + 8 * number))
        copies.pack(boxes, out)

    def _find_quantised_params(self) -> list[Param]:
        """The parameters of which this rank has parts that the engines are sent in FP8."""
        plan = self.plan
        hf, train, family = plan.hf, plan.train, family_of(plan.hf)
        if plan.assignment.wire != "fp8" or self.trainer_rank is None:
            return []
        share = self.num_experts // train.ep
        first = train.ep_rank(self.trainer_rank) * share
        layers = int(hf["num_hidden_layers"]) + (family.num_mtp_layers(hf) if plan.engine.draft else 0)
        table = [param for layer in range(layers) for param in family.layer(hf, layer, range(first, first + share))]
        return [
            param
            for param in table
            if is_quantised(param)
            and plan.engine.slot_of(param) is not None
            and train.has_param(self.trainer_rank, param, self.num_experts)
        ]

    def _reduce_max(self, tensors: list[torch.Tensor], ranks: Sequence[int]) -> list[torch.Tensor]:
        """See quantise.Combine. Not by a reduction of the transport, for NCCL's maximum may lose a NaN."""
        mine = torch.cat([tensor.reshape(-1) for tensor in tensors])
        peers = self.plan.rank_map.train[list(ranks)].tolist()
        theirs = {rank: torch.empty_like(mine) for rank in peers if rank != self.rank}
        what = "the exchange of scales"
        _wait(_transfer(list(theirs.items()), [(rank, mine) for rank in theirs], what, self.rank), what, self.rank)
        for other in theirs.values():
            mine = torch.maximum(mine, other)
        parts = mine.split([tensor.numel() for tensor in tensors])
        return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]

    def _source(self, piece: TensorPiece) -> tuple[str, int, int, int, int, int]:
        if piece.is_scale:  # each rank has the whole grid
            return (piece.param.megatron, *piece.rows, *piece.columns, self._sample_index(piece))
        assert self.trainer_rank is not None
        box = _locate_piece(self.plan.train.slices_of_rank(self.trainer_rank, piece.param), piece)
        return (piece.param.megatron, *box, self._sample_index(piece))


def _transfer(
    takes: Sequence[tuple[int, torch.Tensor]], gives: Sequence[tuple[int, torch.Tensor]], what: str, rank: int
) -> list[tuple[dist.Work, int]]:
    """Start receiving from and sending to these ranks, a group on NCCL and on gloo as good as one; with each a rank."""
    operations = [dist.P2POp(dist.irecv, tensor, peer) for peer, tensor in takes]
    operations += [dist.P2POp(dist.isend, tensor, peer) for peer, tensor in gives]
    if not operations:
        return []
    peers = [operation.peer for operation in operations]
    try:
        works = dist.batch_isend_irecv(operations)
    except RuntimeError as error:  # a peer that was lost before
        among = ", ".join(map(str, sorted(set(peers))))
        raise WeightSyncError(f"{what} broke off between the ranks {rank} and one of {among}: {error}") from error
    if len(works) == len(peers):
        return list(zip(works, peers, strict=True))
    return [(work, peers[0]) for work in works]  # NCCL has one for the group


def _wait(requests: Sequence[tuple[dist.Work, int]], what: str, rank: int) -> None:
    for request, peer in requests:
        try:
            request.wait()
        except RuntimeError as error:
            raise WeightSyncError(f"{what} broke off between the ranks {rank} and {peer}: {error}") from error


def _to_scale_slices(intervals: Sequence[ShardSlice]) -> list[ShardSlice]:
    """The same in the engine's grid of scales, which it cuts as it does the tensor, as the planner has made sure."""
    return [
        held._replace(start=held.start // BLOCK, stop=-(-held.stop // BLOCK), offset=held.offset // BLOCK)
        for held in intervals
    ]


def _locate_piece(intervals: Sequence[ShardSlice], piece: TensorPiece) -> tuple[int, int, int, int]:
    """Rows and columns of a piece within a local tensor that is made of these intervals."""
    for held in intervals:
        low, high = (piece.rows, piece.columns)[held.dim]
        if held.source == piece.source and held.start <= low and high <= held.stop:
            shift = held.offset - held.start
            rows = [edge + shift * (held.dim == 0) for edge in piece.rows]
            columns = [edge + shift * (held.dim == 1) for edge in piece.columns]
            return rows[0], rows[1], columns[0], columns[1]
    raise AssertionError(f"{name_of(piece.param)} is not here")  # the planner's fault


def name_of(param: Param) -> str:
    return " + ".join(tensor.name for tensor in param.hf)


def _place_messages(
    messages: Sequence[PeerMessage],
    begin: int,
    came: Mapping[Any, tuple[int, int]] | None = None,
    source: Callable[[TensorPiece], tuple[str, int, int, int, int, int]] | None = None,
) -> tuple[list[_PlacedMessage], int]:
    """Lay messages out one after another. came: places of the pieces of the round before, where they are forwarded."""
    found = []
    for message in messages:
        places, hashes = compute_offsets(message.pieces, begin)
        end = hashes + -(-8 * len(places) // ALIGN) * ALIGN
        forwards = [came[_key(piece)] for piece in message.forward] if came is not None else []
        sources = [source(piece) for piece in message.direct] if source is not None else []
        found.append(_PlacedMessage(message, begin, end, places, hashes, sources, forwards))
        begin = end
    return found, begin


def _key(piece: TensorPiece) -> tuple[Any, ...]:
    """What a piece is, without its table row."""
    return (piece.param.hf[piece.source].name, piece.rows, piece.columns, piece.is_scale)
