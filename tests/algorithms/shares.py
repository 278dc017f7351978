"""Random batches, and their shares of several ranks."""

from __future__ import annotations

import torch


def random_batch(seed: int, sequences: int = 40, longest: int = 60) -> tuple[torch.Tensor, torch.Tensor]:
    """(mask [T], cu_seqlens [N + 1]): runs of actions with tools' answers between, some sequences without an action,
    some without a token."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, longest, (sequences,), generator=generator)
    cu = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    mask = torch.rand(int(cu[-1]), generator=generator) < torch.rand(int(cu[-1]), generator=generator).round() * 0.9
    for i in range(0, sequences, 7):
        mask[cu[i] : cu[i + 1]] = False
    return mask, cu


def deal(cu: torch.Tensor, ranks: int, seed: int) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Each rank's (numbers of sequences, indices of their tokens, cu_seqlens of these); the first rank gets none."""
    home = torch.randint(1 if ranks > 1 else 0, ranks, (len(cu) - 1,), generator=torch.Generator().manual_seed(seed))
    shares = []
    for rank in range(ranks):
        local = (home == rank).nonzero().squeeze(1)
        tokens = [torch.arange(int(cu[i]), int(cu[i + 1])) for i in local]
        starts = torch.cat([torch.zeros(1, dtype=torch.int64), cu.diff()[local].cumsum(0)])
        shares.append((local, torch.cat(tokens) if tokens else torch.zeros(0, dtype=torch.int64), starts))
    return shares
