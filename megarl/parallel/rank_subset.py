"""Run Megatron-Core on a subset of a job's ranks, which it takes for the whole job.

Queries about all ranks are answered for the members of a layout: while Megatron creates its groups, and in the few
places that use torch's default group. Everywhere else Megatron uses its own groups.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist


@contextmanager
def use_member_groups(members: Sequence[int]) -> Iterator[None]:
    """Make `initialize_model_parallel` create groups of `members` (job ranks, ascending) within the block.

    Megatron numbers ranks from 0 to the reported world size, and its RankGenerator produces all rank lists; here its
    numbers are indices of the members. All ranks of the job must enter, because creating a group is collective over the
    job; ranks outside are in none of the groups.
    """
    from megatron.core import parallel_state

    class AmongMembers(parallel_state.RankGenerator):  # type: ignore[misc]
        def get_ranks(self, token: str) -> list[list[int]]:
            return [[members[index] for index in indices] for indices in super().get_ranks(token)]

    generator, world_size = parallel_state.RankGenerator, dist.get_world_size

    def size(group: Any = None) -> int:
        return len(members) if group is None else world_size(group)

    parallel_state.RankGenerator = AmongMembers
    dist.get_world_size = size  # Megatron calls the package's function; torch's own modules do not
    try:
        yield
    finally:
        parallel_state.RankGenerator, dist.get_world_size = generator, world_size


@contextmanager
def use_member_world() -> Iterator[None]:
    """Make the members of Megatron's current layout torch's default group within the block, with ranks from 0.

    For code without a group of its own: distributed checkpoints, and the optimizer's parameter groups. Groups with job
    rank numbers must not be used within the block.
    """
    from megatron.core import parallel_state

    # Megatron has a single instance here.
    member_group = parallel_state.get_intra_distributed_optimizer_instance_group()
    if member_group.size() == dist.get_world_size():
        yield
        return
    group_ranks = dist.distributed_c10d._world.pg_group_ranks
    previous = dist.GroupMember.WORLD, group_ranks[member_group]
    role_ranks = {rank: rank for rank in range(member_group.size())}
    dist.GroupMember.WORLD, group_ranks[member_group] = member_group, role_ranks
    try:
        yield
    finally:
        dist.GroupMember.WORLD, group_ranks[member_group] = previous
