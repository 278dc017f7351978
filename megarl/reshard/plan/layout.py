"""Where every tensor lies, on the trainer's ranks and on the engines' ranks.

Plain data for any number of ranks, without processes. A `ShardSlice` is an interval of one HF tensor within one tensor of one
rank. Everything that the reshard moves is an intersection of such intervals of both sides. `RankMap` says which ranks of
the job are trainer ranks, engine ranks, or both.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megarl.config import ConfigError
from megarl.models.layout_algebra import PADDING, EngineGrid, EngineSlot, Param, ShardSpec, layer_of, split_with


class ShardSlice(NamedTuple):
    """The indices [start, stop) along `dim` of HF tensor `source` of a Param, which begin at `offset` along `dim` of
    the local tensor; the other dimensions are whole."""

    source: int
    dim: int
    start: int
    stop: int
    offset: int


@dataclass(frozen=True)
class TrainLayout:
    """Megatron's ranks, in the order tp-cp-ep-dp-pp, the first fastest. Experts have a grid of their own, etp-ep-edp,
    which ignores tp and cp.

    stages: the global numbers of the decoder layers of each pipeline stage; layers of multi-token prediction follow
    the decoder's and are on the last stage. How a stage came by its layers (uneven, interleaved, custom) is the same.
    ranks: the job's numbers of its ranks, in this order; where not given, 0 ... world - 1. The methods but `own` are
    about its own numbers, which always begin at 0.
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
            raise ConfigError(f"a layout of {self.world} ranks of the trainer cannot lie on {len(self.ranks)} ranks")
        for size, of in ((self.tp * self.cp, "tp x cp"), (self.ep * self.etp, "ep x etp")):
            if self.world % self.pp or self.stage_ranks % size:
                raise ConfigError(
                    f"{of} x pp = {size} x {self.pp} does not divide the {self.world} ranks of the trainer"
                )

    @property
    def pp(self) -> int:
        return len(self.stages)

    @property
    def stage_ranks(self) -> int:
        """Ranks of one pipeline stage."""
        return self.world // self.pp

    def trainer_rank(self, rank: int) -> int | None:
        """The trainer's number of a rank of the job; None where it is none of the trainer's."""
        ranks = self.ranks or range(self.world)
        return ranks.index(rank) if rank in ranks else None

    def stage_of(self, param: Param) -> int:
        """The stage that has a parameter: the embedding is on the first, what follows the decoder on the last."""
        return self.stage_of_layer(layer_of(param.megatron), first=param.megatron.startswith("embedding."))

    def stage_of_layer(self, layer: int | None, first: bool = False) -> int:
        if layer is None:
            return 0 if first else self.pp - 1
        for stage, layers in enumerate(self.stages):
            if layer in layers:
                return stage
        raise ConfigError(f"layer {layer} is on no pipeline stage")

    def num_shards(self, expert: bool) -> int:
        """In how many parts a parameter is cut."""
        return self.etp if expert else self.tp

    def shard_index(self, rank: int, expert: bool) -> int:
        """Which of these parts a rank has."""
        return rank % self.stage_ranks % self.num_shards(expert)

    def ep_rank(self, rank: int) -> int:
        return rank % self.stage_ranks // self.etp % self.ep

    def has_param(self, rank: int, param: Param, num_experts: int) -> bool:
        """Whether a rank has a part of this parameter."""
        if rank // self.stage_ranks != self.stage_of(param):
            return False
        return param.expert is None or param.expert // (num_experts // self.ep) == self.ep_rank(rank)

    def slices_of_rank(self, rank: int, param: Param) -> list[ShardSlice]:
        """What a rank that has a part of it holds."""
        return self.slices_of_shard(self.shard_index(rank, param.expert is not None), param)

    def slices_of_shard(self, part: int, param: Param) -> list[ShardSlice]:
        """What this part of the cut is."""
        return _to_shard_slices(split_with(param, param.sharding, self.num_shards(param.expert is not None), part))


