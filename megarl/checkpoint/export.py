"""Gather full HF tensors on every rank of a role, one bounded bucket at a time, for export."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from math import prod
from typing import NamedTuple

import torch
import torch.distributed as dist

from megarl.config import ConfigError
from megarl.models.layout_algebra import Param, layer_of, local_shape, unshard
from megarl.parallel import device
from megarl.parallel.ranks import Ranks, all_gather_objects, use_layout


class Owner(NamedTuple):
    """Location of a parameter.

    Its pipeline stage, and the expert-parallel rank whose expert tensor-parallel ranks shard it, or None if it is
    sharded over tensor-parallel ranks.
    """

    stage: int
    ep_rank: int | None


def find_owners(params: Sequence[Param], stages: Sequence[Collection[int]], ep: int) -> dict[str, Owner]:
    """Return the owner of each parameter by canonical name, given the layers of each stage.

    The embedding is on the first stage, the final norm and the output layer on the last; experts are assigned to the
    `ep` ranks in contiguous blocks. Raises ConfigError if a layer's experts do not divide or a layer is not on exactly
    one stage.
    """
    stage_of: dict[int, int] = {}
    for stage, layers in enumerate(stages):
        for layer_index in layers:
            if layer_index in stage_of:
                raise ConfigError(f"layer {layer_index} is on the pipeline stages {stage_of[layer_index]} and {stage}")
            stage_of[layer_index] = stage
    experts: dict[int | None, int] = {}
    for param in params:
        layer = layer_of(param.megatron)
        if param.expert is not None:
            experts[layer] = max(experts.get(layer, 0), param.expert + 1)
    result = {}
    for param in params:
        layer = layer_of(param.megatron)
        if layer is None:
            stage = 0 if param.megatron.startswith("embedding.") else len(stages) - 1
        elif layer in stage_of:
            stage = stage_of[layer]
        else:
            raise ConfigError(f"layer {layer} is not on any pipeline stage")
        ep_rank = None
        if param.expert is not None:
            if experts[layer] % ep:
                sizes = [n for n in range(1, experts[layer] + 1) if experts[layer] % n == 0]
                raise ConfigError(
                    f"the {experts[layer]} experts of layer {layer} do not divide by parallel.ep={ep}; "
                    f"sizes that do: {', '.join(map(str, sizes))}"
                )
            ep_rank = param.expert // (experts[layer] // ep)
        result[param.megatron] = Owner(stage, ep_rank)
    return result


def gather_hf(
    local: Mapping[str, torch.Tensor], params: Sequence[Param], ranks: Ranks, bucket_bytes: int = 512 << 20
) -> Iterator[tuple[str, torch.Tensor]]:
    """Stream (HF name, full tensor) in the table's order, equal on all members, from this rank's shards.

    `local`: canonical name -> this rank's shard (with padding), on the device; `params`: the family's table. Collective
    over the members of `ranks`, each of which must exhaust the iterator. In addition to `local`, one bucket and one
    parameter are in memory: the bucket has at most `bucket_bytes`, or one larger parameter. The tensors are new and
    belong to the caller. Raises ValueError on all members, before any communication of tensors, if a rank's shards do
    not match the table.
    """
    from megatron.core import parallel_state

    with use_layout(ranks):
        tp_group = parallel_state.get_tensor_model_parallel_group()
        pp_group = parallel_state.get_pipeline_model_parallel_group()
        ep_group = parallel_state.get_expert_model_parallel_group()
        etp_group = parallel_state.get_expert_tensor_parallel_group()
    layers = sorted({layer for layer in map(layer_of, local) if layer is not None})
    dtype = next((local[p.megatron].dtype for p in params if p.dtype is None and p.megatron in local), None)
    reports = all_gather_objects((ranks.pp_rank, layers, dtype), ranks.host_group)
    stages: list[list[int]] = [
        next(stage_layers for stage, stage_layers, _ in reports if stage == s) for s in range(ranks.pp)
    ]
    owner = find_owners(params, stages, ranks.ep)
    dtypes = sorted({str(d) for *_, d in reports if d is not None})  # a stage may have none of the table's parameters
    dtype = next((d for *_, d in reports if d is not None), None)
    problems = [
        *([f"the ranks' parameters have different types: {', '.join(dtypes)}"] if len(dtypes) > 1 else []),
        *(
            problem
            for rank_problems in all_gather_objects(_problems(local, params, owner, ranks, dtype), ranks.host_group)
            for problem in rank_problems
        ),
    ]
    if problems:
        raise ValueError(f"the model's shards do not fit its table: {problems[0]} ({len(problems)} such)")
    assert dtype is not None  # an empty model is a problem above

    for bucket in _split_buckets(params, owner, dtype, bucket_bytes, ranks):
        stage, ep_rank = owner[bucket[0].megatron]
        parts, part = ranks.tp_size_and_rank(ep_rank is not None)
        sizes = [prod(local_shape(param, parts, 0)) for param in bucket]
        buffer = torch.empty((parts, sum(sizes)), dtype=bucket[0].dtype or dtype, device=device.device())
        if stage == ranks.pp_rank:
            if ep_rank in (None, ranks.ep_rank):
                for param, target in zip(bucket, buffer[part].split(sizes), strict=True):
                    target.view(local[param.megatron].shape).copy_(local[param.megatron].detach())
                if parts > 1:
                    group = tp_group if ep_rank is None else etp_group
                    dist.all_gather(list(buffer), buffer[part].clone(), group=group)
            if ep_rank is not None and ranks.ep > 1:
                dist.broadcast(buffer, dist.get_global_rank(ep_group, ep_rank), group=ep_group)
        if ranks.pp > 1:
            dist.broadcast(buffer, dist.get_global_rank(pp_group, stage), group=pp_group)
        offset = 0
        for param, size in zip(bucket, sizes, strict=True):
            shards = [row[offset : offset + size].view(local_shape(param, parts, r)) for r, row in enumerate(buffer)]
            offset += size
            yield from unshard(param, shards).items()


def _problems(
    local: Mapping[str, torch.Tensor],
    params: Sequence[Param],
    owner: Mapping[str, Owner],
    ranks: Ranks,
    dtype: torch.dtype | None,
) -> list[str]:
    """Return the mismatches between this rank's shards and the table, one line each."""
    problems = []
    for param in params:
        stage, ep_rank = owner[param.megatron]
        if stage != ranks.pp_rank or ep_rank not in (None, ranks.ep_rank):
            continue
        if param.megatron not in local:
            problems.append(f"rank {ranks.job.rank} lacks {param.megatron}")
            continue
        tensor, shape = local[param.megatron], local_shape(param, *ranks.tp_size_and_rank(param.expert is not None))
        if tuple(tensor.shape) != shape:
            problems.append(f"{param.megatron} on rank {ranks.job.rank} has shape {tuple(tensor.shape)}, not {shape}")
        if tensor.dtype != (param.dtype or dtype):
            problems.append(f"{param.megatron} on rank {ranks.job.rank} is {tensor.dtype}, not {param.dtype or dtype}")
    # With a tied head, Megatron has a copy of the embedding as output layer on the last stage; it is not sent.
    unknown = [name for name in local if name not in owner and name != "output_layer.weight"]
    return problems + [f"rank {ranks.job.rank} has {name}, which is not in the table" for name in unknown]


def _split_buckets(
    params: Sequence[Param], owner: Mapping[str, Owner], dtype: torch.dtype, bucket_bytes: int, ranks: Ranks
) -> Iterator[list[Param]]:
    """Split the table into buckets of consecutive parameters with one owner and one dtype; the same on all ranks."""
    bucket: list[Param] = []
    size = 0
    for param in params:
        parts, _ = ranks.tp_size_and_rank(param.expert is not None)
        bytes_ = parts * prod(local_shape(param, parts, 0)) * (param.dtype or dtype).itemsize
        is_compatible = bucket and (owner[param.megatron], param.dtype) == (owner[bucket[0].megatron], bucket[0].dtype)
        if bucket and (not is_compatible or size + bytes_ > bucket_bytes):
            yield bucket
            bucket, size = [], 0
        bucket.append(param)
        size += bytes_
    if bucket:
        yield bucket
