"""What all ranks of the job put together, and the post that carries rows between them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from megarl.parallel import exact, ranks
from megarl.parallel.delivery import Post
from megarl.parallel.watching import watched

_post: Post | None = None


class AllRanks:
    """The ranks of the job, as `types.Everyone`."""

    @property
    def rank(self) -> int:
        return dist.get_rank()

    def total(self, mine: torch.Tensor) -> torch.Tensor:
        return total(mine)

    def rows(self, mine: torch.Tensor) -> torch.Tensor:
        return gather_rows(mine)

    def objects(self, mine: Any) -> list[Any]:
        return ranks.all_gather_objects(mine)


@watched("wait")
def gather_rows(rows: torch.Tensor) -> torch.Tensor:
    """The rows of all ranks, [sum of n, ...] by rank, of each rank's [n, ...]; dtype and tail are the same on all."""
    rows = rows.detach().cpu().contiguous()
    shares = exact.all_gather(rows.reshape(-1).view(torch.uint8), ranks.host_group(), ranks.patience())
    return torch.cat(shares).view(rows.dtype).view(-1, *rows.shape[1:])


@watched("wait")
def total(small: torch.Tensor) -> torch.Tensor:
    """The sum of a small tensor over all ranks, added up in their order: the same bits on all of them."""
    if dist.get_world_size() == 1:
        return small
    mine = small.detach().cpu().contiguous().view(-1)
    shares = exact.around(mine, ranks.host_group(), ranks.patience()).view(-1, *small.shape)
    result = shares[0].clone()
    for share in shares[1:]:
        result += share
    return result.to(small.device)


def post() -> Post:
    """The job's, made by all ranks together when it is first asked for."""
    global _post
    if _post is None or _post.group is not ranks.host_group():
        _post = Post()
    return _post


def close_post() -> None:
    """Wait until what was sent has gone. Not collective."""
    global _post
    closing, _post = _post, None
    if closing is not None:
        closing.close()
