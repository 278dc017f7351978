"""A gather of shares of any sizes, in which what travels has the size of what is said."""

from __future__ import annotations

import torch
import torch.distributed as dist

_SMALL = 504  # bytes of a share that travel with its size
_PADDED = 1 << 20  # bytes of all shares up to which they are padded, whatever their sizes are


def all_gather(mine: torch.Tensor, group: dist.ProcessGroup) -> list[torch.Tensor]:
    """Every rank's [n] uint8, by rank, of any n.

    What is small travels with its size, at once. Of the rest shares of much the same size go round in one call that
    pads all to the largest; else each goes by itself: padding would cost every rank the largest times their number.
    """
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    first = torch.zeros(8 + _SMALL, dtype=torch.uint8)
    first[:8].view(torch.int64)[0] = len(mine)
    first[8 : 8 + len(mine)] = mine[:_SMALL]
    firsts = torch.empty(world, len(first), dtype=torch.uint8)
    dist.all_gather_into_tensor(firsts.view(-1), first, group=group)
    sizes = firsts[:, :8].contiguous().view(torch.int64).view(-1).tolist()
    largest = max(sizes)
    if largest <= _SMALL:
        return [share[8 : 8 + size] for share, size in zip(firsts, sizes, strict=True)]
    if world * largest <= max(_PADDED, 2 * sum(sizes)):
        padded = torch.zeros(largest, dtype=torch.uint8)
        padded[: len(mine)] = mine
        shares = torch.empty(world, largest, dtype=torch.uint8)
        dist.all_gather_into_tensor(shares.view(-1), padded, group=group)
        return [share[:size] for share, size in zip(shares, sizes, strict=True)]
    found, works = [], []
    for source, (share, size) in enumerate(zip(firsts, sizes, strict=True)):
        if size <= _SMALL:
            found.append(share[8 : 8 + size])
            continue
        found.append(mine if source == rank else torch.empty(size, dtype=torch.uint8))
        works.append(dist.broadcast(found[-1], group_src=source, group=group, async_op=True))
    for work in works:
        work.wait()
    return found
