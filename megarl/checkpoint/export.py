"""Gather full HF tensors on every rank of a role, one bounded bucket at a time, for export."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod

import torch
import torch.distributed as dist

from megarl.models.layout_algebra import Param, layer_of, local_shape, unshard
from megarl.parallel import device
from megarl.parallel.ranks import Ranks, all_gather_objects, use_layout
from megarl.reshard.plan.layout import TrainLayout, find_shard_problems


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
    local_dtype = next((local[p.megatron].dtype for p in params if p.dtype is None and p.megatron in local), None)
    reports = all_gather_objects((ranks.pp_rank, layers, local_dtype), ranks.host_group)
    stages = tuple(next(tuple(layers) for stage, layers, _ in reports if stage == s) for s in range(ranks.pp))
    train = TrainLayout(len(ranks.members), ranks.tp, ranks.ep, stages, ranks.etp, ranks.cp, ranks.members)
    num_experts = 1 + max((param.expert for param in params if param.expert is not None), default=-1)
    dtypes = sorted({d for *_, d in reports if d is not None}, key=str)  # a stage may have none of the parameters
    rank, dtype = ranks.job.rank, next(iter(dtypes), None)
    problems = []
    if len(dtypes) > 1:
        problems.append(f"the ranks' parameters have different types: {', '.join(map(str, dtypes))}")
    problems += find_shard_problems(local, params, train, rank, num_experts)
    for name, expected in ((param.megatron, param.dtype or dtype) for param in params):
        if name in local and local[name].dtype != expected:
            problems.append(f"{name} on rank {rank} is {local[name].dtype}, not {expected}")
    if problems := sum(all_gather_objects(problems, ranks.host_group), []):
        raise ValueError(f"the model's shards do not fit its table: {problems[0]} ({len(problems)} such)")
    assert dtype is not None  # an empty model is a problem above

    owner = {param.megatron: train.owner_of(param, num_experts) for param in params}
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


def _split_buckets(
    params: Sequence[Param],
    owner: Mapping[str, tuple[int, int | None]],
    dtype: torch.dtype,
    bucket_bytes: int,
    ranks: Ranks,
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
