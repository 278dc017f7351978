"""How old rollouts are when they are trained on, in versions of the weights."""

from __future__ import annotations

import torch

from megarl.types import Rollouts


def lag_figures(rollouts: Rollouts) -> dict[str, float]:
    """Of the tokens that the policy chose: by how many versions the weights that chose them are older than those of
    now, as mean, median, 95th percentile and maximum. The same on all ranks. Collective."""
    counts = torch.zeros(1 + max(rollouts.lag.tolist(), default=0), dtype=torch.int64)
    for rollout in rollouts.here:
        for turn in rollout.turns:
            for version, tokens in turn.runs if turn.is_action else ():
                counts[max(0, rollouts.version - version)] += tokens
    counts = rollouts.everyone.total(counts)
    tokens = max(1, int(counts.sum()))
    reached = counts.cumsum(0)
    found = {"mean": int((counts * torch.arange(len(counts))).sum()) / tokens}
    for name, share in (("p50", 0.5), ("p95", 0.95), ("max", 1.0)):
        found[name] = float((reached < share * tokens).sum())
    return {f"rollout/lag_{name}": value for name, value in found.items()}
