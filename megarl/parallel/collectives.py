"""All-gather of shares of any size, in which the traffic is proportional to the sizes of the shares."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

_MAX_RING_RANKS = 8  # up to this many ranks, gloo's ring is as fast
_TAG = 7  # of messages of `bruck_all_gather`, distinct from others of the group
_INLINE_BYTES = 504  # bytes of a share that travel with its size
_MAX_PADDED_BYTES = 1 << 20  # up to this many bytes in total, shares are always padded


def ragged_all_gather(local: torch.Tensor, group: dist.ProcessGroup, timeout_s: float) -> list[torch.Tensor]:
    """Return every rank's [n] uint8, by rank; n may differ between ranks. timeout_s: per message.

    Small shares travel with their sizes in one round. Larger shares of similar size go in a single padded collective;
    otherwise each is broadcast, since padding would cost every rank the largest size times the number of ranks.
    """
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    header = torch.zeros(8 + _INLINE_BYTES, dtype=torch.uint8)
    header[:8].view(torch.int64)[0] = len(local)
    header[8 : 8 + len(local)] = local[:_INLINE_BYTES]
    headers = all_gather_small(header, group, timeout_s)
    sizes = headers[:, :8].contiguous().view(torch.int64).view(-1).tolist()
    largest = max(sizes)
    if largest <= _INLINE_BYTES:
        return [share[8 : 8 + size] for share, size in zip(headers, sizes, strict=True)]
    if world * largest <= max(_MAX_PADDED_BYTES, 2 * sum(sizes)):
        padded = torch.zeros(largest, dtype=torch.uint8)
        padded[: len(local)] = local
        shares = torch.empty(world, largest, dtype=torch.uint8)
        dist.all_gather_into_tensor(shares.view(-1), padded, group=group)
        return [share[:size] for share, size in zip(shares, sizes, strict=True)]
    shares_by_rank, requests = [], []
    for source, (share, size) in enumerate(zip(headers, sizes, strict=True)):
        if size <= _INLINE_BYTES:
            shares_by_rank.append(share[8 : 8 + size])
            continue
        shares_by_rank.append(local if source == rank else torch.empty(size, dtype=torch.uint8))
        requests.append(dist.broadcast(shares_by_rank[-1], group_src=source, group=group, async_op=True))
    for work in requests:
        work.wait()
    return shares_by_rank


def all_gather_small(local: torch.Tensor, group: dist.ProcessGroup, timeout_s: float) -> torch.Tensor:
    """Return [world, n] by rank, from every rank's small [n] of equal n."""
    world = dist.get_world_size(group)
    if world > _MAX_RING_RANKS:
        return bruck_all_gather(local, group, timeout_s)
    gathered = local.new_empty(world, len(local))
    dist.all_gather_into_tensor(gathered.view(-1), local, group=group)
    return gathered


def bruck_all_gather(local: torch.Tensor, group: dist.ProcessGroup, timeout_s: float) -> torch.Tensor:
    """Like `all_gather_small`, but in log2(world) rounds; in each, a rank sends what it has to one rank.

    Bruck et al., "Efficient algorithms for all-to-all communications in multiport message-passing systems", IEEE TPDS
    8(11), 1997. Gloo's all-gather goes round a ring, which takes the time of one message per rank of the world.
    """
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    gathered = local.new_empty(world, len(local))  # row i comes from the i-th rank after this one
    gathered[0] = local
    num_rows, limit = 1, timedelta(seconds=timeout_s)
    while num_rows < world:
        num_new = min(num_rows, world - num_rows)
        outgoing, incoming = gathered[:num_new].view(-1), gathered[num_rows : num_rows + num_new].view(-1)
        for work in (
            dist.isend(outgoing, group=group, group_dst=(rank - num_rows) % world, tag=_TAG),
            dist.irecv(incoming, group=group, group_src=(rank + num_rows) % world, tag=_TAG),
        ):
            assert work is not None  # only None outside of the group
            work.wait(limit)
        num_rows += num_new
    return gathered.roll(rank, 0)
