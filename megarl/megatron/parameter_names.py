"""Canonical parameter names: equal for every layout and both layer specs, as spelled in the tables in `models/`.

Canonical names have global layer and expert numbers, norms as separate modules, and one MLP per expert.

    local (stage 1 of 2, EP rank 1)                            canonical
    decoder.layers.0.mlp.experts.local_experts.1.linear_fc1.weight   decoder.layers.2.mlp.experts.5.linear_fc1.weight
    decoder.layers.0.mlp.experts.linear_fc1.weight1            (grouped, Transformer Engine)  the same
    decoder.layers.0.self_attention.linear_qkv.layer_norm_weight     decoder.layers.2.input_layernorm.weight
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch

from megarl.models.layout_algebra import FUSED_NORMS

_LAYER = re.compile(r"(decoder\.layers\.|mtp\.layers\.)(\d+)\.(mtp_model_layer\.)?(.*)")
_EXPERT = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.(.*)")
_GROUPED_EXPERT = re.compile(r"mlp\.experts\.(linear_fc[12])\.(weight|bias)(\d+)")


def canonical_name(local: str, first_layer: int = 0, first_expert: int = 0) -> str:
    """Return the canonical name of a parameter, given the global numbers of this rank's first layer and expert."""
    match = _LAYER.fullmatch(local)
    if match is None:
        return local
    stack, layer_number, inner, rest = match.groups()
    if stack == "mtp.layers.":  # all on the last stage
        first_layer = 0
    if expert := _EXPERT.fullmatch(rest):
        rest = f"mlp.experts.{int(expert[1]) + first_expert}.{expert[2]}"
    elif grouped := _GROUPED_EXPERT.fullmatch(rest):
        rest = f"mlp.experts.{int(grouped[3]) + first_expert}.{grouped[1]}.{grouped[2]}"
    inner = "transformer_layer." if inner else ""  # its name in checkpoints
    return f"{stack}{int(layer_number) + first_layer}.{inner}{FUSED_NORMS.get(rest, rest)}"


def unwrap(module: Any) -> Any:
    """Return the GPTModel inside Megatron's wrappers."""
    while hasattr(module, "module"):
        module = module.module
    return module


def named_params(chunks: Sequence[torch.nn.Module], ep_rank: int) -> dict[str, torch.Tensor]:
    """Return this rank's parameters by canonical name, without adapters (`lora.py`).

    Includes the routers' `expert_bias` buffers. The last stage's copy of the embedding, held for a tied output layer or
    for multi-token prediction, has the embedding's name too, so that loading gives it the same values.
    """
    named: dict[str, torch.Tensor] = {}
    for chunk in chunks:
        model = unwrap(chunk)
        layers = model.decoder.layers
        first_layer = layers[0].layer_number - 1 if len(layers) else 0
        first_expert = ep_rank * (model.config.num_moe_experts or 0) // model.config.expert_model_parallel_size
        biases = [(name, buffer) for name, buffer in model.named_buffers() if name.endswith("router.expert_bias")]
        for local, tensor in (*model.named_parameters(), *biases):
            if local.startswith("adapters."):
                continue
            name = canonical_name(local, first_layer, first_expert)
            if name == "output_layer.weight" and model.share_embeddings_and_output_weights:
                name = "embedding.word_embeddings.weight"
            named[name] = tensor
    return named