@dataclass(frozen=True)
class EngineLayout:
    """SGLang's ranks: engine instance e has ranks e * tp ... (e + 1) * tp - 1 of the engines', one process beside each.

    tp: ranks of an engine. ep: expert parallel size; the experts' own tensor parallel size is tp / ep.
    dp: replicas of attention within an engine (DP attention); attention's tensor parallel size is tp / dp.
    mlp_tp, head_tp, shared_tp: tensor parallel sizes of dense MLPs, of the output layer and of the shared experts where
    they differ from tp (0: they do not), as with DP attention. SGLang has a switch for each.
    experts: for a layer, which logical expert each of its physical slots has (EPLB); as they come where not given.
    fuse_shared: the shared expert is one more slot at the end of the experts' tensors.
    draft: the engine has the layers of multi-token prediction, in a draft model.
    ranks: the job's numbers of the engines' ranks, one engine behind the other; where not given, the trainer's.
    """

    tp: int
    ep: int = 1
    dp: int = 1
    mlp_tp: int = 0
    head_tp: int = 0
    shared_tp: int = 0
    experts: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    fuse_shared: bool = False
    draft: bool = False
    ranks: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        _check_ranks(self.ranks, "engines")
        for name in ("ep", "dp", "mlp_tp", "head_tp", "shared_tp"):
            if self.tp % (getattr(self, name) or self.tp):
                raise ConfigError(f"engine {name}={getattr(self, name)} does not divide the engine's tp={self.tp}")

    def num_shards(self, grid: EngineGrid) -> int:
        """In how many parts the tensors of a grid are cut."""
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
        """Which of these parts the engine's rank `position` has."""
        return position % self.num_shards(grid)

    def slot_of(self, param: Param) -> EngineSlot | None:
        """Where the engine keeps a parameter; None where it does not have it."""
        slot = param.slot
        if slot is None or (slot.is_draft and not self.draft):
            return None
        if self.fuse_shared and _SHARED_EXPERTS in slot.name:
            stack, _, of = slot.name.partition(_SHARED_EXPERTS)
            name = "w13_weight" if of.startswith("gate_up") else "w2_weight"
            return replace(slot, name=f"{stack}.experts.{name}", grid="expert")
        return slot

    def expert_indices(self, position: int, param: Param, num_experts: int) -> list[int]:
        """Where in a tensor of stacked experts a rank has this one, as often as it has it; [0] for other tensors."""
        slot = self.slot_of(param)
        if slot is None:
            return []
        if slot.grid != "expert":
            return [0]
        local = self.experts_at(position, layer_of(param.megatron), num_experts)
        if param.expert is None:
            return [len(local)]  # the shared expert, fused
        return [i for i, logical in enumerate(local) if logical == param.expert]

    def experts_at(self, position: int, layer: int | None, num_experts: int) -> tuple[int, ...]:
        """The routed experts that a rank has of a layer, in the order of its stacked tensors."""
        physical = self.experts.get(layer, ()) if layer is not None else ()
        physical = physical or tuple(range(num_experts))
        if len(physical) % self.ep:
            raise ConfigError(
                f"the {len(physical)} experts of layer {layer} do not divide by the engine's ep={self.ep}"
            )
        share = len(physical) // self.ep
        first = position // (self.tp // self.ep) * share
        return physical[first : first + share]

    def slices_of_rank(self, position: int, param: Param) -> list[ShardSlice]:
        """What a rank of the engine that has the parameter needs of it."""
        slot = self.slot_of(param)
        if slot is None:
            return []
        return self.slices_of_shard(self.shard_index(position, slot.grid), param)

    def slices_of_shard(self, part: int, param: Param) -> list[ShardSlice]:
        """What this part of the cut is."""
        slot = self.slot_of(param)
        assert slot is not None
        found = _to_shard_slices(split_with(param, slot.sharding, self.num_shards(slot.grid), part))
        return [interval._replace(offset=interval.offset + slot.offset) for interval in found]


_SHARED_EXPERTS = ".shared_experts."


