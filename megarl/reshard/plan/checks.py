"""Checks before a weight sync moves anything: the trainer's shards, the engine's tensors, the plans."""

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
"""Name of the embedding's copy on the last stage, for a tied head or to train MTP layers. It is not sent."""

EngineTensors = Mapping[str, tuple[str, Sequence[int]]]
"""An engine's tensors: name -> (dtype, shape)."""


def find_shard_problems(
    local: Mapping[str, torch.Tensor], params: Iterable[Param], train: TrainLayout, rank: int, num_experts: int
) -> list[str]:
    """List how a rank's shards (canonical name -> tensor) differ from the layout table, and which are not finite; one
    line each.

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
        dim, slices = split_with(
            param, param.sharding, train.num_shards(expert), train.shard_index(trainer_rank, expert)
        )
        shape = list(param.hf[0].shape)
        shape[dim] = sum(piece.stop - piece.start for piece in slices)
        if list(local[name].shape) != shape:
            problems.append(f"{name} on rank {rank} has shape {tuple(local[name].shape)}, not {tuple(shape)}")
    unknown = sorted(local.keys() - expected - {TIED_EMBEDDING})
    problems += [f"rank {rank} has {name}, which the table does not know" for name in unknown]
    return problems + [f"{name} on rank {rank} is not finite" for name in _find_nonfinite(local)]


def _find_nonfinite(local: Mapping[str, torch.Tensor]) -> list[str]:
    if not local:
        return []
    # A sum is finite only if all elements are. It may also overflow, so check the suspects element by element.
    sums = torch.stack([tensor.sum(dtype=torch.float32) for tensor in local.values()])
    suspects = [name for name, is_finite in zip(local, torch.isfinite(sums).tolist(), strict=True) if not is_finite]
    return [name for name in suspects if not bool(torch.isfinite(local[name]).all())]


def find_engine_problems(
    tensors: EngineTensors, params: Sequence[Param], engine: EngineLayout, position: int, num_experts: int, wire: Wire
) -> list[str]:
    """List how the tensors of an engine rank differ from the layout table; one line each."""
    expected: dict[str, tuple[tuple[int, ...], set[str]]] = {}
    slots = [(param, engine.slot_of(param)) for param in params]
    fp8 = {slot.name for param, slot in slots if slot and wire == "fp8" and is_quantised(param)}
    for name, shape in engine_shapes(params, engine, position, num_experts).items():
        if name in fp8:
            expected[name] = shape, {"float8_e4m3fn"}
            expected[name + SCALE_SUFFIX] = (*shape[:-2], *grid_shape(shape[-2:])), {"float32"}
        else:
            expected[name] = shape, {"float32" if wire == "fp32" else "bfloat16", "float32"}
    problems = []
    for name, (shape, types) in expected.items():
        if name not in tensors:
            problems.append(f"the engine has no tensor {name}")
        elif tuple(tensors[name][1]) != shape:
            problems.append(f"{name} has shape {tuple(tensors[name][1])} in the engine, not {shape}")
        elif tensors[name][0] not in types:
            problems.append(
                f"{name} is {tensors[name][0]} in the engine, but it is sent as {' or '.join(sorted(types))}"
            )
    return problems


def find_layout_problems(oddities: Iterable[str]) -> list[str]:
    """Explain the layout oddities that an engine reports (see `engine.weight_loader.find_layout_oddities`) and that
    a weight sync cannot serve; one line each."""
    remedy = "leave moe_runner_backend, fp8_gemm_runner_backend and the like out of rollout.sglang"
    return [f"in the engine, {line}: weights would be pushed to the wrong places; {remedy}" for line in oddities]


def plan_digest(*values: Any) -> str:
    """Return a digest of everything that a plan is computed from. The ranks exchange nothing else about it."""
    return hashlib.sha256(json.dumps(values, sort_keys=True, default=repr).encode()).hexdigest()[:16]


def find_digest_mismatch(digests: Mapping[int, str]) -> str:
    """Describe which ranks plan from other inputs than the first rank of `digests` (rank -> digest, the reference
    first); empty if none."""
    first = next(iter(digests))
    others = [rank for rank, value in digests.items() if value != digests[first]]
    if not others:
        return ""
    some = ", ".join(map(str, others[:8])) + (" ..." if len(others) > 8 else "")
    return f"rank(s) {some} have another model or layout than rank {first}: start all with the same configuration"
