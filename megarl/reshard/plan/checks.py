"""What can be wrong with a push before anything moves: the trainer's shards, the engine's tensors, the plans."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from megarl.models.fp8 import SCALE_SUFFIX, grid_shape, is_quantised
from megarl.models.layout_algebra import Param, split_with
from megarl.reshard.plan.flows import Wire
from megarl.reshard.plan.layout import EngineLayout, TrainLayout, engine_shapes

TIED_EMBEDDING = "embedding.word_embeddings.weight"
"""With a tied head, or to train MTP layers, the last stage has a copy of the embedding, by its name. It is not sent."""

EngineTensors = Mapping[str, tuple[str, Sequence[int]]]
"""An engine's tensors: dtype and shape by name."""


def find_shard_problems(
    local: Mapping[str, torch.Tensor], params: Iterable[Param], train: TrainLayout, rank: int, num_experts: int
) -> list[str]:
    """How a rank's shards (canonical name -> tensor) differ from their table, and which have values that are no number;
    one line each. rank: of the job; one that does not train has none."""
    found, expected, own = [], set(), train.trainer_rank(rank)
    for param in params:
        if own is None or not train.has_param(own, param, num_experts):
            continue
        name, expert = param.megatron, param.expert is not None
        expected.add(name)
        if name not in local:
            found.append(f"rank {rank} lacks {name}")
            continue
        dim, slices = split_with(param, param.sharding, train.num_shards(expert), train.shard_index(own, expert))
        shape = list(param.hf[0].shape)
        shape[dim] = sum(piece.stop - piece.start for piece in slices)
        if list(local[name].shape) != shape:
            found.append(f"{name} on rank {rank} has shape {tuple(local[name].shape)}, not {tuple(shape)}")
    unknown = sorted(local.keys() - expected - {TIED_EMBEDDING})
    found += [f"rank {rank} has {name}, which the table does not know" for name in unknown]
    return found + [f"{name} on rank {rank} is not finite" for name in _find_nonfinite(local)]


def _find_nonfinite(local: Mapping[str, torch.Tensor]) -> list[str]:
    if not local:
        return []
    # A sum is finite exactly when all are, but for sums that overflow: those are looked at again.
    sums = torch.stack([tensor.sum(dtype=torch.float32) for tensor in local.values()])
    suspects = [name for name, fine in zip(local, torch.isfinite(sums).tolist(), strict=True) if not fine]
    return [name for name in suspects if not bool(torch.isfinite(local[name]).all())]


def find_engine_problems(
    held: EngineTensors, params: Sequence[Param], engine: EngineLayout, position: int, num_experts: int, wire: Wire
) -> list[str]:
    """How the tensors of an engine's rank differ from the table; one line each."""
    expected: dict[str, tuple[tuple[int, ...], set[str]]] = {}
    slots = [(param, engine.slot_of(param)) for param in params]
    fp8 = {slot.name for param, slot in slots if slot and wire == "fp8" and is_quantised(param)}
    for name, shape in engine_shapes(params, engine, position, num_experts).items():
        if name in fp8:
            expected[name] = shape, {"float8_e4m3fn"}
            expected[name + SCALE_SUFFIX] = (*shape[:-2], *grid_shape(shape[-2:])), {"float32"}
        else:
            expected[name] = shape, {"float32" if wire == "fp32" else "bfloat16", "float32"}
    found = []
    for name, (shape, types) in expected.items():
        if name not in held:
            found.append(f"the engine has no tensor {name}")
        elif tuple(held[name][1]) != shape:
            found.append(f"{name} has shape {tuple(held[name][1])} in the engine, not {shape}")
        elif held[name][0] not in types:
            found.append(f"{name} is {held[name][0]} in the engine, but it is sent as {' or '.join(sorted(types))}")
    return found


def find_layout_problems(odd: Iterable[str]) -> list[str]:
    """What an engine says of its layers (see `engine.weight_loader.find_layout_oddities`) that a push could not serve; one line
    each."""
    remedy = "leave moe_runner_backend, fp8_gemm_runner_backend and the like out of rollout.sglang"
    return [f"in the engine, {line}: weights would be pushed to the wrong places; {remedy}" for line in odd]


def plan_digest(*values: Any) -> str:
    """Of all that a plan is computed from: the only thing that ranks tell each other about it."""
    return hashlib.sha256(json.dumps(values, sort_keys=True, default=repr).encode()).hexdigest()[:16]


def find_digest_mismatch(digests: Mapping[int, str]) -> str:
    """Which ranks (digest by rank, the first one's first) do not plan what the first plans; empty if all do."""
    first = next(iter(digests))
    others = [rank for rank, value in digests.items() if value != digests[first]]
    if not others:
        return ""
    some = ", ".join(map(str, others[:8])) + (" ..." if len(others) > 8 else "")
    return f"rank(s) {some} have another model or layout than rank {first}: start all with the same configuration"
