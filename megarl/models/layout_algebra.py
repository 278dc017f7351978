"""The weight-layout algebra: which slices of which HF tensors form the shard of a tensor parallel rank.

A `Param` is one Megatron parameter with its HF tensors, its `Sharding`, and the `EngineSlot` where SGLang keeps it. A
sharding answers one question: the `ShardSpec` of rank r out of n, a list of intervals to concatenate along one
dimension. Loading, export, weight sync and the dry-run plans all derive from those intervals.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Literal, NamedTuple

import torch

from megarl.config import ConfigError

PADDING = -1  # `Slice.source` of padding rows, which are zeros
VOCAB_MULTIPLE = 128  # Megatron pads the vocabulary to a multiple of this times TP
ENGINE_VOCAB_MULTIPLE = 64  # SGLang pads to a multiple of this, times TP unless TP divides it

FUSED_NORMS = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "self_attention.in_proj.layer_norm_weight": "input_layernorm.weight",
    "self_attention.linear_q_up_proj.layer_norm_weight": "self_attention.q_layernorm.weight",
    "self_attention.linear_kv_up_proj.layer_norm_weight": "self_attention.kv_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}
"""Norms that Transformer Engine fuses into the following linear layer: their names there -> canonical names."""

HFConfig = Mapping[str, Any]  # config.json as plain values

TOWER = "visual."
"""Prefix of the canonical names of a vision tower."""
BEFORE_DECODER = "embedding.", TOWER
"""Prefixes of the canonical names of what precedes the decoder layers, on the first pipeline stage."""


class HFTensor(NamedTuple):
    """A tensor of an HF checkpoint."""

    name: str
    shape: tuple[int, ...]


def matrix_shape(shape: Sequence[int]) -> tuple[int, int]:
    """Return the shape of a tensor taken as a matrix: dim 0, and all others together. A vector has one column."""
    return shape[0], prod(shape[1:])


class Slice(NamedTuple):
    """The interval [start, stop) of HF tensor number `source` along the dimension of its `ShardSpec`."""

    source: int
    start: int
    stop: int


class ShardSpec(NamedTuple):
    """A rank's shard: the concatenation of these slices along `dim`, in this order."""

    dim: int
    slices: tuple[Slice, ...]


class Sharding:
    """How a parameter is sharded. A new sharding defines `split`; `sources` are the shapes of its HF tensors."""

    def split(self, sources: Sequence[tuple[int, ...]], tp: int, rank: int) -> ShardSpec:
        raise NotImplementedError


@dataclass(frozen=True)
class Replicated(Sharding):
    """Every rank holds the full tensor."""

    def split(self, sources: Sequence[tuple[int, ...]], tp: int, rank: int) -> ShardSpec:
        return ShardSpec(0, (Slice(0, 0, sources[0][0]),))


@dataclass(frozen=True)
class Dim0Sharding(Sharding):
    """Equal blocks along dim 0 (column parallel) that never split one of the `num_units` units, such as heads.

    With sources gate and up, a shard is [gate_r; up_r].
    """

    num_units: int
    unit_name: str

    def split(self, sources: Sequence[tuple[int, ...]], tp: int, rank: int) -> ShardSpec:
        blocks = (_block(s, shape[0], self.num_units, self.unit_name, tp, rank) for s, shape in enumerate(sources))
        return ShardSpec(0, tuple(blocks))


@dataclass(frozen=True)
class Dim1Sharding(Sharding):
    """Equal blocks along dim 1 (row parallel) that never split one of the `num_units` units."""

    num_units: int
    unit_name: str

    def split(self, sources: Sequence[tuple[int, ...]], tp: int, rank: int) -> ShardSpec:
        return ShardSpec(1, (_block(0, sources[0][1], self.num_units, self.unit_name, tp, rank),))


