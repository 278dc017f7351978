"""Families with grouped-query attention: Qwen2 and 2.5, Qwen3, Llama 3, Gemma 2, Qwen3-MoE, and GLM-4.5 and later.

DeepSeek-LLM is Llama by its config.json.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from torch.nn.functional import gelu

from megarl.config import ConfigError
from megarl.config.strict import PositiveFloat, PositiveInt
from megarl.models import blocks, config_json, deepseek
from megarl.models.config_json import Experts, Heads, Size, need, rope_options
from megarl.models.family import Extras, Family
from megarl.models.layout_algebra import HFConfig, Param


def _check(hf: HFConfig, fields: dict[str, Any] | None = None, partial_rotary: bool = False) -> None:
    config_json.require_types(hf, fields)
    config_json.require_common(hf, partial_rotary)
    blocks.require_heads(hf)


def _extras(hf: HFConfig) -> Extras:
    return Extras(rotary=blocks.rotary(hf))


# Dense families: Qwen2 has biases of q, k and v, and Qwen3 has norms of q and k.


def _check_qwen3(hf: HFConfig) -> None:
    _check(hf, {"head_dim": Size})
    config_json.require(hf, "attention_bias", False)


def _check_llama(hf: HFConfig) -> None:
    _check(hf)
    config_json.require(hf, "attention_bias", False)
    config_json.require(hf, "mlp_bias", False)


def _dense_family(
    architecture: str,
    model_type: str,
    check: Callable[[HFConfig], None],
    parser: str,
    bias: bool = False,
    qk_norm: bool = False,
) -> Family:
    def megatron_config(hf: HFConfig) -> dict[str, Any]:
        check(hf)
        return blocks.gqa_config(hf, bias, qk_norm)

    def rows(hf: HFConfig, layer: int, experts: Iterable[int]) -> list[Param]:
        return blocks.gqa_params(hf, layer, bias, qk_norm) + blocks.dense_mlp(hf, layer)

    return Family(
        architecture, model_type, check, megatron_config, blocks.gpt_kwargs, rows, lambda hf: 0, parser, extras=_extras
    )


QWEN2 = _dense_family("Qwen2ForCausalLM", "qwen2", _check, "qwen25", bias=True)
QWEN3 = _dense_family("Qwen3ForCausalLM", "qwen3", _check_qwen3, "qwen25", qk_norm=True)
LLAMA = _dense_family("LlamaForCausalLM", "llama", _check_llama, "llama3")


# Gemma 2: norms before and after attention and MLP, soft caps, and a sliding window in every other layer. Norms
# multiply by 1 + w; Megatron, HF and SGLang all store w. Embeddings are scaled by sqrt(hidden_size); the head is tied.

GELU_TANH = partial(gelu, approximate="tanh")
SLIDING, FULL = "sliding_attention", "full_attention"
_GEMMA2_FIELDS: dict[str, Any] = {
    "head_dim": Size,
    "num_key_value_heads": Heads,
    "sliding_window": PositiveInt,
    **dict.fromkeys(("query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping"), PositiveFloat),
}


def _check_gemma2(hf: HFConfig) -> None:
    config_json.require_types(hf, _GEMMA2_FIELDS)
    blocks.require_heads(hf)
    config_json.require_common(hf, activation="gelu_pytorch_tanh", layer_types=_gemma2_layer_types(hf))
    config_json.require_default_rope(hf, "SGLang's Gemma 2 reads rope_theta only")
    config_json.require(hf, "hidden_activation", "gelu_pytorch_tanh")
    config_json.require(hf, "attention_bias", False)
    config_json.require(hf, "use_bidirectional_attention", None, (False,))
    config_json.require(hf, "tie_word_embeddings", True)
    config_json.require_present(hf, "hidden_act", "gelu_pytorch_tanh")
    _gemma2_extras(hf)  # raises for null caps, which SGLang cannot read either


def _gemma2_layer_types(hf: HFConfig) -> list[str]:
    """Return the layer types of the published models, which SGLang hard-codes."""
    return [FULL if layer % 2 else SLIDING for layer in range(need(hf, "num_hidden_layers"))]


def _gemma2_config(hf: HFConfig) -> dict[str, Any]:
    _check_gemma2(hf)
    return blocks.gqa_config(hf) | dict(
        activation_func=GELU_TANH,
        layernorm_zero_centered_gamma=True,
        softmax_scale=float(need(hf, "query_pre_attn_scalar") ** -0.5),
        window_size=(need(hf, "sliding_window") - 1, 0),  # keys before and after the query's own position
        window_attn_skip_freq=[int(kind == SLIDING) for kind in _gemma2_layer_types(hf)],  # 1 for layers with a window
    )


def _gemma2_extras(hf: HFConfig) -> Extras:
    return Extras(
        attention_cap=float(need(hf, "attn_logit_softcapping")),
        logit_cap=float(need(hf, "final_logit_softcapping")),
        embedding_scale=float(need(hf, "hidden_size") ** 0.5),
        post_norms=True,
    )


def _gemma2_layer(hf: HFConfig, layer: int, experts: Iterable[int]) -> list[Param]:
    megatron, hf_layer, hidden = f"decoder.layers.{layer}", f"model.layers.{layer}", need(hf, "hidden_size")
    return [
        *blocks.gqa_params(hf, layer, before_mlp="pre_feedforward_layernorm"),
        blocks.norm(f"{megatron}.post_self_attn_layernorm", f"{hf_layer}.post_attention_layernorm", hidden),
        *blocks.dense_mlp(hf, layer),
        blocks.norm(f"{megatron}.post_mlp_layernorm", f"{hf_layer}.post_feedforward_layernorm", hidden),
    ]


GEMMA2 = Family(
    "Gemma2ForCausalLM",
    "gemma2",
    _check_gemma2,
    _gemma2_config,
    blocks.gpt_kwargs,
    _gemma2_layer,
    lambda hf: 0,
    tool_call_parser="pythonic",
    extras=_gemma2_extras,
)


# Qwen3-MoE: norms of q and k, and softmax-routed experts in every layer.

_QWEN3_MOE_FIELDS: dict[str, Any] = {
    **dict.fromkeys(("num_experts", "num_local_experts", "num_experts_per_tok"), Experts),
    "moe_intermediate_size": Size,
    "num_key_value_heads": Heads,
    "norm_topk_prob": bool,
}


def _check_qwen3_moe(hf: HFConfig) -> None:
    _check(hf, _QWEN3_MOE_FIELDS)
    config_json.require_same(hf, "num_experts", "num_local_experts")
    config_json.require_experts(hf, _num_experts(hf))
    config_json.require(hf, "attention_bias", False)
    config_json.require(hf, "decoder_sparse_step", 1)
    config_json.require(hf, "mlp_only_layers", [], (None,))
    if need(hf, "num_experts_per_tok") == 1 and need(hf, "norm_topk_prob"):
        # The single expert's weight would always be 1, so the router could not learn. Megatron rejects it too.
        raise ConfigError("config.json: norm_topk_prob=True with num_experts_per_tok=1 is not implemented")


def _num_experts(hf: HFConfig) -> int:
    # transformers 5 accepts both names
    return int(need(hf, "num_local_experts" if "num_local_experts" in hf else "num_experts"))


def _qwen3_moe_config(hf: HFConfig) -> dict[str, Any]:
    _check_qwen3_moe(hf)
    return blocks.gqa_config(hf, qk_norm=True) | dict(
        num_moe_experts=_num_experts(hf),
        moe_ffn_hidden_size=need(hf, "moe_intermediate_size"),
        moe_router_topk=need(hf, "num_experts_per_tok"),
        # Megatron renormalises the chosen weights by taking the softmax after the top-k, which is equivalent.
        moe_router_pre_softmax=not need(hf, "norm_topk_prob"),
        moe_router_dtype="fp32",
        moe_router_load_balancing_type="none",
        moe_aux_loss_coeff=0.0,
    )


def _qwen3_moe_layer(hf: HFConfig, layer: int, experts: Iterable[int]) -> list[Param]:
    hidden, ffn = need(hf, "hidden_size"), need(hf, "moe_intermediate_size")
    moe = blocks.moe_params(layer, hidden, ffn, _num_experts(hf), experts)
    return blocks.gqa_params(hf, layer, qk_norm=True) + moe


QWEN3_MOE = Family(
    "Qwen3MoeForCausalLM",
    "qwen3_moe",
    _check_qwen3_moe,
    _qwen3_moe_config,
    blocks.gpt_kwargs,
    _qwen3_moe_layer,
    _num_experts,
    tool_call_parser="qwen25",
    extras=_extras,
)


# GLM-4.5: attention that rotates half of each head; DeepSeek-V3's routing and experts.


def _check_glm4_moe(hf: HFConfig) -> None:
    _check(hf, {**deepseek.FIELDS, "num_key_value_heads": Heads, "use_qk_norm": bool}, partial_rotary=True)
    deepseek.check_sigmoid_routing(hf)


def _glm4_moe_options(hf: HFConfig) -> tuple[bool, bool]:
    """Return whether q, k and v have biases, and whether q and k have norms."""
    return need(hf, "attention_bias"), need(hf, "use_qk_norm")


def _glm4_moe_config(hf: HFConfig) -> dict[str, Any]:
    _check_glm4_moe(hf)
    return blocks.gqa_config(hf, *_glm4_moe_options(hf)) | deepseek.experts_config(hf) | deepseek.SIGMOID_ROUTING


def _glm4_moe_gpt_kwargs(hf: HFConfig) -> dict[str, Any]:
    return blocks.gpt_kwargs(hf) | dict(rotary_percent=float(rope_options(hf)["partial_rotary_factor"]))


def _glm4_moe_layer(hf: HFConfig, layer: int, experts: Iterable[int]) -> list[Param]:
    def decoder_layer(hf: HFConfig, layer: int) -> list[Param]:
        rows = blocks.gqa_params(hf, layer, *_glm4_moe_options(hf)) + deepseek.mlp(hf, layer, experts, bias=True)
        return blocks.with_fp32_router(rows)

    is_mtp = layer >= need(hf, "num_hidden_layers")
    return deepseek.mtp_layer(hf, layer, decoder_layer) if is_mtp else decoder_layer(hf, layer)


GLM4_MOE = Family(
    "Glm4MoeForCausalLM",
    "glm4_moe",
    _check_glm4_moe,
    _glm4_moe_config,
    _glm4_moe_gpt_kwargs,
    _glm4_moe_layer,
    deepseek.num_experts,
    tool_call_parser="glm45",
    extras=_extras,
    untrained_prefixes=deepseek.untrained_prefixes,
    num_mtp_layers=deepseek.num_mtp_layers,
)
