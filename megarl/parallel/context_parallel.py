"""Context parallelism: the split of a packed micro-batch over ranks, and the gather that reverses it.

Each sequence, padded to a multiple of 2 cp tokens, is cut into 2 cp equal parts; rank r has the parts r and 2 cp - 1 -
r, in this order. Under a causal mask every rank then has the same work (arXiv:2407.21783, section 3.3.2; Megatron-Core
and Transformer Engine expect this split). The split is made only here.
"""

from __future__ import annotations

import torch
import torch.distributed as dist


def context_sizes(cp: int) -> tuple[int, ...]:
    """Return the sizes of context parallel groups that a group of `cp` ranks is divided into: powers of 2, and cp."""
    return (*(size for size in (1 << power for power in range(cp.bit_length())) if size < cp and cp % size == 0), cp)


def zigzag(cu_seqlens: torch.Tensor, cp: int) -> torch.Tensor:
    """Return [cp, P / cp] int64: the positions of each rank's tokens in the packed micro-batch of P tokens.

    cu_seqlens: [N + 1], starts of the padded sequences; lengths are multiples of 2 cp, or of 1 if cp is 1.
    """
    if cp == 1:
        return torch.arange(int(cu_seqlens[-1]))[None]
    chunks_by_rank: list[list[torch.Tensor]] = [[] for _ in range(cp)]
    for start, stop in zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True):
        parts = torch.arange(start, stop).chunk(2 * cp)
        for rank, chunks in enumerate(chunks_by_rank):
            chunks += [parts[rank], parts[2 * cp - 1 - rank]] if stop > start else []
    return torch.stack([torch.cat(chunks) for chunks in chunks_by_rank])


def gather_context(
    local: torch.Tensor, positions: torch.Tensor, group: dist.ProcessGroup, same_gradient: bool
) -> torch.Tensor:
    """Gather [P / cp, ...] of each rank to [P, ...] in the order of the micro-batch, on every rank. Differentiable.

    positions: the result of `zigzag`. same_gradient: the incoming gradient is the same on every rank, since each
    computes the same loss; otherwise it is this rank's summand, and gradients are summed over the ranks.
    """
    from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region

    if len(positions) == 1:
        return local
    gathered: torch.Tensor = gather_from_sequence_parallel_region(local, not same_gradient, group)
    return gathered.index_select(0, positions.flatten().argsort().to(local.device))