@dataclass(frozen=True)
class QKVSharding(Sharding):
    """Sources q, k, v. Dim 0 of a shard is [q.. k v] of each of its query groups in turn. For weights and biases."""

    num_kv_heads: int

    def split(self, sources: Sequence[tuple[int, ...]], tp: int, rank: int) -> ShardSpec:
        local = _units_per_rank(self.num_kv_heads, "num_key_value_heads", tp)
        rows = [shape[0] // self.num_kv_heads for shape in sources]
        groups = range(rank * local, (rank + 1) * local)
        return ShardSpec(0, tuple(Slice(s, g * n, (g + 1) * n) for g in groups for s, n in enumerate(rows)))


@dataclass(frozen=True)
class FusedSharding(Sharding):
    """One source in which HF stores several, one after the other along dim 0, sharded as `inner` shards those.

    units: their relative sizes, such as the numbers of heads of q, k and v.
    """

    inner: Sharding
    units: tuple[int, ...]

    def split(self, sources: Sequence[tuple[int, ...]], tp: int, rank: int) -> ShardSpec:
        rows, *columns = sources[0]
        sizes = [rows // sum(self.units) * count for count in self.units]
        starts = [sum(sizes[:part]) for part in range(len(sizes))]
        dim, slices = self.inner.split([(size, *columns) for size in sizes], tp, rank)
        return ShardSpec(dim, tuple(Slice(0, starts[s] + start, starts[s] + stop) for s, start, stop in slices))


@dataclass(frozen=True)
class GatedQKVSharding(Sharding):
    """Sources q, k, v, where q has a query and a gate for each head in turn, as for Megatron's `attention_output_gate`.

    Dim 0 of a shard is [queries, gates, k, v] of each of its query groups in turn.
    """

    num_heads: int
    num_kv_heads: int

    def split(self, sources: Sequence[tuple[int, ...]], tp: int, rank: int) -> ShardSpec:
        local = _units_per_rank(self.num_kv_heads, "num_key_value_heads", tp)
        size, per_group = sources[1][0] // self.num_kv_heads, self.num_heads // self.num_kv_heads
        slices: list[Slice] = []
        for group in range(rank * local, (rank + 1) * local):
            first_rows = [2 * size * head for head in range(group * per_group, (group + 1) * per_group)]
            slices += [Slice(0, row, row + size) for row in first_rows]
            slices += [Slice(0, row + size, row + 2 * size) for row in first_rows]
            slices += [Slice(source, group * size, (group + 1) * size) for source in (1, 2)]
        return ShardSpec(0, tuple(slices))


class Section(NamedTuple):
    """A part of each group of rows of HF tensor number `source`: `size` rows, from row `first + group * stride` on.

    name: of the tensor for the section in Megatron's checkpoints; empty if they have the parameter in one tensor.
    """

    source: int
    first: int
    size: int
    stride: int
    name: str = ""


@dataclass(frozen=True)
class SectionSharding(Sharding):
    """Equal blocks of `num_groups` groups along dim 0. A shard is the concatenation of its part of each section.

    Sections need not cover the sources, as for an engine that keeps these in several tensors.
    """

    num_groups: int
    unit_name: str
    sections: tuple[Section, ...]

    def split(self, sources: Sequence[tuple[int, ...]], tp: int, rank: int) -> ShardSpec:
        local = _units_per_rank(self.num_groups, self.unit_name, tp)
        slices: list[Slice] = []
        for source, first, size, stride, _ in self.sections:
            starts = [first + group * stride for group in range(rank * local, (rank + 1) * local)]
            if size == stride:  # one contiguous block
                slices.append(Slice(source, starts[0], starts[-1] + size))
            else:
                slices += [Slice(source, start, start + size) for start in starts]
        return ShardSpec(0, tuple(slices))


@dataclass(frozen=True)
class VocabSharding(Sharding):
    """Equal row blocks of the vocabulary padded to `VOCAB_MULTIPLE` x TP. The last ranks may hold only padding."""

    def split(self, sources: Sequence[tuple[int, ...]], tp: int, rank: int) -> ShardSpec:
        return _padded_spec(sources[0][0], padded_vocab(sources[0][0], tp) // tp, rank)


@dataclass(frozen=True)
class EngineQKVSharding(Sharding):
    """SGLang's sharding of q, k, v: a shard is [q_r | k_r | v_r]. KV heads are repeated if fewer than ranks."""

    num_heads: int
    num_kv_heads: int

    def split(self, sources: Sequence[tuple[int, ...]], tp: int, rank: int) -> ShardSpec:
        q = _block(0, sources[0][0], self.num_heads, "num_attention_heads", tp, rank)
        parts, part = _repeat_kv(self.num_kv_heads, tp, rank)
        kv = [_block(s, sources[s][0], self.num_kv_heads, "num_key_value_heads", parts, part) for s in (1, 2)]
        return ShardSpec(0, (q, *kv))


@dataclass(frozen=True)
class EngineKVSharding(Sharding):
    """SGLang's sharding of a vector over all key-value heads, which are repeated if fewer than ranks."""

    num_kv_heads: int

    def split(self, sources: Sequence[tuple[int, ...]], tp: int, rank: int) -> ShardSpec:
        parts, part = _repeat_kv(self.num_kv_heads, tp, rank)
        return ShardSpec(0, (_block(0, sources[0][0], self.num_kv_heads, "num_key_value_heads", parts, part),))


@dataclass(frozen=True)
class EngineVocabSharding(Sharding):
    """SGLang's sharding of the vocabulary: equal row blocks, padded to `ENGINE_VOCAB_MULTIPLE`."""

    def split(self, sources: Sequence[tuple[int, ...]], tp: int, rank: int) -> ShardSpec:
        rows, multiple = sources[0][0], ENGINE_VOCAB_MULTIPLE
        if -(-rows // multiple) * multiple % tp:
            multiple *= tp
        return _padded_spec(rows, -(-rows // multiple) * multiple // tp, rank)


EngineGrid = Literal["attention", "mlp", "shared", "expert", "embedding", "head"]
"""The rank group over which an engine shards a tensor; `reshard.plan.layout.EngineLayout` has their sizes."""


@dataclass(frozen=True)
class EngineSlot:
    """Where SGLang keeps a parameter: in its tensor `name`, from index `offset` along the sharded dimension.

    On the "expert" grid, `name` is a tensor of all local experts, stacked along an extra first dimension.
    """

    name: str
    sharding: Sharding
    grid: EngineGrid
    offset: int = 0
    is_draft: bool = False  # in the engine's draft model, which has the multi-token prediction layers
    is_fp32: bool = False  # in the engine alone, whatever the model's dtype is


@dataclass(frozen=True)
class Param:
    """One Megatron parameter: its canonical name, its HF tensors and its sharding."""

    megatron: str
    """Canonical name, with global layer and expert numbers, as in Megatron's local spec with one MLP per expert."""
    hf: tuple[HFTensor, ...]
    sharding: Sharding
    slot: EngineSlot | None = None  # None if the engine does not have it, such as a value head
    expert: int | None = None  # index of its routed expert; such a parameter is on the expert grid
    dtype: torch.dtype | None = None  # fixed in trainer and engine, whatever the model's dtype is
    is_buffer: bool = False
    more_slots: tuple[EngineSlot, ...] = ()
    """Further slots, if the engine keeps the parameter in several tensors, each with some of the HF tensors."""

    @property
    def is_sent_as_fp32(self) -> bool:
        """Whether the engine has it in FP32, whatever the model's dtype is."""
        return self.dtype == torch.float32 or (self.slot is not None and self.slot.is_fp32)

    def by_slot(self) -> list[Param]:
        """Return this parameter once for each of its slots, with only that slot."""
        if not self.more_slots:
            return [self]
        return [replace(self, slot=slot, more_slots=()) for slot in (self.slot, *self.more_slots)]

    @property
    def size(self) -> int:
        """Number of elements over all ranks, without padding."""
        return sum(prod(tensor.shape) for tensor in self.hf)


def split_param(param: Param, tp: int, rank: int) -> ShardSpec:
    """Return the shard of tensor parallel rank `rank` of `tp`; for a routed expert, these are the expert TP's."""
    return split_with(param, param.sharding, tp, rank)


def split_with(param: Param, sharding: Sharding, size: int, rank: int) -> ShardSpec:
    """Return the shard of rank `rank` of `size` under `sharding`. Raises IndivisibleError if it does not divide."""
    if not 0 <= rank < size:
        raise ValueError(f"rank {rank} of {size} tensor parallel ranks")
    try:
        return sharding.split([tensor.shape for tensor in param.hf], size, rank)
    except IndivisibleError as error:
        raise IndivisibleError(error.reason, " + ".join(tensor.name for tensor in param.hf)) from None


def local_shape(param: Param, tp: int, rank: int) -> tuple[int, ...]:
    """Return the shape of the shard of `rank`, padding included."""
    dim, slices = split_param(param, tp, rank)
    shape = list(param.hf[0].shape)
    shape[dim] = sum(s.stop - s.start for s in slices)
    return tuple(shape)


def shard(param: Param, tensors: Mapping[str, torch.Tensor], tp: int, rank: int) -> torch.Tensor:
    """Return the shard of `rank`, a new contiguous tensor, from the full HF tensors by name."""
    return assemble_shard(
        param, tp, rank, lambda name, dim, start, stop: tensors[name].narrow(dim, start, stop - start)
    )


def assemble_shard(
    param: Param, tp: int, rank: int, read: Callable[[str, int, int, int], torch.Tensor]
) -> torch.Tensor:
    """Return the shard of `rank`, a new contiguous tensor. read: (HF name, dim, start, stop) -> that slice."""
    dim, slices = split_param(param, tp, rank)
    parts: list[torch.Tensor] = []
    for source, start, stop in slices:
        if source == PADDING:
            part = parts[-1] if parts else read(param.hf[0].name, dim, 0, 1)
            parts.append(part.new_zeros(*part.shape[:dim], stop - start, *part.shape[dim + 1 :]))
        else:
            parts.append(read(param.hf[source].name, dim, start, stop))
    return torch.cat(parts, dim=dim)


def unshard(param: Param, shards: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the full HF tensors by name from all ranks' shards, in rank order. The bitwise inverse of `shard`."""
    full = {t.name: torch.empty(t.shape, dtype=shards[0].dtype, device=shards[0].device) for t in param.hf}
    for rank, local in enumerate(shards):
        expected = local_shape(param, len(shards), rank)
        if tuple(local.shape) != expected:
            shape = tuple(local.shape)
            raise ValueError(f"{param.megatron}: the shard of rank {rank} has shape {shape}, not {expected}")
        dim, slices = split_param(param, len(shards), rank)
        offset = 0
        for source, start, stop in slices:
            size = stop - start
            if source != PADDING:
                full[param.hf[source].name].narrow(dim, start, size).copy_(local.narrow(dim, offset, size))
            offset += size
    return full


def layer_of(megatron: str) -> int | None:
    """Return the global layer of a canonical name, or None outside of the decoder's layers."""
    parts = megatron.split(".", 3)
    return int(parts[2]) if parts[:2] == ["decoder", "layers"] else None


def padded_vocab(vocab_size: int, tp: int) -> int:
    """Return the rows of Megatron's embedding and output layer over all ranks."""
    multiple = VOCAB_MULTIPLE * tp
    return -(-vocab_size // multiple) * multiple


class IndivisibleError(ConfigError):
    """A tensor does not divide by the number of ranks. reason: without the tensor's name."""

    def __init__(self, reason: str, name: str = "") -> None:
        super().__init__(f"{name} cannot be cut: {reason}")
        self.reason = reason


def _units_per_rank(count: int, unit_name: str, tp: int) -> int:
    if count % tp:
        sizes = ", ".join(str(n) for n in range(1, count + 1) if count % n == 0)
        problem = f"{unit_name}={count} does not divide by tensor parallel size {tp}"
        raise IndivisibleError(f"{problem}; sizes that do: {sizes}")
    return count // tp


def _block(source: int, length: int, count: int, unit_name: str, tp: int, rank: int) -> Slice:
    block = _units_per_rank(count, unit_name, tp) * (length // count)
    return Slice(source, rank * block, (rank + 1) * block)


def _repeat_kv(num_kv_heads: int, tp: int, rank: int) -> tuple[int, int]:
    """Return the number of different shards of key-value heads on SGLang's ranks, and which of them `rank` has."""
    ranks_per_group = max(1, tp // num_kv_heads)
    if tp > num_kv_heads and tp % num_kv_heads:
        raise IndivisibleError(f"num_key_value_heads={num_kv_heads} cannot be repeated over {tp} tensor parallel ranks")
    return tp // ranks_per_group, rank // ranks_per_group


def _padded_spec(rows: int, local: int, rank: int) -> ShardSpec:
    """Return block `rank`, of `local` rows, of a vocabulary with `rows` rows followed by padding."""
    start, stop = min(rows, rank * local), min(rows, (rank + 1) * local)
    slices = (Slice(0, start, stop), Slice(PADDING, 0, local - (stop - start)))
    return ShardSpec(0, tuple(s for s in slices if s.stop > s.start))


class Chunk(NamedTuple):
    """A rectangular part of a tensor that is a contiguous run of its elements, as distributed checkpoints store it."""

    offset: tuple[int, ...]
    sizes: tuple[int, ...]


def range_chunks(shape: Sequence[int], start: int, stop: int) -> Iterator[Chunk]:
    """Split the elements [start, stop) of a tensor, in row-major order, into at most 2 len(shape) - 1 chunks.

    >>> [(*chunk,) for chunk in range_chunks((3, 4), 2, 12)]
    [((0, 2), (1, 2)), ((1, 0), (2, 4))]
    """
    if start >= stop:
        return
    if len(shape) < 2:
        yield Chunk((start,) * len(shape), (stop - start,) * len(shape))
        return
    row = prod(shape[1:])

    def row_chunks(number: int) -> Iterator[Chunk]:
        low, high = max(0, start - number * row), min(row, stop - number * row)
        for offset, sizes in range_chunks(shape[1:], low, high):
            yield Chunk((number, *offset), (1, *sizes))

    first, last = -(-start // row), stop // row  # of the whole rows
    if start % row:
        yield from row_chunks(first - 1)
    if first < last:
        yield Chunk((first, *[0] * (len(shape) - 1)), (last - first, *shape[1:]))
    if stop % row and first <= last:
        yield from row_chunks(last)
