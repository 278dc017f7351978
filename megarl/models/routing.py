"""The shape of a routing record: the MoE layers, their number of experts, and the experts per token."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from megarl.config import ConfigError
from megarl.models.activation_memory import is_moe
from megarl.models.layout_algebra import HFConfig
from megarl.models.registry import family_of


@dataclass(frozen=True)
class RoutingShape:
    """Routing of a decoder, without multi-token prediction layers."""

    num_layers: int
    moe_layers: tuple[int, ...]  # indices of the MoE layers, from 0
    topk: int
    num_experts: int

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of recorded expert indices."""
        return torch.uint8 if self.num_experts <= 256 else torch.int16


def routing_shape(hf: HFConfig, megatron: Mapping[str, Any]) -> RoutingShape:
    """Return the routing shape of a model. Raises ConfigError for a dense model.

    megatron: overrides of Megatron's configuration (`model.megatron`).
    """
    settings = {**family_of(hf).megatron_config(hf), **megatron}
    if not settings.get("num_moe_experts"):
        name = family_of(hf).architecture
        raise ConfigError(f"train.routing_replay=true, but {name} has no experts; set it to false")
    layers = int(settings["num_layers"])
    return RoutingShape(
        num_layers=layers,
        moe_layers=tuple(layer for layer in range(layers) if is_moe(settings, layer)),
        topk=int(settings["moe_router_topk"]),
        num_experts=int(settings["num_moe_experts"]),
    )
