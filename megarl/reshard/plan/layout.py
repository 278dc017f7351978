"""Layouts: where every tensor lies on the trainer's ranks and on the engines' ranks, as plain data.

Everything that the reshard moves is an intersection of `ShardSlice`s of both sides. The checks before a weight sync
compare the shards, the engine's tensors and the plans of all ranks with the layouts.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from megarl.config import ConfigError
from megarl.models import fp8, int4
from megarl.models.layout_algebra import (
    BEFORE_DECODER,
    PADDING,
    EngineGrid,
    EngineSlot,
    Param,
    ShardSpec,
    layer_of,
    local_shape,
    split_with,
)

Wire = Literal["bf16", "fp32", "fp8", "int4"]
"""Format of the weights that are sent."""


class Plane(NamedTuple):
    """One of the matrices that a parameter is sent as: its values, or their scales.

    An element of it stands for a block of `rows` x `columns` elements of the parameter. suffix: of the engine's name.
    """

    suffix: str
    rows: int
    columns: int
    dtype: torch.dtype

    def scale(self, interval: ShardSlice) -> ShardSlice:
        """Return an interval of elements of the parameter as one of this plane, with every block that it overlaps."""
        source, dim, start, stop, offset = interval
        unit = (self.rows, self.columns)[dim]
        return ShardSlice(source, dim, start // unit, -(-stop // unit), offset // unit)

    def shape(self, rows: int, columns: int) -> tuple[int, int]:
        """Return the shape of this plane of a matrix of this shape."""
        return -(-rows // self.rows), -(-columns // self.columns)


_FP8 = (
    Plane("", 1, 1, fp8.FP8),
    Plane(fp8.SCALE_SUFFIX, fp8.BLOCK, fp8.BLOCK, torch.float32),
)
_INT4 = (
    Plane(int4.PACKED_SUFFIX, 1, 2, torch.uint8),
    Plane(int4.SCALE_SUFFIX, 1, int4.GROUP, torch.bfloat16),
)
_BF16, _FP32 = (Plane("", 1, 1, torch.bfloat16),), (Plane("", 1, 1, torch.float32),)


def planes(param: Param, wire: Wire) -> tuple[Plane, ...]:
    """Return the planes of a parameter on the wire: the values, and their scales if it is quantised."""
    if wire == "fp8" and fp8.is_quantised(param):
        return _FP8
    if wire == "int4" and int4.is_quantised(param):
        return _INT4
    return _FP32 if wire == "fp32" or param.is_sent_as_fp32 else _BF16


class ShardSlice(NamedTuple):
    """An interval of an HF tensor within a local tensor.

    Indices [start, stop) along `dim` of the Param's HF tensor number `source` are stored from `offset` on along `dim`
    of the local tensor. The other dimensions are whole.
    """

    source: int
    dim: int
    start: int
    stop: int
    offset: int


@dataclass(frozen=True)
class TrainLayout:
    """Megatron's ranks, in the order tp-cp-ep-dp-pp, the first fastest. Experts have a separate grid, etp-ep-edp, which
    ignores tp and cp.

    stages: global numbers of the decoder layers on each pipeline stage. Layers of multi-token prediction are numbered
    after the decoder's and lie on the last stage. How the layers were divided (uneven, interleaved, custom) makes no
    difference.
    ranks: job ranks of the trainer's ranks, in this order; 0 ... world - 1 if empty. All methods except `trainer_rank`
    take the trainer's own numbering, which always starts at 0.
    """

    world: int
    tp: int
    ep: int
    stages: tuple[tuple[int, ...], ...]
    etp: int = 1
    cp: int = 1
    ranks: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        _check_ranks(self.ranks, "trainer")
        if self.ranks and len(self.ranks) != self.world:
            raise ConfigError(f"a layout of {self.world} trainer ranks cannot be placed on {len(self.ranks)} ranks")
        for size, of in ((self.tp * self.cp, "tp x cp"), (self.ep * self.etp, "ep x etp")):
            if self.world % (self.pp * size):
                raise ConfigError(
                    f"{of} x pp = {size} x {self.pp} does not divide the {self.world} ranks of the trainer"
                )

    @property
    def pp(self) -> int:
        return len(self.stages)

    @property
    def stage_ranks(self) -> int:
        """Number of ranks of one pipeline stage."""
        return self.world // self.pp

    def trainer_rank(self, rank: int) -> int | None:
        """Convert a job rank to the trainer's numbering; None if it does not train."""
        ranks = self.ranks or range(self.world)
        return ranks.index(rank) if rank in ranks else None

    def stage_of(self, param: Param) -> int:
        """Return the stage of a parameter: the first for what precedes the decoder, the last for what follows it."""
        layer = layer_of(param.megatron)
        if layer is None:
            return 0 if param.megatron.startswith(BEFORE_DECODER) else self.pp - 1
        for stage, layers in enumerate(self.stages):
            if layer in layers:
                return stage
        raise ConfigError(f"layer {layer} is not on any pipeline stage")

    def owner_of(self, param: Param, num_experts: int) -> tuple[int, int | None]:
        """Return the stage of a parameter, and the expert parallel rank of its expert, None for other parameters."""
        return self.stage_of(param), None if param.expert is None else param.expert // (num_experts // self.ep)

    def num_shards(self, expert: bool) -> int:
        """Return the number of shards of a parameter."""
        return self.etp if expert else self.tp

    def shard_index(self, rank: int, expert: bool) -> int:
        """Return which of these shards a rank has."""
        return rank % self.stage_ranks % self.num_shards(expert)

    def ep_rank(self, rank: int) -> int:
        return rank % self.stage_ranks // self.etp % self.ep

    def has_param(self, rank: int, param: Param, num_experts: int) -> bool:
        """Return whether a rank has a shard of this parameter."""
        stage, ep_rank = self.owner_of(param, num_experts)
        return rank // self.stage_ranks == stage and ep_rank in (None, self.ep_rank(rank))

    def slices_of_rank(self, rank: int, param: Param) -> list[ShardSlice]:
        """Return the slices of a rank that has a shard of the parameter."""
        return self.slices_of_shard(self.shard_index(rank, param.expert is not None), param)

    def slices_of_shard(self, part: int, param: Param) -> list[ShardSlice]:
        """Return the slices of shard `part`."""
        return _to_shard_slices(split_with(param, param.sharding, self.num_shards(param.expert is not None), part))


