"""Whether a model computes once what sequences of a micro-batch have in common (`train.share_prefixes`)."""

from __future__ import annotations

from megarl.config import Config
from megarl.models.family import HFConfig
from megarl.models.registry import family_of

_VARIANTS = {"gated_delta_net": "gated delta nets", "dsa": "sparse attention"}


def reason_against(hf: HFConfig, config: Config, has_gpu: bool) -> str | None:
    """Return why tokens that sequences have in common are computed for each of them; None if they are computed once.

    has_gpu: whether models are built for GPUs.
    """
    if config.train.share_prefixes is None and has_gpu:
        return "train.share_prefixes=null on GPUs"
    if config.train.share_prefixes is False:
        return "train.share_prefixes=false"
    family = family_of(hf)
    if has_gpu and family.extras(hf).has_sinks:
        return "attention with sinks on GPUs"
    settings = {**family.megatron_config(hf), **config.model.megatron}
    if family.vision is not None:
        return "a vision tower"
    if variant := settings.get("experimental_attention_variant"):
        return _VARIANTS.get(variant, str(variant))
    for name in ("hidden_dropout", "attention_dropout", "moe_input_jitter_eps", "apply_rope_fusion"):
        if settings.get(name):
            return f"model.megatron.{name}"
    losses = settings.get("moe_aux_loss_coeff") or 0.0
    if any(losses if isinstance(losses, list | tuple) else [losses]) or settings.get("moe_z_loss_coeff"):
        return "auxiliary losses of routers, which count each token"
    if settings.get("moe_router_enable_expert_bias") and settings.get("moe_router_bias_update_rate"):
        return "model.megatron.moe_router_bias_update_rate, which counts each token"
    if settings.get("moe_expert_capacity_factor") is not None:
        return "model.megatron.moe_expert_capacity_factor, by which tokens compete"
    return None
