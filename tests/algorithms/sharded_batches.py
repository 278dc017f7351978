"""Random packed batches, and their shards over several ranks."""

from __future__ import annotations

import torch


def random_batch(seed: int, sequences: int = 40, longest: int = 60) -> tuple[torch.Tensor, torch.Tensor]:
    """Return mask [T] and cu_seqlens [N + 1]: action tokens between tool outputs; some sequences have no action, some
    no token."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, longest, (sequences,), generator=generator)
    cu = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    mask = torch.rand(int(cu[-1]), generator=generator) < torch.rand(int(cu[-1]), generator=generator).round() * 0.9
    for i in range(0, sequences, 7):
        mask[cu[i] : cu[i + 1]] = False
    return mask, cu


def shard_sequences(cu: torch.Tensor, ranks: int, seed: int) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Return each rank's (sequence indices, token indices, cu_seqlens); the first of several ranks gets nothing."""
    owner = torch.randint(1 if ranks > 1 else 0, ranks, (len(cu) - 1,), generator=torch.Generator().manual_seed(seed))
    shares = []
    for rank in range(ranks):
        local = (owner == rank).nonzero().squeeze(1)
        tokens = [torch.arange(int(cu[i]), int(cu[i + 1])) for i in local]
        starts = torch.cat([torch.zeros(1, dtype=torch.int64), cu.diff()[local].cumsum(0)])
        shares.append((local, torch.cat(tokens) if tokens else torch.zeros(0, dtype=torch.int64), starts))
    return shares
