"""Dense models with grouped-query attention and gated MLPs: Qwen2 and 2.5, Qwen3, Llama 3 and what is built alike.

They differ in three things: Qwen2 has biases of q, k and v; Qwen3 norms of q and k; Llama 3.1 stretches its rotary
embeddings. DeepSeek-LLM is Llama by its config.json.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from torch.nn.functional import silu

from megarl.config import ConfigError
from megarl.models import blocks
from megarl.models.family import Family
from megarl.models.layout import HFConfig, Param
from megarl.models.options import default_rope, need, require, require_common, rope

LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""Of rope_type llama3: Megatron has these built in."""


def _megatron_config(hf: HFConfig, check: Callable[[HFConfig], None], bias: bool, qk_norm: bool) -> dict[str, Any]:
    check(hf)
    return dict(
        num_layers=need(hf, "num_hidden_layers"),
        hidden_size=need(hf, "hidden_size"),
        ffn_hidden_size=need(hf, "intermediate_size"),
        num_attention_heads=need(hf, "num_attention_heads"),
        num_query_groups=_groups(hf),
        kv_channels=_head_dim(hf),
        add_qkv_bias=bias,
        qk_layernorm=qk_norm,
        normalization="RMSNorm",
        layernorm_epsilon=need(hf, "rms_norm_eps"),
        gated_linear_unit=True,
        activation_func=silu,
        add_bias_linear=False,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        init_method_std=hf.get("initializer_range", 0.02),
    )


def _gpt_kwargs(hf: HFConfig) -> dict[str, Any]:
    options = rope(hf)
    stretched = options["rope_type"] == "llama3"
    return dict(
        vocab_size=need(hf, "vocab_size"),
        max_sequence_length=need(hf, "max_position_embeddings"),
        position_embedding_type="rope",
        rotary_base=float(options["rope_theta"]),
        share_embeddings_and_output_weights=bool(hf.get("tie_word_embeddings", False)),
        **({"rope_scaling": True, "rope_scaling_factor": float(need(options, "factor"))} if stretched else {}),
    )


def _layer(hf: HFConfig, layer: int, experts: Iterable[int], bias: bool, qk_norm: bool) -> list[Param]:
    hidden, ffn = need(hf, "hidden_size"), need(hf, "intermediate_size")
    ours, theirs = f"decoder.layers.{layer}", f"model.layers.{layer}"
    heads = need(hf, "num_attention_heads")
    return [
        blocks.norm(f"{ours}.input_layernorm", f"{theirs}.input_layernorm", hidden),
        *blocks.grouped_attention(layer, hidden, heads, _groups(hf), _head_dim(hf), bias, qk_norm),
        blocks.norm(f"{ours}.pre_mlp_layernorm", f"{theirs}.post_attention_layernorm", hidden),
        *blocks.gated_mlp(f"{ours}.mlp", f"{theirs}.mlp", hidden, ffn, "intermediate_size"),
    ]


def _check_qwen2(hf: HFConfig) -> None:
    require_common(hf)
    default_rope(hf)


def _check_qwen3(hf: HFConfig) -> None:
    require_common(hf)
    require(hf, "attention_bias", False)
    default_rope(hf)


def _check_llama(hf: HFConfig) -> None:
    require_common(hf)
    require(hf, "attention_bias", False)
    require(hf, "mlp_bias", False)
    options = rope(hf)
    require(options, "partial_rotary_factor", 1.0)
    if options["rope_type"] == "llama3":
        for key, value in LLAMA3.items():
            if need(options, key) != value:
                raise ConfigError(
                    f"config.json: rope_type llama3 with {key}={options[key]} is not implemented ({value})"
                )
    else:
        default_rope(hf)


def _groups(hf: HFConfig) -> int:
    return int(hf.get("num_key_value_heads") or need(hf, "num_attention_heads"))


def _head_dim(hf: HFConfig) -> int:
    return int(hf.get("head_dim") or need(hf, "hidden_size") // need(hf, "num_attention_heads"))


def _family(
    architecture: str,
    model_type: str,
    check: Callable[[HFConfig], None],
    parser: str,
    bias: bool = False,
    qk_norm: bool = False,
) -> Family:
    return Family(
        architecture,
        model_type,
        check,
        partial(_megatron_config, check=check, bias=bias, qk_norm=qk_norm),
        _gpt_kwargs,
        partial(_layer, bias=bias, qk_norm=qk_norm),
        lambda hf: 0,
        tool_call_parser=parser,
    )


QWEN2 = _family("Qwen2ForCausalLM", "qwen2", _check_qwen2, "qwen25", bias=True)
QWEN3 = _family("Qwen3ForCausalLM", "qwen3", _check_qwen3, "qwen25", qk_norm=True)
LLAMA = _family("LlamaForCausalLM", "llama", _check_llama, "llama3")
