"""A micro-batch in Megatron's format, and the shift from a model's output positions to the tokens they are about.

Sequences are packed end to end: P tokens with padding, of which a context parallel rank has the P / cp that
`parallel/context_parallel.py` assigns to it. Padding follows each sequence, where causal attention ignores it, or all
of them, as a sequence of its own. Each pipeline stage copies to its device only what it needs.

Of a sequence that begins like another one, only the tokens after their common prefix are packed
(`data/shared_prefixes.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from math import lcm
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams

from megarl.config.strict import ConfigError
from megarl.data.shared_prefixes import plan_attention, skipped_tokens, token_paths
from megarl.megatron.routing_replay import ReplayShard
from megarl.models.sparse_indices import UNUSED, select
from megarl.parallel.context_parallel import zigzag
from megarl.types import TOKEN_COLUMNS, Image, SamplingMask, TrainBatch, mrope_positions, unpack_images
from megarl.types.batch import REQUIRED_COLUMNS, get_declared_columns


@dataclass(frozen=True)
class VisionBatch:
    """Positions and images of a micro-batch. Tensors are on the host."""

    mrope: torch.Tensor  # [3, P] int64: time, row and column of each token of the whole micro-batch
    images: tuple[Image, ...]  # with starts in the whole micro-batch
    image_rows: torch.Tensor  # [P / cp] int64, of this rank's tokens: index among all image tokens, or -1


def make_vision_batch(
    batch: TrainBatch, positions: torch.Tensor, cu_seqlens: torch.Tensor, local: torch.Tensor, merge: int
) -> VisionBatch:
    """Build the positions and images of a micro-batch whose sequences start at `cu_seqlens`.

    positions: [P], of tokens in their sequences. local: [P / cp], positions of this rank's tokens in the micro-batch.
    merge: patches along a side of the square that an image token stands for.
    """
    mrope = positions.expand(3, -1).clone()
    rows = torch.full_like(positions, -1)
    images: list[Image] = []
    count = 0
    for start, length, packed in zip(cu_seqlens.tolist(), batch.lengths.tolist(), batch.images or (), strict=False):
        own = unpack_images(packed)
        mrope[:, start : start + length] = mrope_positions(length, own, merge)
        for image in own:
            rows[start + image.start : start + image.stop] = torch.arange(count, count + image.num_tokens)
            count += image.num_tokens
            images.append(replace(image, start=start + image.start))
    return VisionBatch(mrope, tuple(images), rows[local])


@dataclass(frozen=True)
class MicroBatch:
    """Some sequences of a batch. Tensors are on the host."""

    indices: list[int]  # of the sequences in the whole batch
    batch: TrainBatch  # those sequences, T tokens, without padding and records; T may be 0
    tokens: torch.Tensor  # [1, P / cp] int64, of this context parallel rank
    positions: torch.Tensor  # [1, P / cp] int64
    next_tokens: torch.Tensor  # [1 + MTP layers, P / cp] int64, the sequence's following tokens; 0 where there is none
    context_indices: torch.Tensor  # [cp, P / cp] int64, positions in the whole micro-batch of each rank's tokens
    unpadded_indices: torch.Tensor  # [T] int64, positions in the whole micro-batch of the tokens of `batch`
    sequence_positions: torch.Tensor  # [T] int64, positions of these tokens in their sequences
    packed: PackedSeqParams  # on the device
    vision: VisionBatch | None  # of a model with a vision tower
    routing: torch.Tensor | None  # [P / cp / tp, layers of the chunk, topk] int16, like the tokens; -1 in the padding
    sparse_indices: torch.Tensor | None  # [P / cp, layers of the chunk, topk] int32, see `sparse_indices.py`
    adapter: torch.Tensor | None  # [P / cp] int64, the number of each token's adapter, -1 in the padding
    sampling_mask: SamplingMask | None  # [P / cp] of each token's next one; stays on the host
    device: torch.device
    _copies: dict[str, torch.Tensor] = field(default_factory=dict, compare=False, repr=False)

    def on_device(self, name: str) -> torch.Tensor:
        """Return one of the tensors above on the device. The first call copies it."""
        if name not in self._copies:
            source = self if hasattr(self, name) else self.vision
            self._copies[name] = getattr(source, name).to(self.device)
        return self._copies[name]

    def loss_batch(self, loss: Callable[..., Any]) -> TrainBatch:
        """Copy to the device what the loss receives: the columns that it declares with `@reads`, or all of them.

        Other columns are None.
        """
        declared = get_declared_columns(loss)
        hidden = set() if declared is None else set(TOKEN_COLUMNS) - set(REQUIRED_COLUMNS) - set(declared)
        tensors = {name: value for name, value in vars(self.batch).items() if isinstance(value, torch.Tensor)}
        return self.batch.with_(
            **{name: None if name in hidden else value.to(self.device) for name, value in tensors.items()}
        )

    def align(self, emitted: torch.Tensor, offset: int = 1) -> torch.Tensor:
        """Shift [P] values, index t about token t + offset, to [T], index t about token t; 0 where there is none."""
        shifted = emitted[self.on_device("unpadded_indices").roll(offset)]
        return torch.where(self.on_device("sequence_positions") >= offset, shifted, torch.zeros_like(shifted))


@contextmanager
def explain_hidden_columns(loss: Callable[..., Any]) -> Iterator[None]:
    """Raise ConfigError if the loss, called in the block, fails on a column that it has not declared, which is None."""
    try:
        yield
    except (AssertionError, AttributeError, TypeError) as error:
        is_about_none = isinstance(error, AssertionError) or "NoneType" in str(error)
        if (declared := get_declared_columns(loss)) is None or not is_about_none:
            raise
        names = ", ".join(f'"{name}"' for name in declared)
        reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        raise ConfigError(
            f"the loss raised {reason}; it is marked @reads({names}), and other columns of the batch are None: name "
            "every column that it reads"
        ) from error


def padding_units(tp: int, cp: int) -> tuple[int, int]:
    """Return of what the tokens of each sequence, and of a micro-batch over all context parallel ranks, are a multiple.

    tp: of what the tokens of a context parallel rank are a multiple.
    """
    return (2 * cp, cp * lcm(2, tp)) if cp > 1 else (1, tp)


def make_micro_batch(
    batch: TrainBatch,
    indices: Sequence[int],
    device: torch.device,
    tp: int = 1,
    cp: int = 1,
    cp_rank: int = 0,
    mtp_layers: int = 0,
    replayed: ReplayShard | None = None,
    indexed_layers: Sequence[int] | None = None,
    merge: int = 0,
    shares_prefixes: bool = False,
    repeated: int = 1,
) -> MicroBatch:
    """Build a micro-batch of the sequences in `batch`, all of them local; without sequences it is all padding.

    P is at least 1, and each rank's part is a multiple of `tp`, for sequence parallelism; with cp > 1 every sequence is
    padded to a multiple of 2 cp.

    indices: the sequences' numbers in the whole batch.
    replayed: the model's share of the routing records; None for a model that routes for itself.
    indexed_layers: the layers of the records of sparse attention indices that it replays; None for none.
    merge: patches along a side of the square that an image token stands for; 0 for a model of text alone.
    shares_prefixes, repeated: see `shared_prefixes.skipped_tokens`.
    """
    unit, multiple = padding_units(tp, cp)
    skipped = skipped_tokens(batch, repeated) if shares_prefixes else [0] * batch.num_sequences
    computed = [length - skip for length, skip in zip(batch.lengths.tolist(), skipped, strict=True)]
    lengths = [-(-length // unit) * unit for length in computed]
    padding = max(1, -(-sum(lengths) // multiple)) * multiple - sum(lengths)
    lengths += [padding] if padding else []
    sizes = torch.tensor(lengths)
    cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)])
    positions = torch.arange(int(cu_seqlens[-1])) - torch.repeat_interleave(cu_seqlens[:-1], sizes)
    tokens = torch.zeros(len(positions), dtype=torch.int64)
    paths = None
    if any(skipped):
        starts = torch.tensor([*skipped, *([0] if padding else [])])
        positions += torch.repeat_interleave(starts, sizes)
        paths = token_paths(batch, cu_seqlens.tolist(), skipped)
        unpadded, token_positions = torch.cat(paths), batch.positions
        tokens[unpadded] = batch.tokens.long()
    elif cp == 1:  # all padding is at the end
        unpadded, token_positions = torch.arange(len(batch.tokens)), positions[: len(batch.tokens)]
        tokens[: len(unpadded)] = batch.tokens
    else:
        token_positions = batch.positions
        unpadded = cu_seqlens[batch.sequence_ids] + token_positions
        tokens[unpadded] = batch.tokens.long()
    next_tokens = torch.stack([tokens.roll(-by) for by in range(1, 2 + mtp_layers)])
    if batch.targets is not None:
        if any(skipped):
            raise ValueError("sequences with targets of their own share no prefix; leave TrainBatch.prefixes unset")
        targets = torch.zeros_like(tokens)
        targets[unpadded] = batch.targets.long()
        next_tokens[0] = targets.roll(-1)
    for by in range(1, 2 + mtp_layers):  # the last `by` tokens of a sequence have no token that far ahead
        next_tokens[by - 1 :, (cu_seqlens[1:] - by)[sizes >= by]] = 0
    shard_indices = zigzag(cu_seqlens, cp)
    local: Any = shard_indices[cp_rank] if cp > 1 else slice(None)
    offsets = cu_seqlens.to(device=device, dtype=torch.int32)
    vision = make_vision_batch(batch, positions, cu_seqlens, shard_indices[cp_rank], merge) if merge else None
    if batch.images is not None and not merge:
        raise ConfigError("the batch has images, but the model of model.path has no vision tower")
    routing = None
    if batch.routing is not None and replayed is not None:
        record_lengths = torch.tensor([len(record) for record in batch.routing], dtype=torch.int64)
        has_record = token_positions < record_lengths[batch.sequence_ids]
        rows = torch.full_like(tokens, -1)
        rows[unpadded[has_record]] = torch.arange(int(record_lengths.sum()))
        records = [record for record in batch.routing if len(record)]  # empty ones may have other numbers of layers
        no_records = torch.zeros((0, len(replayed.layers), 1), dtype=torch.uint8)
        routing = replayed.select(torch.cat(records) if records else no_records, rows[local])
    sparse_indices = None
    if batch.sparse_indices is not None and indexed_layers is not None:
        records = [record for record in batch.sparse_indices if len(record)]
        record_lengths = torch.tensor([len(record) for record in batch.sparse_indices], dtype=torch.int64)
        first = records[0].shape[2] if records else 0  # earlier tokens see all keys and have no record
        after = token_positions - first
        has_record = (after >= 0) & (after < record_lengths[batch.sequence_ids])
        rows = torch.full_like(tokens, -1)
        rows[unpadded[has_record]] = torch.arange(int(record_lengths.sum()))
        if records:
            sparse_indices = select(torch.cat(records), rows[local], indexed_layers)
            is_used = torch.zeros(len(tokens), dtype=torch.bool)
            is_used[unpadded] = token_positions + 1 < batch.lengths[batch.sequence_ids]
            sparse_indices[~is_used[local]] = UNUSED
    adapter = None
    if batch.adapter is not None:
        adapter = torch.full_like(tokens, -1)
        adapter[unpadded] = batch.adapter
        adapter = adapter[local]
    sampling_mask = None
    if batch.sampling_mask is not None:
        rows = torch.full_like(tokens, -1)
        has_previous = token_positions > 0
        rows[unpadded.roll(1)[has_previous]] = torch.arange(len(token_positions))[has_previous]
        all_masks = SamplingMask.concat([SamplingMask.unrestricted(0), *batch.sampling_mask])
        sampling_mask = all_masks.index_select(rows[local])
    longest = int(positions.max()) + 1
    packed = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=offsets,
        cu_seqlens_kv=offsets,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )
    if paths is not None:
        offsets.token_positions = positions[local].to(device)  # type: ignore[attr-defined]  # `apply_packed_rope`
        packed.shared_prefixes = plan_attention(paths, skipped, cu_seqlens.tolist(), cp, cp_rank, device)
    is_token = torch.zeros(len(tokens), dtype=torch.bool)
    is_token[unpadded] = True
    packed.real_token_mask_q = is_token[local].to(device)  # for the loss of sparse attention's indexers
    return MicroBatch(
        indices=list(indices),
        batch=batch.with_(routing=None, sparse_indices=None, sampling_mask=None, images=None),
        tokens=tokens[None, local],
        positions=positions[None, local],
        next_tokens=next_tokens[:, local],
        context_indices=shard_indices,
        unpadded_indices=unpadded,
        sequence_positions=token_positions,
        packed=packed,
        vision=vision,
        routing=routing,
        sparse_indices=sparse_indices,
        adapter=adapter,
        sampling_mask=sampling_mask,
        device=device,
    )
