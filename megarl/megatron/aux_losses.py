"""The router's auxiliary losses, as Megatron tracked them over a step."""

from __future__ import annotations

from megatron.core.transformer.moe.moe_utils import get_moe_layer_wise_logging_tracker
from megatron.core.transformer.transformer_config import TransformerConfig

from megarl.parallel.ranks import Ranks, all_gather_objects


def collect_aux_losses(config: TransformerConfig, ranks: Ranks, micro_batches: int) -> dict[str, float]:
    """Each auxiliary loss that is on, before its coefficient: the mean over layers, micro-batches and replicas.

    Called by all ranks of the model after each step; starts the next count. Empty where none is on, as in RL by
    default. Megatron's own reduction fails on a pipeline stage without MoE layers, which has tracked nothing.
    """
    shares = {
        # name in Megatron -> how many ranks each hold the whole of it, the others being parts to add up
        "load_balancing_loss": ranks.dp,
        "seq_load_balancing_loss": ranks.dp,
        "global_load_balancing_loss": 1,
        "z_loss": ranks.dp * ranks.tp * ranks.cp,
    }
    names = _enabled(config)
    if not names:
        return {}
    tracker = get_moe_layer_wise_logging_tracker()
    mine = {name: float(tracker[name]["values"].sum()) if name in tracker else 0.0 for name in names}
    tracker.clear()  # all of it: Megatron would keep the number of layers, and the next model may have more
    everyone = all_gather_objects(mine, ranks.host)
    pattern = config.moe_layer_freq
    layers = sum(pattern) if isinstance(pattern, list) else -(-config.num_layers // pattern)
    layers += config.mtp_num_layers or 0
    return {
        f"moe_{name}": sum(found[name] for found in everyone) / (shares[name] * layers * micro_batches)
        for name in names
    }


def _enabled(config: TransformerConfig) -> list[str]:
    if config.num_moe_experts is None:
        return []
    kinds, weights = config.moe_router_load_balancing_type, config.moe_aux_loss_coeff
    if isinstance(kinds, str):
        kinds, weights = [kinds], [weights]
    tracked = {
        "aux_loss": "load_balancing_loss",
        "seq_aux_loss": "seq_load_balancing_loss",
        "global_aux_loss": "global_load_balancing_loss",
    }
    names = [tracked[kind] for kind, weight in zip(kinds, weights, strict=True) if kind in tracked and weight]
    return names + (["z_loss"] if config.moe_z_loss_coeff else [])
