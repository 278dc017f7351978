"""Router extensions: auxiliary losses that Megatron tracks over a step, and DeepSeek-V2's group-limited routing.

DeepSeek-V2 scores a group of experts by its best expert. Megatron 0.16.1 scores it by the sum of its best
topk / group_topk experts, which is DeepSeek-V3's rule if that number is 2.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.transformer.moe.moe_utils import get_moe_layer_wise_logging_tracker
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig

from megarl.parallel.ranks import Ranks, all_gather_objects


def collect_aux_losses(config: TransformerConfig, ranks: Ranks, micro_batches: int) -> dict[str, float]:
    """Return each enabled auxiliary loss without its coefficient: the mean over layers, micro-batches and replicas.

    Collective over the model's ranks, after each step; resets Megatron's tracker. Empty if no aux loss is enabled, the
    default in RL. Megatron's own reduction fails on a pipeline stage without MoE layers, which has tracked nothing.
    """
    num_full_copies = {
        # name in Megatron -> number of ranks with a full value each; the others hold partial values to be summed
        "load_balancing_loss": ranks.dp,
        "seq_load_balancing_loss": ranks.dp,
        "global_load_balancing_loss": 1,
        "z_loss": ranks.dp * ranks.tp * ranks.cp,
    }
    names = _enabled(config)
    if not names:
        return {}
    tracker = get_moe_layer_wise_logging_tracker()
    local_sums = {name: float(tracker[name]["values"].sum()) if name in tracker else 0.0 for name in names}
    tracker.clear()  # fully: Megatron would keep the number of layers, and the next model may have more
    gathered = all_gather_objects(local_sums, ranks.host_group)
    pattern = config.moe_layer_freq
    layers = sum(pattern) if isinstance(pattern, list) else -(-config.num_layers // pattern)
    layers += config.mtp_num_layers or 0
    return {
        f"moe_{name}": sum(sums[name] for sums in gathered) / (num_full_copies[name] * layers * micro_batches)
        for name in names
    }


def _enabled(config: TransformerConfig) -> list[str]:
    if config.num_moe_experts is None:
        return []
    balancing_types, weights = config.moe_router_load_balancing_type, config.moe_aux_loss_coeff
    if isinstance(balancing_types, str):
        balancing_types, weights = [balancing_types], [weights]
    tracked = {
        "aux_loss": "load_balancing_loss",
        "seq_aux_loss": "seq_load_balancing_loss",
        "global_aux_loss": "global_load_balancing_loss",
    }
    names = [
        tracked[balancing_type]
        for balancing_type, weight in zip(balancing_types, weights, strict=True)
        if balancing_type in tracked and weight
    ]
    return names + (["z_loss"] if config.moe_z_loss_coeff else [])


def group_max_topk(
    scores: torch.Tensor, topk: int, num_groups: int, group_topk: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scores and indices, [T, topk], of the best experts within the `group_topk` groups with the best expert.

    scores: [T, experts], any float dtype; groups are equal runs of adjacent experts. Source: arXiv:2405.04434, 2.2.2.
    """
    best = scores.unflatten(1, (num_groups, -1)).amax(dim=-1)  # [T, groups]
    is_group_chosen = torch.zeros_like(best, dtype=torch.bool).scatter(1, best.topk(group_topk, dim=-1).indices, True)
    eligible = is_group_chosen.repeat_interleave(scores.shape[1] // num_groups, dim=1)
    chosen = scores.masked_fill(~eligible, -torch.inf).topk(topk, dim=-1).indices
    return scores.gather(1, chosen), chosen


class GroupMaxTopK:
    """Overrides the router's top-k by `group_max_topk`, through Megatron's hook for routing replay.

    That hook is the only place where a router's choice can be overridden. Wraps the replay already installed, if any.
    """

    def __init__(self, replay: Any) -> None:
        self.replay = replay

    def get_replay_topk(
        self, scores: torch.Tensor, topk: int, num_groups: int, group_topk: int, _: Callable[..., Any]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        arguments = scores, topk, num_groups, group_topk
        result: tuple[torch.Tensor, torch.Tensor] = (
            group_max_topk(*arguments)
            if self.replay is None
            else self.replay.get_replay_topk(*arguments, group_max_topk)
        )
        return result


class GroupLimitedRouter(TopKRouter):  # type: ignore[misc]
    """Megatron's router, except that it chooses experts by `group_max_topk`."""

    router_replay: Any

    def routing(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        replay = self.router_replay
        self.router_replay = GroupMaxTopK(replay)
        try:
            probs, routing_map = super().routing(*args, **kwargs)
        finally:
            self.router_replay = replay
        return probs, routing_map
