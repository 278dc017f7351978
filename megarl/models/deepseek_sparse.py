"""DeepSeek-V3.2 and GLM-5: DeepSeek-V3 with sparse attention (DSA), in which a lightning indexer chooses the keys.

A light attention with few heads scores all earlier tokens of a query, and the layer's latent attention sees only the
`index_topk` best of them (arXiv:2512.02556, section 2.1). In GLM-5.2 most layers share the choice of an earlier one.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch

from megarl.config import ConfigError
from megarl.models import blocks, config_json, deepseek
from megarl.models.blocks import weight
from megarl.models.config_json import Heads, Size, need
from megarl.models.family import Family
from megarl.models.layout_algebra import EngineSlot, HFConfig, HFTensor, Param, Replicated

FIELDS: dict[str, Any] = {
    **deepseek.FIELDS,
    **deepseek.LATENT,
    **dict.fromkeys(("index_topk", "index_head_dim"), Size),
    **dict.fromkeys(("index_n_heads", "num_key_value_heads"), Heads),
    "mlp_layer_types": list[str] | None,
}
_SHARING: dict[str, Any] = {
    "index_topk_freq": config_json.Layers,
    "index_skip_topk_offset": config_json.Layers,
    "index_topk_pattern": str | list[str] | None,
    "indexer_types": list[str] | None,
}
"""Fields of GLM-5.2 that say which layers compute their own choice of keys."""
INDEXER = ".core_attention.indexer."
"""Part of the canonical names of an indexer's parameters."""


def is_indexer(param: Param | str) -> bool:
    """Return whether a parameter, or a canonical name, is an indexer's."""
    return INDEXER in (param if isinstance(param, str) else param.megatron)


def indexer_types(hf: HFConfig) -> list[str]:
    """Return for each decoder layer "full" if it has an indexer, or "shared" if it uses an earlier layer's choice.

    Raises ConfigError if the keys that say so contradict each other.
    """
    layers, declared = need(hf, "num_hidden_layers"), []
    for key in ("indexer_types", "index_topk_pattern"):
        if hf.get(key):
            types = [{"F": "full", "S": "shared"}.get(name, str(name)) for name in hf[key]]
            if len(types) != layers or not set(types) <= {"full", "shared"} or types[0] != "full":
                raise ConfigError(
                    f"config.json: {key} must name full or shared for each of {layers} layers, and full for the first"
                )
            declared.append((key, types))
    if not declared or hf.get("index_topk_freq") is not None or hf.get("index_skip_topk_offset") is not None:
        freq, offset = hf.get("index_topk_freq") or 1, hf.get("index_skip_topk_offset") or 2
        types = ["full" if max(layer - offset + 1, 0) % freq == 0 else "shared" for layer in range(layers)]
        declared.append((f"index_topk_freq={freq} with index_skip_topk_offset={offset}", types))
    for key, types in declared[1:]:
        if types != declared[0][1]:
            raise ConfigError(f"config.json: {declared[0][0]} and {key} name other layers; remove one of them")
    return declared[0][1]


def index_sharing(hf: HFConfig) -> tuple[int, int]:
    """Return the period of layers with an indexer and the 1-based layer at which it starts, Megatron's two fields.

    Raises ConfigError for other patterns.
    """
    types = indexer_types(hf)
    if "shared" not in types:
        return 1, 0
    offset = types.index("shared")  # the last of the leading full layers, from 1
    rest = types[offset:]
    freq = 1 + (rest.index("full") if "full" in rest else len(rest))
    if types != ["full" if max(layer + 1 - offset, 0) % freq == 0 else "shared" for layer in range(len(types))]:
        raise ConfigError(
            "config.json: indexer_types without a period are not implemented: Megatron 0.19.2 has only "
            "dsa_indexer_topk_freq and dsa_indexer_skip_topk_offset"
        )
    return freq, offset


def _check(hf: HFConfig, fields: dict[str, Any], interleaved: bool) -> None:
    config_json.require_types(hf, fields)
    for key in ("index_topk", "index_head_dim", "index_n_heads", "q_lora_rank"):
        need(hf, key)
    dense, layers = min(need(hf, "first_k_dense_replace"), need(hf, "num_hidden_layers")), need(hf, "num_hidden_layers")
    config_json.require(hf, "mlp_layer_types", ["dense"] * dense + ["sparse"] * (layers - dense), (None,))
    config_json.require(hf, "layer_types", ["indexed_attention"] * layers, (None, ["full_attention"] * layers))
    config_json.require(hf, "mlp_bias", False)
    config_json.require(hf, "rope_interleave", True)
    config_json.require(hf, "num_mtp_layers", None)
    if need(hf, "index_head_dim") < need(hf, "qk_rope_head_dim"):
        raise ConfigError(
            f"config.json: index_head_dim={hf['index_head_dim']} has no room for qk_rope_head_dim="
            f"{hf['qk_rope_head_dim']} rotated elements"
        )
    # SGLang reads these without a counterpart in transformers or Megatron.
    (config_json.require_present if interleaved else config_json.require)(hf, "indexer_rope_interleave", interleaved)
    for key, value in {
        "index_kpool": 1,
        "index_kpool_compress": False,
        "index_k_norm_type": "layer",
        "index_init_tokens": 0,
        "index_local_tokens": 0,
        "cli_factor": 1,
        "learnable_sink": False,
    }.items():
        config_json.require(hf, key, value, (None,))
    deepseek.check_attention({**hf, "layer_types": None}, fields)
    config_json.require_present(hf, "scoring_func", "sigmoid")
    config_json.require_present(hf, "topk_method", "noaux_tc")
    deepseek.check_sigmoid_routing(hf)


