"""DeepSeek-V2's group-limited routing: a group of experts is as good as its best one.

Megatron 0.16.1 ranks a group by the sum of its best topk / group_topk, which is DeepSeek-V3's rule where that is 2.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.transformer.moe.router import TopKRouter


def best_of_groups(
    scores: torch.Tensor, topk: int, num_groups: int, group_topk: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The `topk` best experts of the `group_topk` groups that have the best ones: their scores and numbers, [T, topk].

    scores: [T, experts], any float type; groups are equally many neighbours. Source: arXiv:2405.04434, section 2.2.2.
    """
    best = scores.unflatten(1, (num_groups, -1)).amax(dim=-1)  # [T, groups]
    kept = torch.zeros_like(best, dtype=torch.bool).scatter(1, best.topk(group_topk, dim=-1).indices, True)
    eligible = kept.repeat_interleave(scores.shape[1] // num_groups, dim=1)
    chosen = scores.masked_fill(~eligible, -torch.inf).topk(topk, dim=-1).indices
    return scores.gather(1, chosen), chosen


class BestOfGroups:
    """Stands where Megatron's router looks for recorded choices, which is the one place at which others may choose; in
    front of what is there already, if anything is."""

    def __init__(self, replay: Any) -> None:
        self.replay = replay

    def get_replay_topk(
        self, scores: torch.Tensor, topk: int, num_groups: int, group_topk: int, _: Callable[..., Any]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        arguments = scores, topk, num_groups, group_topk
        found: tuple[torch.Tensor, torch.Tensor] = (
            best_of_groups(*arguments)
            if self.replay is None
            else self.replay.get_replay_topk(*arguments, best_of_groups)
        )
        return found


class GroupLimitedRouter(TopKRouter):  # type: ignore[misc]
    """Megatron's router, choosing by `best_of_groups`; scores, losses and everything else are Megatron's."""

    router_replay: Any

    def routing(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        replay = self.router_replay
        self.router_replay = BestOfGroups(replay)
        try:
            probs, routing_map = super().routing(*args, **kwargs)
        finally:
            self.router_replay = replay
        return probs, routing_map