@dataclass(frozen=True)
class EngineLayout:
    """SGLang's ranks: engine instance e has engine ranks e * tp ... (e + 1) * tp - 1, with one engine process per rank.

    tp: ranks of an engine. ep: expert parallel size; the experts' tensor parallel size is tp / ep.
    dp: replicas of attention within an engine (DP attention); attention's tensor parallel size is tp / dp.
    mlp_tp, head_tp, shared_tp: tensor parallel sizes of dense MLPs, the output layer and the shared experts if they
    differ from tp, as with DP attention; 0 means tp. SGLang has a switch for each.
    experts: layer -> the logical expert in each of its physical slots (EPLB, `expert_placement.py`); in order if not
    listed. None stands for the layers of a draft model.
    fuse_shared: the shared expert is one more slot at the end of the experts' tensors.
    draft: the engine has the multi-token prediction layers, in a draft model.
    ranks: job ranks of the engines' ranks, one engine after another; the trainer's if empty.
    """

    tp: int
    ep: int = 1
    dp: int = 1
    mlp_tp: int = 0
    head_tp: int = 0
    shared_tp: int = 0
    experts: Mapping[int | None, tuple[int, ...]] = field(default_factory=dict)
    fuse_shared: bool = False
    draft: bool = False
    ranks: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        _check_ranks(self.ranks, "engines")
        for name in ("ep", "dp", "mlp_tp", "head_tp", "shared_tp"):
            if self.tp % (getattr(self, name) or self.tp):
                raise ConfigError(f"engine {name}={getattr(self, name)} does not divide the engine's tp={self.tp}")

    def num_shards(self, grid: EngineGrid) -> int:
        """Return the number of shards of the tensors of a grid."""
        sizes = {
            "attention": self.tp // self.dp,
            "mlp": self.mlp_tp or self.tp,
            "shared": self.shared_tp or self.tp,
            "expert": self.tp // self.ep,
            "embedding": self.tp // self.dp,
            "head": self.head_tp or self.tp,
        }
        return sizes[grid]

    def shard_index(self, position: int, grid: EngineGrid) -> int:
        """Return which of these shards the engine's rank `position` has."""
        return position % self.num_shards(grid)

    def slot_of(self, param: Param) -> EngineSlot | None:
        """Return where the engine stores a parameter; None if it does not have it."""
        slot = param.slot
        if slot is None or (slot.is_draft and not self.draft):
            return None
        if self.fuse_shared and is_shared_expert(slot.name):
            stack, _, matrix = slot.name.replace(".shared_expert.", ".shared_experts.").partition(".shared_experts.")
            name = "w13_weight" if matrix.startswith("gate_up") else "w2_weight"
            return replace(slot, name=f"{stack}.experts.{name}", grid="expert")
        return slot

    def expert_indices(self, position: int, param: Param, num_experts: int) -> list[int]:
        """Return every index of this expert in a rank's stacked tensor; [0] for tensors that are not stacked."""
        slot = self.slot_of(param)
        if slot is None or slot.grid != "expert":
            return [] if slot is None else [0]
        local = self.experts_at(position, layer_of(param.megatron), num_experts)
        if param.expert is None:
            return [len(local)]  # the fused shared expert
        return [i for i, logical in enumerate(local) if logical == param.expert]

    def experts_at(self, position: int, layer: int | None, num_experts: int) -> tuple[int, ...]:
        """Return the routed experts of a layer on a rank, in the order of its stacked tensors."""
        physical = self.experts.get(layer) or tuple(range(num_experts))
        if len(physical) % self.ep:
            raise ConfigError(
                f"the {len(physical)} experts of layer {layer} do not divide by the engine's ep={self.ep}"
            )
        experts_per_rank = len(physical) // self.ep
        first = position // (self.tp // self.ep) * experts_per_rank
        return physical[first : first + experts_per_rank]

    def slices_of_rank(self, position: int, param: Param) -> list[ShardSlice]:
        """Return the slices that an engine rank needs of a parameter that it has."""
        slot = self.slot_of(param)
        return [] if slot is None else self.slices_of_shard(self.shard_index(position, slot.grid), param)

    def slices_of_shard(self, part: int, param: Param) -> list[ShardSlice]:
        """Return the slices of shard `part`."""
        slot = self.slot_of(param)
        assert slot is not None
        intervals = _to_shard_slices(split_with(param, slot.sharding, self.num_shards(slot.grid), part))
        return [interval._replace(offset=interval.offset + slot.offset) for interval in intervals]


