"""Megatron-Core on some of a job's ranks, which it takes for all of them.

What it asks of all ranks is answered for the members of a layout alone: while its groups are made, and in the few
places that talk over torch's default group. Everything else of it talks over its own groups.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist


@contextmanager
def use_member_groups(members: Sequence[int]) -> Iterator[None]:
    """Within the block `initialize_model_parallel` makes groups of `members`, numbers of the job's ranks, ascending.

    Megatron counts from 0 to what the world's size is said to be, and every list of ranks that it makes comes from its
    generator; here the generator's numbers are places among the members. Run by all ranks of the job, also by those
    that are no members, which then are in none of the groups: making one is collective over all.
    """
    from megatron.core import parallel_state

    class AmongMembers(parallel_state.RankGenerator):  # type: ignore[misc]
        def get_ranks(self, token: str) -> list[list[int]]:
            return [[members[place] for place in places] for places in super().get_ranks(token)]

    generator, world_size = parallel_state.RankGenerator, dist.get_world_size

    def size(group: Any = None) -> int:
        return len(members) if group is None else world_size(group)

    parallel_state.RankGenerator = AmongMembers
    dist.get_world_size = size  # of the package, which Megatron asks; torch's own modules do not
    try:
        yield
    finally:
        parallel_state.RankGenerator, dist.get_world_size = generator, world_size


@contextmanager
def use_member_world() -> Iterator[None]:
    """Within the block torch's default group is that of the members of the layout that Megatron is in, in which ranks
    count from 0. For what talks over no group of its own: distributed checkpoints, and the sorts of parameters that an
    optimizer has. Groups that know the job's numbers must not be used in it.
    """
    from megatron.core import parallel_state

    own = parallel_state.get_intra_distributed_optimizer_instance_group()  # of which Megatron has one here
    if own.size() == dist.get_world_size():
        yield
        return
    numbers = dist.distributed_c10d._world.pg_group_ranks
    before = dist.GroupMember.WORLD, numbers[own]
    dist.GroupMember.WORLD, numbers[own] = own, {rank: rank for rank in range(own.size())}
    try:
        yield
    finally:
        dist.GroupMember.WORLD, numbers[own] = before
