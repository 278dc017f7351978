"""GLM-4.5 and later: grouped-query attention that rotates half of each head; DeepSeek-V3's routing and experts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from megarl.models import blocks, deepseek
from megarl.models.config_json import Heads, need, require_common, require_default_rope, require_types, rope_options
from megarl.models.family import Family
from megarl.models.layout_algebra import HFConfig, Param


def _config(hf: HFConfig) -> dict[str, Any]:
    _check(hf)
    return blocks.gqa_config(hf, *_options(hf)) | deepseek.experts_config(hf) | deepseek.SIGMOID_ROUTING


def _gpt_kwargs(hf: HFConfig) -> dict[str, Any]:
    return blocks.gpt_kwargs(hf) | dict(rotary_percent=float(rope_options(hf)["partial_rotary_factor"]))


def _layer(hf: HFConfig, layer: int, experts: Iterable[int]) -> list[Param]:
    rows = partial(_decoder_layer, experts=experts)
    return rows(hf, layer) if layer < need(hf, "num_hidden_layers") else deepseek.mtp_layer(hf, layer, rows)


def _decoder_layer(hf: HFConfig, layer: int, experts: Iterable[int]) -> list[Param]:
    rows = blocks.gqa_params(hf, layer, *_options(hf)) + deepseek.mlp(hf, layer, experts, bias=True)
    # SGLang keeps the router in FP32, whatever the model's dtype.
    return [replace(row, dtype=torch.float32) if row.megatron.endswith(".router.weight") else row for row in rows]


def _options(hf: HFConfig) -> tuple[bool, bool]:
    """Return whether q, k and v have biases, and whether q and k have norms."""
    return need(hf, "attention_bias"), need(hf, "use_qk_norm")


def _check(hf: HFConfig) -> None:
    require_types(hf, {**deepseek.FIELDS, "num_key_value_heads": Heads, "use_qk_norm": bool})
    require_common(hf, partial_rotary=True)
    blocks.require_heads(hf)
    require_default_rope(hf)
    deepseek.check_sigmoid_routing(hf)


FAMILY = Family(
    "Glm4MoeForCausalLM",
    "glm4_moe",
    _check,
    _config,
    _gpt_kwargs,
    _layer,
    deepseek.num_experts,
    tool_call_parser="glm45",
    untrained_prefixes=deepseek.untrained_prefixes,
    num_mtp_layers=deepseek.num_mtp_layers,
)