def is_shared_expert(name: str) -> bool:
    """Return whether an engine's tensor is a matrix of a shared expert, which Qwen's models name in the singular."""
    return ".shared_experts." in name or ".shared_expert." in name


def _check_ranks(ranks: tuple[int, ...], side: str) -> None:
    duplicates = sorted(rank for rank, count in Counter(ranks).items() if count > 1)
    if duplicates:
        raise ConfigError(f"the ranks of the {side} name rank {duplicates[0]} more than once")
    if ranks and min(ranks) < 0:
        raise ConfigError(f"the ranks of the {side} name rank {min(ranks)}; ranks begin at 0")


def _to_shard_slices(spec: ShardSpec) -> list[ShardSlice]:
    """Convert slices to ShardSlices with local offsets, merging slices that are adjacent on both sides."""
    merged: list[ShardSlice] = []
    offset = 0
    for source, start, stop in spec.slices:
        if source != PADDING:
            last = merged[-1] if merged else None
            if last and (last.source, last.stop) == (source, start) and last.offset + last.stop - last.start == offset:
                merged[-1] = last._replace(stop=stop)
            else:
                merged.append(ShardSlice(source, spec.dim, start, stop, offset))
        offset += stop - start
    return merged


def even_stages(num_layers: int, pp: int, counts: Sequence[int] = ()) -> tuple[tuple[int, ...], ...]:
    """Divide consecutive layers over stages: `counts` per stage, or evenly, with larger stages first."""
    counts = counts or [num_layers // pp + (stage < num_layers % pp) for stage in range(pp)]
    if len(counts) != pp or sum(counts) != num_layers or min(counts) < 0:
        raise ConfigError(f"{list(counts)} are not layer counts of {pp} stages with {num_layers} in total")
    starts = [sum(counts[:stage]) for stage in range(pp)]
    return tuple(tuple(range(start, start + count)) for start, count in zip(starts, counts, strict=True))


def engine_shapes(
    params: Iterable[Param], engine: EngineLayout, position: int, num_experts: int
) -> dict[str, tuple[int, ...]]:
    """Return the shapes, padding included, of the tensors in which an engine rank stores these parameters, by name."""
    shapes: dict[str, tuple[int, ...]] = {}
    for param in params:
        slot = engine.slot_of(param)
        if slot is None:
            continue
        dim, slices = split_with(
            param, slot.sharding, engine.num_shards(slot.grid), engine.shard_index(position, slot.grid)
        )
        shape = list(param.hf[0].shape)
        shape[dim] = slot.offset + sum(piece.stop - piece.start for piece in slices)
        if slot.grid == "expert":
            routed = engine.experts_at(position, layer_of(param.megatron), num_experts)
            shape.insert(0, len(routed) + engine.fuse_shared)
        # If several parameters share a tensor, the last one determines its size.
        shapes[slot.name] = max(shapes.get(slot.name, ()), tuple(shape))
    return shapes


Ints = NDArray[np.int64]


class RankMap(NamedTuple):
    """Job ranks of both sides.

    world: number of ranks that a plan counts, in whole nodes: rank r is on node r // ranks_per_node. Later job ranks
    take no part.
    train [trainer ranks]: job rank of each trainer rank. engine [ranks of all engines]: likewise, one engine after
    another.
    """

    world: int
    ranks_per_node: int
    train: Ints
    engine: Ints

    def engine_rank(self, rank: int) -> int | None:
        """Convert a job rank to the numbering of all engine ranks; None if it serves no engine."""
        matches = np.flatnonzero(self.engine == rank)
        return int(matches[0]) if len(matches) else None

    @property
    def participants(self) -> list[int]:
        """Ranks of either side, ascending."""
        return [int(rank) for rank in np.union1d(self.train, self.engine)]

    @property
    def is_colocated(self) -> bool:
        """True if both sides are the same ranks, in the same order."""
        return np.array_equal(self.train, self.engine)


def build_rank_map(train: TrainLayout, engine: EngineLayout, ranks_per_node: int) -> RankMap:
    """Build the rank map. Raises ConfigError if engines do not divide their ranks, or the job is not whole nodes."""
    train_ranks = np.array(train.ranks or range(train.world), dtype=np.int64)
    engine_ranks = np.array(engine.ranks, dtype=np.int64) if engine.ranks else train_ranks
    if len(engine_ranks) % engine.tp:
        owner = "engines" if engine.ranks or train.ranks else "job"
        raise ConfigError(f"the engine's tp={engine.tp} does not divide the {len(engine_ranks)} ranks of the {owner}")
    world = int(max(train_ranks.max(), engine_ranks.max())) + 1
    ranks_in_node = min(ranks_per_node, world)
    if world % ranks_in_node:
        if not (train.ranks or engine.ranks):
            raise ConfigError(f"{world} ranks are not whole nodes of {ranks_per_node}")
        world = -(-world // ranks_in_node) * ranks_in_node  # the other ranks of the last node have other roles
    return RankMap(world, ranks_in_node, train_ranks, engine_ranks)


TIED_EMBEDDING = "embedding.word_embeddings.weight"
"""Name of the embedding's copy on the last stage, for a tied head or to train MTP layers. It is not sent."""

EngineTensors = Mapping[str, tuple[str, Sequence[int]]]
"""An engine's tensors: name -> (dtype, shape)."""


def find_shard_problems(
    local: Mapping[str, torch.Tensor], params: Iterable[Param], train: TrainLayout, rank: int, num_experts: int
) -> list[str]:
    """List how a rank's shards (canonical name -> tensor) differ from the layout table; one line each.

    rank: job rank; one that does not train has no shards.
    """
    problems, expected, trainer_rank = [], set(), train.trainer_rank(rank)
    for param in params:
        if trainer_rank is None or not train.has_param(trainer_rank, param, num_experts):
            continue
        name, expert = param.megatron, param.expert is not None
        expected.add(name)
        if name not in local:
            problems.append(f"rank {rank} lacks {name}")
            continue
        shape = local_shape(param, train.num_shards(expert), train.shard_index(trainer_rank, expert))
        if tuple(local[name].shape) != shape:
            problems.append(f"{name} on rank {rank} has shape {tuple(local[name].shape)}, not {shape}")
    unknown = sorted(local.keys() - expected - {TIED_EMBEDDING})
    return problems + [f"rank {rank} has {name}, which is not in the table" for name in unknown]


def find_nonfinite(local: Mapping[str, torch.Tensor], rank: int) -> list[str]:
    """List the shards of a rank that are not finite; one line each."""
    if not local:
        return []
    # A sum is finite only if all elements are. It may also overflow, so check the suspects element by element.
    sums = torch.stack([tensor.sum(dtype=torch.float32) for tensor in local.values()])
    suspects = [name for name, is_finite in zip(local, torch.isfinite(sums).tolist(), strict=True) if not is_finite]
    return [f"{name} on rank {rank} is not finite" for name in suspects if not torch.isfinite(local[name]).all()]


def engine_tensors(
    params: Sequence[Param], engine: EngineLayout, position: int, num_experts: int, wire: Wire
) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return dtype and shape of the tensors that an engine rank has for these parameters, by name."""
    expected: dict[str, tuple[str, tuple[int, ...]]] = {}
    slots = [(param, engine.slot_of(param)) for param in params]
    sent = {slot.name: planes(param, wire) for param, slot in slots if slot}
    for name, shape in engine_shapes(params, engine, position, num_experts).items():
        for plane in sent[name]:
            plane_shape = (*shape[:-2], *plane.shape(*shape[-2:])) if len(sent[name]) > 1 else shape
            expected[name + plane.suffix] = str(plane.dtype).removeprefix("torch."), plane_shape
    return expected


def find_engine_problems(
    tensors: EngineTensors, params: Sequence[Param], engine: EngineLayout, position: int, num_experts: int, wire: Wire
) -> list[str]:
    """List how the tensors of an engine rank differ from the layout table; one line each."""
    problems = []
    for name, (dtype, shape) in engine_tensors(params, engine, position, num_experts, wire).items():
        if name not in tensors:
            problems.append(f"the engine has no tensor {name}")
        elif tuple(tensors[name][1]) != shape:
            problems.append(f"{name} has shape {tuple(tensors[name][1])} in the engine, not {shape}")
        elif tensors[name][0] != dtype:
            problems.append(f"{name} is {tensors[name][0]} in the engine, but it is sent as {dtype}")
    return problems


def find_layout_problems(oddities: Iterable[str]) -> list[str]:
    """Explain the oddities of `LoaderHooks.find_oddities`, which a weight sync cannot serve; one line each."""
    remedy = "remove moe_runner_backend, fp8_gemm_runner_backend and similar keys from rollout.sglang"
    return [f"in the engine, {line}: weights would be written to the wrong places; {remedy}" for line in oddities]


def plan_digest(*values: Any) -> str:
    """Return a digest of everything that a plan is computed from. The ranks exchange nothing else about it."""
    return hashlib.sha256(json.dumps(values, sort_keys=True, default=repr).encode()).hexdigest()[:16]


def find_digest_mismatch(digests: Mapping[int, str]) -> str:
    """Describe which ranks plan from other inputs than the first of `digests` (rank -> digest); empty if none."""
    first = next(iter(digests))
    others = [rank for rank, value in digests.items() if value != digests[first]]
    if not others:
        return ""
    some = ", ".join(map(str, others[:8])) + (" ..." if len(others) > 8 else "")
    return f"rank(s) {some} have another model or layout than rank {first}: start all ranks with the same configuration"
