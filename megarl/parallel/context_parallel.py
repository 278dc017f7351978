"""Context parallelism: which tokens of a packed micro-batch each rank has, and how all come together again.

Each sequence, padded to a multiple of 2 cp tokens, is cut in 2 cp equal parts, of which rank r has part r and part
2 cp - 1 - r, in this order: under a causal mask every rank then has the same work (arXiv:2407.21783, section 3.3.2;
Megatron-Core and Transformer Engine expect it). The split is made here and nowhere else.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


def zigzag(cu_seqlens: torch.Tensor, cp: int) -> torch.Tensor:
    """[cp, P / cp] int64: where in the packed micro-batch of P tokens the tokens of each rank are.

    cu_seqlens: [N + 1], where each padded sequence starts; lengths are multiples of 2 cp, of 1 where cp is 1.
    """
    if cp == 1:
        return torch.arange(int(cu_seqlens[-1]))[None]
    ranks: list[list[torch.Tensor]] = [[] for _ in range(cp)]
    for start, stop in zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True):
        parts = torch.arange(start, stop).chunk(2 * cp)
        for rank, mine in enumerate(ranks):
            mine += [parts[rank], parts[2 * cp - 1 - rank]] if stop > start else []
    return torch.stack([torch.cat(mine) for mine in ranks])


def gather_context(
    local: torch.Tensor, places: torch.Tensor, group: dist.ProcessGroup, same_gradient: bool
) -> torch.Tensor:
    """[P / cp, ...] of each rank -> [P, ...] in the order of the micro-batch, on every rank.

    places: what `zigzag` returned. same_gradient: whether the gradient that comes back is the same on every rank, as
    where each goes on to compute the same loss; otherwise it is this rank's summand, and they are added up.
    """
    if len(places) == 1:
        return local
    gathered: torch.Tensor = _Gather.apply(local, places, group, same_gradient)
    return gathered


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, local: torch.Tensor, places: torch.Tensor, group: dist.ProcessGroup, same_gradient: bool
    ) -> torch.Tensor:
        ctx.mine, ctx.group, ctx.same_gradient = places[group.rank()], group, same_gradient
        parts = [torch.empty_like(local) for _ in places]
        dist.all_gather(parts, local.contiguous(), group=group)
        full = local.new_empty(places.numel(), *local.shape[1:])
        full[places.flatten()] = torch.cat(parts)
        return full

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        (grad,) = grads
        if not ctx.same_gradient:
            grad = grad.contiguous()
            dist.all_reduce(grad, group=ctx.group)
        return grad[ctx.mine], None, None, None
