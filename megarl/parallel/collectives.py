"""A gather of shares of any sizes, in which what travels has the size of what is said."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

_MAX_RING_RANKS = 8  # ranks up to which gloo's ring is as quick
_TAG = 7  # of messages of `bruck_all_gather`, beside others of the group
_INLINE_BYTES = 504  # bytes of a share that travel with its size
_MAX_PADDED_BYTES = 1 << 20  # bytes of all shares up to which they are padded, whatever their sizes are


def ragged_all_gather(mine: torch.Tensor, group: dist.ProcessGroup, patience: float) -> list[torch.Tensor]:
    """Every rank's [n] uint8, by rank, of any n. patience: seconds that a message may take.

    What is small travels with its size, at once. Of the rest shares of much the same size go round in one call that
    pads all to the largest; else each goes by itself: padding would cost every rank the largest times their number.
    """
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    first = torch.zeros(8 + _INLINE_BYTES, dtype=torch.uint8)
    first[:8].view(torch.int64)[0] = len(mine)
    first[8 : 8 + len(mine)] = mine[:_INLINE_BYTES]
    firsts = all_gather_small(first, group, patience)
    sizes = firsts[:, :8].contiguous().view(torch.int64).view(-1).tolist()
    largest = max(sizes)
    if largest <= _INLINE_BYTES:
        return [share[8 : 8 + size] for share, size in zip(firsts, sizes, strict=True)]
    if world * largest <= max(_MAX_PADDED_BYTES, 2 * sum(sizes)):
        padded = torch.zeros(largest, dtype=torch.uint8)
        padded[: len(mine)] = mine
        shares = torch.empty(world, largest, dtype=torch.uint8)
        dist.all_gather_into_tensor(shares.view(-1), padded, group=group)
        return [share[:size] for share, size in zip(shares, sizes, strict=True)]
    found, works = [], []
    for source, (share, size) in enumerate(zip(firsts, sizes, strict=True)):
        if size <= _INLINE_BYTES:
            found.append(share[8 : 8 + size])
            continue
        found.append(mine if source == rank else torch.empty(size, dtype=torch.uint8))
        works.append(dist.broadcast(found[-1], group_src=source, group=group, async_op=True))
    for work in works:
        work.wait()
    return found


def all_gather_small(mine: torch.Tensor, group: dist.ProcessGroup, patience: float) -> torch.Tensor:
    """Every rank's [n], [world, n] by rank, of the same n on all, which is small."""
    world = dist.get_world_size(group)
    if world > _MAX_RING_RANKS:
        return bruck_all_gather(mine, group, patience)
    every = mine.new_empty(world, len(mine))
    dist.all_gather_into_tensor(every.view(-1), mine, group=group)
    return every


def bruck_all_gather(mine: torch.Tensor, group: dist.ProcessGroup, patience: float) -> torch.Tensor:
    """As `around`, in so many rounds that doubling reaches the world: in each of them a rank sends what it has to one,
    and is sent as much by another (Bruck et al., "Efficient algorithms for all-to-all communications in multiport
    message-passing systems", IEEE TPDS 8(11), 1997). Gloo's own goes round a ring, which takes the time of a message
    for each rank of the world."""
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    every = mine.new_empty(world, len(mine))  # row i is that of the i-th rank after this one
    every[0] = mine
    have, limit = 1, timedelta(seconds=patience)
    while have < world:
        more = min(have, world - have)
        works = [
            dist.isend(every[:more].view(-1), group=group, group_dst=(rank - have) % world, tag=_TAG),
            dist.irecv(every[have : have + more].view(-1), group=group, group_src=(rank + have) % world, tag=_TAG),
        ]
        for work in works:
            assert work is not None  # of a rank that is in the group
            work.wait(limit)
        have += more
    return every.roll(rank, 0)
