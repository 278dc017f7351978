"""Compare Megatron's rotary embeddings, softmax scale and routing, as the tables configure them, with transformers'."""

from __future__ import annotations

import json
import math
from typing import Any

import torch

from megarl.cpu import megatron_platform
from megarl.models.registry import FAMILIES
from megarl.parallel import device

SIZES: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 16,
    "moe_intermediate_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 163840,
    "rms_norm_eps": 1e-6,
}
ROUTED = {"moe_layer_freq": 1, "n_shared_experts": 1, "first_k_dense_replace": 1}
MLA = SIZES | {
    "architectures": ["DeepseekV3ForCausalLM"],
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    **ROUTED,
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 64,
    "v_head_dim": 8,
    "routed_scaling_factor": 2.5,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 40.0, "original_max_position_embeddings": 4096}
SCALED = [
    {},
    {"mscale": 1.0, "mscale_all_dim": 1.0},  # DeepSeek-V3
    {"mscale": 1.0, "mscale_all_dim": 0.7},
    {"mscale": 1.0},  # ignored by transformers without mscale_all_dim
    {"attention_factor": 1.3688879454113937},  # what both would compute
    {"mscale": 0.7, "mscale_all_dim": 0.7, "beta_fast": 16, "beta_slow": 2},
    {
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "factor": 32.0,
        "rope_theta": 5e4,
        "beta_fast": 1,
        "beta_slow": 1,
    },  # Kimi K2
]


def rotary(rope_parameters: dict[str, Any]) -> tuple[float, float]:
    """Return the largest differences of the rotated queries and of the softmax scale."""
    from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_bshd
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
    from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding, _yarn_get_mscale
    from transformers import DeepseekV3Config
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as theirs

    config = DeepseekV3Config(**MLA, rope_parameters=dict(rope_parameters))
    values = FAMILIES["DeepseekV3ForCausalLM"].megatron_config(MLA | {"rope_parameters": rope_parameters})
    x = torch.randn(300, 1, 2, 64)  # [sequence, batch, heads, dim]
    cos, sin = theirs.DeepseekV3RotaryEmbedding(config)(x, torch.arange(300)[None])
    expected, _ = theirs.apply_rotary_pos_emb_interleave(x.permute(1, 2, 0, 3), x.permute(1, 2, 0, 3), cos, sin)
    if values["rope_type"] == "yarn":
        names = ("original_max_position_embeddings", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
        yarn = YarnRotaryEmbedding(
            64,
            rotary_base=values["rotary_base"],
            scaling_factor=values["rotary_scaling_factor"],
            **{name: values[name] for name in names},
        )
        frequencies, scale = yarn.get_emb(300)
    else:
        scaled_rope = RotaryEmbedding(64, 1.0, rotary_base=values["rotary_base"], use_cpu_initialization=True)
        frequencies, scale = scaled_rope.get_emb(300), 1.0
    rotated = _apply_rotary_pos_emb_bshd(
        x, frequencies, values["rotary_interleaved"], mla_rotary_interleaved=True, mscale=scale
    )
    mscale = _yarn_get_mscale(values["rotary_scaling_factor"], values["mscale_all_dim"])
    softmax_scale = mscale * mscale / math.sqrt(32 + 64)  # as MultiLatentAttention computes it
    difference = (rotated.permute(1, 2, 0, 3) - expected).abs().max().item()
    return difference, abs(softmax_scale - theirs.DeepseekV3Attention(config, 0).scaling)


class NoReplay:
    """Replay of routing that leaves every choice to the router."""

    def get_replay_topk(self, scores: Any, topk: int, num_groups: int, group_topk: int, compute: Any) -> Any:
        return compute(scores, topk, num_groups=num_groups, group_topk=group_topk)


def routing(architecture: str, router: Any, hf: dict[str, Any]) -> float:
    """Return the largest difference of expert weights, zero where not chosen, and of gradients, over random tokens."""
    from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function

    from megarl.megatron.model_layers import GroupMaxTopK

    torch.nn.init.normal_(router.weight)
    bias = getattr(router, "e_score_correction_bias", None)
    if bias is not None:
        bias.copy_(torch.randn(bias.shape) * 0.2)
    actual_input, expected_input = (
        torch.randn(500, 16, generator=torch.Generator().manual_seed(3)).requires_grad_() for _ in range(2)
    )
    _, weights, chosen = router(expected_input)
    expected = torch.zeros(500, router.weight.shape[0]).scatter(1, chosen, weights.float())
    values, extras = FAMILIES[architecture].megatron_config(hf), FAMILIES[architecture].extras(hf)
    probs, _ = topk_routing_with_score_function(
        actual_input @ router.weight.T,
        values["moe_router_topk"],
        use_pre_softmax=values.get("moe_router_pre_softmax", False),
        num_groups=values.get("moe_router_num_groups"),
        group_topk=values.get("moe_router_group_topk"),
        scaling_factor=values.get("moe_router_topk_scaling_factor"),
        score_function=values.get("moe_router_score_function", "softmax"),
        expert_bias=bias if values.get("moe_router_enable_expert_bias") else None,
        router_replay=GroupMaxTopK(NoReplay() if hf["n_group"] == 8 else None)
        if extras.has_group_max_routing
        else None,
    )
    direction = torch.randn(probs.shape)
    (probs * direction).sum().backward()
    (expected * direction).sum().backward()
    assert actual_input.grad is not None and expected_input.grad is not None
    return max(float(gap.abs().max()) for gap in (probs - expected, actual_input.grad - expected_input.grad))


def main() -> None:
    if not device.has_cuda():
        megatron_platform.install()
    from transformers import DeepseekV2Config, DeepseekV3Config, Qwen3MoeConfig
    from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

    torch.manual_seed(1)
    rotaries = [rotary({"rope_type": "default", "rope_theta": 5e5}), *(rotary(YARN | scaled) for scaled in SCALED)]
    routings = {}
    for groups, group_topk in ((4, 2), (4, 4), (1, 1)):
        hf = MLA | {"n_group": groups, "topk_group": group_topk}
        router = DeepseekV3TopkRouter(DeepseekV3Config(**hf))
        routings[f"deepseek {group_topk}/{groups}"] = routing("DeepseekV3ForCausalLM", router, hf)
    for method, groups, group_topk in (
        ("greedy", 1, 1),
        ("group_limited_greedy", 4, 2),
        ("group_limited_greedy", 8, 3),
    ):
        hf = MLA | {"topk_method": method, "n_group": groups, "topk_group": group_topk, "num_experts_per_tok": 6}
        hf |= {"architectures": ["DeepseekV2ForCausalLM"], "scoring_func": "softmax"}
        router = DeepseekV2TopkRouter(DeepseekV2Config(**hf))
        routings[f"deepseek v2 {group_topk}/{groups}"] = routing("DeepseekV2ForCausalLM", router, hf)
    for norm in (True, False):
        hf = SIZES | {
            "architectures": ["Qwen3MoeForCausalLM"],
            "num_experts": 16,
            "num_experts_per_tok": 4,
            "norm_topk_prob": norm,
        }
        router = Qwen3MoeTopKRouter(Qwen3MoeConfig(**hf))
        routings[f"qwen3 norm_topk_prob={norm}"] = routing("Qwen3MoeForCausalLM", router, hf)
    print("RESULT", json.dumps({"rotaries": rotaries, "routings": routings}), flush=True)


if __name__ == "__main__":
    main()
