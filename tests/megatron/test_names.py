"""Canonical names of parameters."""

from __future__ import annotations

from typing import Any

LAYER, GLOBAL, MTP = "decoder.layers.1.", "decoder.layers.5.", "mtp.layers.0."
BOTH_SPECS = {  # on a rank whose layer 0 and expert 0 are the model's layer 4 and expert 8
    "embedding.word_embeddings.weight": "embedding.word_embeddings.weight",
    "output_layer.weight": "output_layer.weight",
    "decoder.final_layernorm.weight": "decoder.final_layernorm.weight",
    LAYER + "input_layernorm.weight": GLOBAL + "input_layernorm.weight",
    LAYER + "self_attention.linear_qkv.layer_norm_weight": GLOBAL + "input_layernorm.weight",
    LAYER + "self_attention.linear_qkv.bias": GLOBAL + "self_attention.linear_qkv.bias",
    LAYER + "self_attention.linear_q_up_proj.layer_norm_weight": GLOBAL + "self_attention.q_layernorm.weight",
    LAYER + "self_attention.linear_kv_up_proj.layer_norm_weight": GLOBAL + "self_attention.kv_layernorm.weight",
    LAYER + "mlp.linear_fc1.layer_norm_weight": GLOBAL + "pre_mlp_layernorm.weight",
    LAYER + "mlp.experts.local_experts.3.linear_fc2.weight": GLOBAL + "mlp.experts.11.linear_fc2.weight",
    LAYER + "mlp.experts.linear_fc1.weight3": GLOBAL + "mlp.experts.11.linear_fc1.weight",
    LAYER + "mlp.experts.linear_fc1.bias3": GLOBAL + "mlp.experts.11.linear_fc1.bias",
    LAYER + "mlp.shared_experts.linear_fc1.weight": GLOBAL + "mlp.shared_experts.linear_fc1.weight",
    LAYER + "mlp.router.expert_bias": GLOBAL + "mlp.router.expert_bias",
    MTP + "enorm.weight": MTP + "enorm.weight",
    MTP + "mtp_model_layer.mlp.experts.linear_fc1.weight3": MTP + "transformer_layer.mlp.experts.11.linear_fc1.weight",
    MTP + "mtp_model_layer.self_attention.linear_q_up_proj.layer_norm_weight": MTP
    + "transformer_layer.self_attention.q_layernorm.weight",
}


def test_canonical_names_of_both_layer_specs(units: dict[str, Any]) -> None:
    """`test_model.py` compares them with the family tables by loading models."""
    assert units["names"] == BOTH_SPECS