def _check_ranks(ranks: tuple[int, ...], whose: str) -> None:
    twice = sorted(rank for rank, count in Counter(ranks).items() if count > 1)
    if twice:
        raise ConfigError(f"the ranks of the {whose} name rank {twice[0]} more than once")
    if ranks and min(ranks) < 0:
        raise ConfigError(f"the ranks of the {whose} name rank {min(ranks)}; ranks begin at 0")


def _to_shard_slices(pieces: ShardSpec) -> list[ShardSlice]:
    """The slices with their places, those that adjoin on both sides joined."""
    found: list[ShardSlice] = []
    at = 0
    for source, start, stop in pieces.slices:
        if source != PADDING:
            last = found[-1] if found else None
            if last and (last.source, last.stop) == (source, start) and last.offset + last.stop - last.start == at:
                found[-1] = last._replace(stop=stop)
            else:
                found.append(ShardSlice(source, pieces.dim, start, stop, at))
        at += stop - start
    return found


def even_stages(num_layers: int, pp: int, counts: Sequence[int] = ()) -> tuple[tuple[int, ...], ...]:
    """Consecutive layers, `counts` of them on each stage; without counts as evenly as can be, the first stages more."""
    if not counts:
        counts = [num_layers // pp + (stage < num_layers % pp) for stage in range(pp)]
    if len(counts) != pp or sum(counts) != num_layers or min(counts) < 0:
        raise ConfigError(f"{list(counts)} are not the layers of {pp} stages that have {num_layers} together")
    starts = [sum(counts[:stage]) for stage in range(pp)]
    return tuple(tuple(range(start, start + count)) for start, count in zip(starts, counts, strict=True))


def engine_shapes(
    params: Iterable[Param], engine: EngineLayout, position: int, num_experts: int
) -> dict[str, tuple[int, ...]]:
    """The shapes, padding included, of the tensors in which a rank of an engine keeps these parameters, by name."""
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
        # The last of several parameters in one tensor is where it ends.
        shapes[slot.name] = max(shapes.get(slot.name, ()), tuple(shape))
    return shapes


Ints = NDArray[np.int64]


class RankMap(NamedTuple):
    """world: ranks that a plan counts, whole nodes of `here`: rank r is on node r // here. Later ranks take no part.

    train [ranks of the trainer]: the job's number of each of its own ranks. engine [ranks of all engines]: likewise,
    one engine behind the other.
    """

    world: int
    ranks_per_node: int
    train: Ints
    engine: Ints

    def engine_rank(self, rank: int) -> int | None:
        """Which of the ranks of all engines a rank of the job is; None where it is none."""
        found = np.flatnonzero(self.engine == rank)
        return int(found[0]) if len(found) else None

    @property
    def participants(self) -> list[int]:
        """The ranks of either side, rising."""
        return [int(rank) for rank in np.union1d(self.train, self.engine)]

    @property
    def is_colocated(self) -> bool:
        """Whether both are the same ranks, in the same order."""
        return np.array_equal(self.train, self.engine)


def build_rank_map(train: TrainLayout, engine: EngineLayout, ranks_per_node: int) -> RankMap:
    """Raises ConfigError where engines do not divide their ranks, or all the job's ranks are not whole nodes."""
    own = np.array(train.ranks or range(train.world), dtype=np.int64)
    theirs = np.array(engine.ranks, dtype=np.int64) if engine.ranks else own
    if len(theirs) % engine.tp:
        of = "engines" if engine.ranks or train.ranks else "job"
        raise ConfigError(f"the engine's tp={engine.tp} does not divide the {len(theirs)} ranks of the {of}")
    world = int(max(own.max(), theirs.max())) + 1
    here = min(ranks_per_node, world)
    if world % here:
        if not (train.ranks or engine.ranks):
            raise ConfigError(f"{world} ranks are not whole nodes of {ranks_per_node}")
        world = -(-world // here) * here  # the others of the last node have other roles
    return RankMap(world, here, own, theirs)