def _check_v32(hf: HFConfig) -> None:
    _check(hf, FIELDS, interleaved=False)
    config_json.require(hf, "rms_norm_eps", 1e-6)  # transformers has it for the norms of latents, SGLang rms_norm_eps
    for key in _SHARING:
        config_json.require(hf, key, None, (1,) if key == "index_topk_freq" else ())


def _check_glm(hf: HFConfig) -> None:
    # The norms of latents have rms_norm_eps, as in SGLang and Megatron; transformers has 1e-6 there.
    _check(hf, FIELDS | _SHARING, interleaved=True)
    if index_sharing(hf)[0] > 1 and num_mtp_layers(hf) > 1:
        raise ConfigError(
            f"config.json: num_nextn_predict_layers={num_mtp_layers(hf)} with shared indices is not implemented: "
            "Megatron numbers these layers from 1 and would build the second one without an indexer"
        )


def _config(hf: HFConfig, interleaved: bool) -> dict[str, Any]:
    freq, offset = index_sharing(hf) if interleaved else (1, 0)
    check = _check_glm if interleaved else _check_v32
    return deepseek.latent_config(hf, check, deepseek.SIGMOID_ROUTING) | dict(
        experimental_attention_variant="dsa",
        dsa_indexer_n_heads=need(hf, "index_n_heads"),
        dsa_indexer_head_dim=need(hf, "index_head_dim"),
        dsa_indexer_topk=need(hf, "index_topk"),
        dsa_indexer_topk_freq=freq,
        dsa_indexer_skip_topk_offset=offset,
        dsa_indexer_rope_interleaved=interleaved,
        # The Hadamard transform spreads outliers before FP8 quantisation. It is orthogonal: scores do not change.
        dsa_indexer_rotate_activation=False,
        dsa_indexer_use_sparse_loss=True,  # over the chosen keys
        dsa_indexer_k_norm_epsilon=1e-6,
        dsa_indexer_k_norm_fp32=True,
    )


def num_mtp_layers(hf: HFConfig) -> int:
    """Return the number of MTP layers, a key that transformers does not read for these models."""
    return int(hf.get("num_nextn_predict_layers") or 0)


def untrained_prefixes(hf: HFConfig) -> tuple[str, ...]:
    """Return the prefixes of the multi-token prediction layers, which follow the decoder's in HF's numbering."""
    return tuple(f"model.layers.{need(hf, 'num_hidden_layers') + k}." for k in range(num_mtp_layers(hf)))


def _layer(hf: HFConfig, layer: int, experts: Iterable[int], interleaved: bool) -> list[Param]:
    is_shared = interleaved and layer < need(hf, "num_hidden_layers") and indexer_types(hf)[layer] == "shared"
    return deepseek.v3_layer(hf, layer, experts, deepseek.latent_attention if is_shared else _attention)


def _attention(hf: HFConfig, layer: int) -> list[Param]:
    """Return latent attention and its indexer, which is replicated over all ranks of trainer and engine."""
    rows = deepseek.latent_attention(hf, layer)
    megatron, name = f"decoder.layers.{layer}.self_attention{INDEXER}", f"model.layers.{layer}.self_attn.indexer."
    heads, size, hidden = need(hf, "index_n_heads"), need(hf, "index_head_dim"), need(hf, "hidden_size")
    shapes = {"wq_b": (heads * size, need(hf, "q_lora_rank")), "wk": (size, hidden), "weights_proj": (heads, hidden)}
    rows += [weight(f"{megatron}linear_{x}", f"{name}{x}", shape, Replicated()) for x, shape in shapes.items()]
    for kind in ("weight", "bias"):
        tensor = HFTensor(f"{name}k_norm.{kind}", (size,))
        slot = EngineSlot(tensor.name, Replicated(), "attention")
        # SGLang keeps this LayerNorm in fp32 whatever the model's dtype is.
        rows.append(Param(f"{megatron}k_norm.{kind}", (tensor,), Replicated(), slot, dtype=torch.float32))
    return rows


V32 = Family(
    "DeepseekV32ForCausalLM",
    "deepseek_v32",
    _check_v32,
    partial(_config, interleaved=False),
    blocks.gpt_kwargs,
    partial(_layer, interleaved=False),
    deepseek.num_experts,
    tool_call_parser="deepseekv32",
    untrained_prefixes=untrained_prefixes,
    num_mtp_layers=num_mtp_layers,
)
GLM_MOE_DSA = Family(
    "GlmMoeDsaForCausalLM",
    "glm_moe_dsa",
    _check_glm,
    partial(_config, interleaved=True),
    blocks.gpt_kwargs,
    partial(_layer, interleaved=True),
    deepseek.num_experts,
    tool_call_parser="glm47",
    untrained_prefixes=untrained_prefixes,
    num_mtp_layers=num_mtp_layers,
)
