"""Dense models with grouped-query attention and gated MLPs: Qwen2 and 2.5, Qwen3, Llama 3 and similar models.

They differ in three points: Qwen2 has biases of q, k and v, Qwen3 has norms of q and k, and Llama 3.1 scales its rotary
embeddings. DeepSeek-LLM is Llama by its config.json.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from megarl.config import ConfigError
from megarl.models import blocks
from megarl.models.config_json import (
    Size,
    need,
    require,
    require_common,
    require_default_rope,
    require_types,
    rope_options,
)
from megarl.models.family import Family
from megarl.models.layout_algebra import HFConfig, Param

LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""Parameters of rope_type llama3 that Megatron hard-codes."""


def _gpt_kwargs(hf: HFConfig) -> dict[str, Any]:
    kwargs, options = blocks.gpt_kwargs(hf), rope_options(hf)
    if options["rope_type"] == "llama3":
        kwargs |= dict(rope_scaling=True, rope_scaling_factor=float(need(options, "factor")))
    return kwargs


def _check(hf: HFConfig, keys: dict[str, Any] | None = None) -> None:
    require_types(hf, keys)
    require_common(hf)
    blocks.require_heads(hf)


def _check_qwen2(hf: HFConfig) -> None:
    _check(hf)
    require_default_rope(hf)


def _check_qwen3(hf: HFConfig) -> None:
    _check(hf, {"head_dim": Size})
    require(hf, "attention_bias", False)
    require_default_rope(hf)


def _check_llama(hf: HFConfig) -> None:
    _check(hf)
    require(hf, "attention_bias", False)
    require(hf, "mlp_bias", False)
    options = rope_options(hf)
    if options["rope_type"] == "llama3":
        for key, value in LLAMA3.items():
            if need(options, key) != value:
                raise ConfigError(
                    f"config.json: rope_type llama3 with {key}={options[key]} is not implemented ({value})"
                )
    else:
        require_default_rope(hf)


def _family(
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

    return Family(architecture, model_type, check, megatron_config, _gpt_kwargs, rows, lambda hf: 0, parser)


QWEN2 = _family("Qwen2ForCausalLM", "qwen2", _check_qwen2, "qwen25", bias=True)
QWEN3 = _family("Qwen3ForCausalLM", "qwen3", _check_qwen3, "qwen25", qk_norm=True)
LLAMA = _family("LlamaForCausalLM", "llama", _check_llama, "llama3")
