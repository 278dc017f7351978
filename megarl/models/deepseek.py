"""DeepSeek-V2 and V3, and GLM-4.7-Flash: multi-head latent attention, shared experts, and dense first layers.

V3 (with R1, and Kimi K2 by its config.json) has sigmoid routing with groups and a balancing bias. V2 has softmax
routing, with or without groups. GLM-4.7-Flash has V3's layers with a router in FP32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any

from megarl.config import ConfigError
from megarl.config.strict import PositiveFloat
from megarl.models import blocks, config_json
from megarl.models.blocks import HEADS, norm, weight
from megarl.models.config_json import Experts, Few, Heads, Size, need, read, rope_options
from megarl.models.family import Extras, Family, StoredSlice
from megarl.models.layout_algebra import Dim0Sharding, Dim1Sharding, HFConfig, HFTensor, Param, Replicated
from megarl.models.rotary import yarn_scale

config_json.DEFAULTS["glm4moelite"] = config_json.EXPERTS | {
    "q_lora_rank": 768,
    "n_shared_experts": 1,
    "routed_scaling_factor": 1.8,
    "num_mtp_layers": 0,
    "rope_interleave": True,
}
FIELDS: dict[str, Any] = {
    **dict.fromkeys(("n_routed_experts", "num_experts_per_tok", "n_group", "topk_group"), Experts),
    **dict.fromkeys(("n_shared_experts", "first_k_dense_replace", "num_nextn_predict_layers", "num_mtp_layers"), Few),
    **dict.fromkeys(("scoring_func", "topk_method"), str),
    "moe_intermediate_size": Size,
    "routed_scaling_factor": PositiveFloat,
    "norm_topk_prob": bool,
    "moe_layer_freq": int,
}
"""Fields of routing and experts, shared with GLM-4.5."""
LATENT: dict[str, Any] = {
    **dict.fromkeys(("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), Size),
    "q_lora_rank": Size | None,
}
"""Fields of attention."""


SOFTMAX_ROUTING: dict[str, Any] = dict(moe_router_score_function="softmax", moe_router_pre_softmax=True)
SIGMOID_ROUTING: dict[str, Any] = dict(
    moe_router_score_function="sigmoid",
    moe_router_enable_expert_bias=True,
    moe_router_bias_update_rate=0.0,  # updating the bias would change the policy outside of the loss
)
"""Megatron's fields for sigmoid routing with a balancing bias."""


def _group_counts(hf: HFConfig) -> tuple[int, int]:
    """Return the numbers of expert groups and of chosen groups. DeepSeek-V2 without groups has null for both."""
    return (1, 1) if read(hf, "n_group") is None else (need(hf, "n_group"), need(hf, "topk_group"))


def latent_config(hf: HFConfig, check: Callable[[HFConfig], None], routing: dict[str, Any]) -> dict[str, Any]:
    """Return Megatron's fields for latent attention with the given routing."""
    check(hf)
    return {
        **blocks.common_config(hf),
        **experts_config(hf),
        "multi_latent_attention": True,
        "q_lora_rank": read(hf, "q_lora_rank"),
        "kv_lora_rank": need(hf, "kv_lora_rank"),
        "qk_head_dim": need(hf, "qk_nope_head_dim"),
        "qk_pos_emb_head_dim": need(hf, "qk_rope_head_dim"),
        "v_head_dim": need(hf, "v_head_dim"),
        "qk_layernorm": True,  # the norms of the latents
        # Megatron's MLA rotates pairs (0, 1), (2, 3).. itself, like HF's rope_interleave: weights stay unchanged.
        "rotary_interleaved": False,
        **_rope(hf),
        **routing,
    }


def experts_config(hf: HFConfig) -> dict[str, Any]:
    """Return Megatron's fields for MoE layers after dense layers, with groups and shared experts."""
    dense, (groups, chosen) = _dense_layers(hf), _group_counts(hf)
    shared = need(hf, "n_shared_experts") * need(hf, "moe_intermediate_size")
    return dict(
        moe_router_num_groups=groups if chosen < groups else None,
        moe_router_group_topk=chosen if chosen < groups else None,
        num_moe_experts=need(hf, "n_routed_experts"),
        moe_layer_freq=[0] * dense + [1] * (need(hf, "num_hidden_layers") - dense),
        moe_ffn_hidden_size=need(hf, "moe_intermediate_size"),
        moe_shared_expert_intermediate_size=shared or None,
        moe_router_topk=need(hf, "num_experts_per_tok"),
        moe_router_topk_scaling_factor=float(need(hf, "routed_scaling_factor")),
        moe_router_dtype="fp32",
        moe_router_load_balancing_type="none",
        moe_aux_loss_coeff=0.0,
    )


def v3_layer(
    hf: HFConfig, layer: int, experts: Iterable[int], attention: Callable[[HFConfig, int], list[Param]] | None = None
) -> list[Param]:
    """Return the table of a layer with a balancing bias. attention: `latent_attention` by default."""
    rows = partial(_decoder_layer, experts=experts, bias=True, attention=attention)
    return rows(hf, layer) if layer < need(hf, "num_hidden_layers") else mtp_layer(hf, layer, rows)


def _layer_glm4_moe_lite(hf: HFConfig, layer: int, experts: Iterable[int]) -> list[Param]:
    return blocks.with_fp32_router(v3_layer(hf, layer, experts))


def _decoder_layer(
    hf: HFConfig,
    layer: int,
    experts: Iterable[int],
    bias: bool = False,
    attention: Callable[[HFConfig, int], list[Param]] | None = None,
) -> list[Param]:
    megatron, hf_layer, hidden = f"decoder.layers.{layer}", f"model.layers.{layer}", need(hf, "hidden_size")
    return [
        norm(f"{megatron}.input_layernorm", f"{hf_layer}.input_layernorm", hidden),
        *(attention or latent_attention)(hf, layer),
        norm(f"{megatron}.pre_mlp_layernorm", f"{hf_layer}.post_attention_layernorm", hidden),
        *mlp(hf, layer, experts, bias),
    ]


def mlp(
    hf: HFConfig, layer: int, experts: Iterable[int], bias: bool, bias_name: str = "e_score_correction_bias"
) -> list[Param]:
    """Return the MLP of a dense layer, or the router, its bias if any, experts and shared experts of an MoE layer."""
    if layer < _dense_layers(hf):
        return blocks.dense_mlp(hf, layer)
    hidden, ffn, shared = need(hf, "hidden_size"), need(hf, "moe_intermediate_size"), need(hf, "n_shared_experts")
    megatron, hf_mlp = f"decoder.layers.{layer}.mlp", f"model.layers.{layer}.mlp"
    rows = blocks.moe_params(layer, hidden, ffn, num_experts(hf), experts)
    if bias:
        tensor = HFTensor(f"{hf_mlp}.gate.{bias_name}", (num_experts(hf),))
        rows.insert(1, blocks.router_bias(layer, tensor))
    if shared:
        width = "moe_intermediate_size x n_shared_experts"
        names = f"{megatron}.shared_experts", f"{hf_mlp}.shared_experts"
        rows += blocks.gated_mlp(*names, hidden, shared * ffn, width, grid="shared")
    return rows


def mtp_layer(hf: HFConfig, layer: int, decoder_layer: Callable[[HFConfig, int], list[Param]]) -> list[Param]:
    """Return the table of a multi-token prediction layer, which the engine keeps in a draft model.

    Its embedding and head are the model's own.

    layer: HF's number, past the decoder's layers.
    decoder_layer: returns the table of an MoE layer of the decoder.
    """
    hidden, first = need(hf, "hidden_size"), need(hf, "num_hidden_layers")
    megatron, hf_layer = f"mtp.layers.{layer - first}", f"model.layers.{layer}"

    def draft(row: Param, prefix: str) -> Param:
        assert row.slot is not None
        slot = replace(row.slot, name=row.slot.name.replace(f"{hf_layer}.", prefix), is_draft=True)
        return replace(row, slot=slot)

    names = {"enorm": "enorm", "hnorm": "hnorm", "final_layernorm": "shared_head.norm"}
    joint = weight(f"{megatron}.eh_proj", f"{hf_layer}.eh_proj", (hidden, 2 * hidden), Replicated())
    rows = [norm(f"{megatron}.{name}", f"{hf_layer}.{hf_name}", hidden) for name, hf_name in names.items()]
    rows.append(replace(joint, sharding=Dim0Sharding(hidden, "hidden_size")))
    rows = [draft(row, "model.") for row in rows]
    # The rest is a decoder layer. Make it an MoE layer, however few layers the model has.
    for row in decoder_layer({**hf, "num_hidden_layers": layer + 1, "first_k_dense_replace": 0}, layer):
        name = row.megatron.replace(f"decoder.layers.{layer}.", f"{megatron}.transformer_layer.")
        rows.append(draft(replace(row, megatron=name), "model.decoder."))
    return rows


def num_experts(hf: HFConfig) -> int:
    return int(need(hf, "n_routed_experts"))


def untrained_prefixes(hf: HFConfig) -> tuple[str, ...]:
    """Return the prefixes of the multi-token prediction layers, which follow the decoder's in HF's numbering."""
    first = need(hf, "num_hidden_layers")
    return tuple(f"model.layers.{first + k}." for k in range(num_mtp_layers(hf)))


def latent_attention(hf: HFConfig, layer: int) -> list[Param]:
    """Return multi-head latent attention without the layer's norms."""
    megatron, hf_prefix = f"decoder.layers.{layer}.self_attention", f"model.layers.{layer}.self_attn"
    hidden, heads, latent = need(hf, "hidden_size"), need(hf, HEADS), need(hf, "kv_lora_rank")
    nope, rope, value = need(hf, "qk_nope_head_dim"), need(hf, "qk_rope_head_dim"), need(hf, "v_head_dim")
    whole, by_head = Replicated(), Dim0Sharding(heads, HEADS)
    query, rank, fused = heads * (nope + rope), read(hf, "q_lora_rank"), ""
    if rank:
        fused = f"{hf_prefix}.fused_qkv_a_proj_with_mqa.weight"
        rows = [
            weight(f"{megatron}.linear_q_down_proj", f"{hf_prefix}.q_a_proj", (rank, hidden), whole, slot=fused),
            norm(f"{megatron}.q_layernorm", f"{hf_prefix}.q_a_layernorm", rank),
            weight(f"{megatron}.linear_q_up_proj", f"{hf_prefix}.q_b_proj", (query, rank), by_head),
        ]
    else:
        rows = [weight(f"{megatron}.linear_q_proj", f"{hf_prefix}.q_proj", (query, hidden), by_head)]
    down, up, output = (latent + rope, hidden), (heads * (nope + value), latent), (hidden, heads * value)
    kv_down = f"{megatron}.linear_kv_down_proj", f"{hf_prefix}.kv_a_proj_with_mqa"
    return [
        *rows,
        weight(*kv_down, down, whole, slot=fused, offset=rank or 0),
        norm(f"{megatron}.kv_layernorm", f"{hf_prefix}.kv_a_layernorm", latent),
        weight(f"{megatron}.linear_kv_up_proj", f"{hf_prefix}.kv_b_proj", up, by_head),
        weight(f"{megatron}.linear_proj", f"{hf_prefix}.o_proj", output, Dim1Sharding(heads, HEADS)),
    ]


def _rope(hf: HFConfig) -> dict[str, Any]:
    """Return the rotary fields of MLATransformerConfig.

    YaRN (arXiv:2309.00071): like HF, Megatron scales cos and sin by m(mscale) / m(mscale_all_dim) and the softmax by
    m(mscale_all_dim)^2, with m(x) = 0.1 x ln(factor) + 1.
    """
    options = rope_options(hf)
    theta = float(options["rope_theta"])
    if options["rope_type"] == "default":  # a factor of 1 keeps Megatron from scaling the softmax
        return dict(rope_type="rope", rotary_base=theta, rotary_scaling_factor=1.0, mscale=1.0, mscale_all_dim=0.0)
    if options["rope_type"] != "yarn":
        raise ConfigError(
            f"config.json: rope_type={options['rope_type']!r} is not implemented (implemented: default, yarn): SGLang "
            "would compute yarn"
        )
    if not options.get("truncate", True):
        raise ConfigError(
            "config.json: rope_type yarn with truncate=false is not implemented: SGLang's latent attention truncates; "
            "remove it"
        )
    factor = float(need(options, "factor"))
    yarn_scale(options, mla=True)  # raises where transformers and SGLang differ
    return dict(
        rope_type="yarn",
        rotary_base=theta,
        rotary_scaling_factor=factor,
        original_max_position_embeddings=int(need(options, "original_max_position_embeddings")),
        beta_fast=float(options.get("beta_fast", 32)),
        beta_slow=float(options.get("beta_slow", 1)),
        mscale=float(options.get("mscale", 1.0)),
        mscale_all_dim=float(options.get("mscale_all_dim", 0.0)),
    )


def _check(hf: HFConfig, fields: dict[str, Any]) -> None:
    check_attention(hf, fields)
    # SGLang applies it to the latents' norms, for which transformers has 1e-6.
    # Kimi-K2-Thinking has 1e-5. The trainer then computes what the engine does, and transformers something else.
    config_json.require(hf, "rms_norm_eps", 1e-6, (1e-5,) if hf.get("model_type") in ("kimi_k2", KIMI_K25) else ())
    _require_narrow_values(hf)


def _require_narrow_values(hf: HFConfig) -> None:
    if (size := need(hf, "v_head_dim")) > (keys := need(hf, "qk_nope_head_dim") + need(hf, "qk_rope_head_dim")):
        raise ConfigError(
            f"config.json: v_head_dim={size} above qk_nope_head_dim + qk_rope_head_dim = {keys} is not implemented: "
            "Megatron pads values to the size of keys for packed sequences"
        )


def check_attention(hf: HFConfig, fields: dict[str, Any]) -> None:
    """Raise ConfigError for wrong types, and for options of latent attention that are not implemented."""
    config_json.require_types(hf, fields)
    config_json.require_common(hf)
    if need(hf, "qk_rope_head_dim") % 2:
        raise ConfigError(f"config.json: rotary embeddings turn pairs, not qk_rope_head_dim={hf['qk_rope_head_dim']}")
    config_json.require(hf, "attention_bias", False)
    config_json.require_present(hf, "moe_layer_freq", 1)
    read(hf, "num_key_value_heads")
    config_json.require(hf, "num_key_value_heads", need(hf, HEADS), (None,))
    # transformers also writes and reads two redundant head sizes.
    rope_dim = need(hf, "qk_rope_head_dim")
    for key, size in {"head_dim": rope_dim, "qk_head_dim": need(hf, "qk_nope_head_dim") + rope_dim}.items():
        if key in hf:
            config_json.require(hf, key, size)
    _rope(hf)


def _check_v2(hf: HFConfig) -> None:
    _check(hf, FIELDS | LATENT | {"n_group": Experts | None, "topk_group": Experts | None})
    config_json.require(hf, "mlp_bias", False)
    config_json.require(hf, "rope_interleave", True)
    config_json.require_same(hf, "n_routed_experts", "num_experts")
    config_json.require_present(hf, "scoring_func", "softmax")
    config_json.require(hf, "topk_method", "greedy", ("group_limited_greedy",))
    if need(hf, "topk_method") != "greedy":
        need(hf, "n_group")
    config_json.require(hf, "norm_topk_prob", False)
    groups, group_topk = _group_counts(hf)
    if group_topk < groups and need(hf, "topk_method") == "greedy":
        raise ConfigError(
            f"config.json: topk_method='greedy' with topk_group={group_topk} of n_group={groups} is not implemented: "
            "SGLang would limit the choice to these groups; HF does with topk_method='group_limited_greedy'"
        )
    require_groups(hf)


def _check_v3(hf: HFConfig) -> None:
    _check(hf, FIELDS | LATENT)
    config_json.require(hf, "rope_interleave", True)
    config_json.require_present(hf, "scoring_func", "sigmoid")
    config_json.require_present(hf, "topk_method", "noaux_tc")
    check_sigmoid_routing(hf)


def _check_glm4_moe_lite(hf: HFConfig) -> None:
    """Like V3's, except that `rms_norm_eps` may have any value, the published 1e-5.

    SGLang and Megatron apply it to the latents' norms too, for which transformers has 1e-6.
    """
    fields = FIELDS | LATENT | {"mlp_layer_types": list[str] | None, "num_key_value_heads": Heads}
    check_attention({"moe_layer_freq": 1, **hf}, fields)  # SGLang sets this key itself
    _require_narrow_values(hf)
    config_json.require(hf, "rope_interleave", True)
    config_json.require(hf, "topk_method", "noaux_tc")
    config_json.require(hf, "num_mtp_layers", 0)  # num_nextn_predict_layers is read
    check_sigmoid_routing(hf)
    # SGLang reads the first key, transformers the second.
    layers, types = need(hf, "num_hidden_layers"), hf.get("mlp_layer_types")
    dense = 1 if types is None else types.count("dense")
    config_json.require_present(hf, "first_k_dense_replace", dense)
    config_json.require(hf, "mlp_layer_types", None, (["dense"] * dense + ["sparse"] * (layers - dense),))


def require_groups(hf: HFConfig) -> None:
    """Raise ConfigError if experts cannot be chosen as the config requires."""
    config_json.require_experts(hf, experts := num_experts(hf))
    groups, chosen = _group_counts(hf)
    if chosen > groups:
        raise ConfigError(f"config.json: topk_group={chosen} of n_group={groups} groups")
    if experts % groups:
        raise ConfigError(f"config.json: n_routed_experts={experts} in n_group={groups} groups are not of equal size")
    if (topk := need(hf, "num_experts_per_tok")) > (eligible := chosen * (experts // groups)):
        raise ConfigError(
            f"config.json: topk_group={chosen} of n_group={groups} groups with {eligible} of "
            f"n_routed_experts={experts} in all have too few for num_experts_per_tok={topk}"
        )


def check_sigmoid_routing(hf: HFConfig) -> None:
    """Raise ConfigError for options that `SIGMOID_ROUTING` does not implement."""
    config_json.require(hf, "scoring_func", "sigmoid")
    config_json.require_same(hf, "n_routed_experts", "num_local_experts")
    config_json.require_same(hf, "num_nextn_predict_layers", "num_mtp_layers")
    topk, (groups, group_topk) = need(hf, "num_experts_per_tok"), _group_counts(hf)
    if need(hf, "norm_topk_prob") != (topk > 1):
        raise ConfigError(
            f"config.json: norm_topk_prob={need(hf, 'norm_topk_prob')} with num_experts_per_tok={topk} is not "
            "implemented: Megatron normalises the weights of sigmoid routing exactly when there is more than one"
        )
    if group_topk < groups and topk // group_topk != 2:
        raise ConfigError(
            f"config.json: num_experts_per_tok={topk} with topk_group={group_topk} is not implemented: HF ranks a "
            f"group by its best 2 experts, Megatron by num_experts_per_tok / topk_group = {topk // group_topk}"
        )
    require_groups(hf)


def _dense_layers(hf: HFConfig) -> int:
    return min(need(hf, "first_k_dense_replace"), need(hf, "num_hidden_layers"))


def num_mtp_layers(hf: HFConfig) -> int:
    """Return the number of MTP layers. transformers has two names for it, and defaults to 1."""
    return int(need(hf, "num_nextn_predict_layers" if "num_nextn_predict_layers" in hf else "num_mtp_layers"))


V2 = Family(
    "DeepseekV2ForCausalLM",
    "deepseek_v2",
    _check_v2,
    partial(latent_config, check=_check_v2, routing=SOFTMAX_ROUTING),
    blocks.gpt_kwargs,
    _decoder_layer,
    num_experts,
    tool_call_parser="deepseekv3",
    extras=lambda hf: Extras(has_group_max_routing=experts_config(hf)["moe_router_num_groups"] is not None),
)
V3 = Family(
    "DeepseekV3ForCausalLM",
    "deepseek_v3",
    _check_v3,
    partial(latent_config, check=_check_v3, routing=SIGMOID_ROUTING),
    blocks.gpt_kwargs,
    v3_layer,
    num_experts,
    tool_call_parser="deepseekv3",
    parsers_by_type={"kimi_k2": "kimi_k2"},
    untrained_prefixes=untrained_prefixes,
    num_mtp_layers=num_mtp_layers,
)
GLM4_MOE_LITE = Family(
    "Glm4MoeLiteForCausalLM",
    "glm4_moe_lite",
    _check_glm4_moe_lite,
    partial(latent_config, check=_check_glm4_moe_lite, routing=SIGMOID_ROUTING),
    blocks.gpt_kwargs,
    _layer_glm4_moe_lite,
    num_experts,
    tool_call_parser="glm47",
    untrained_prefixes=untrained_prefixes,
    num_mtp_layers=num_mtp_layers,
)


# --- Kimi-K2.5 ------------------------------------------------------------------------------------------------------

KIMI_K25 = "kimi_k25"
"""`model_type` of Kimi-K2.5: K2 as the language model, which is trained on text, and a vision tower, which is not."""


def flatten_kimi_k25(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of Kimi-K2.5's language model at the top level, as families read them, and `vision_config`.

    config.json has them in `text_config`, and its quantization there or beside it.
    """
    text = dict(values["text_config"])
    quantization = text.get("quantization_config") or values.get("quantization_config")
    return {
        **text,
        "architectures": values.get("architectures") or ["KimiK25ForConditionalGeneration"],
        "model_type": KIMI_K25,
        "vision_config": values.get("vision_config") or {},
        **({"quantization_config": quantization} if quantization else {}),
    }


ENGINE_SETTINGS_K25 = {"enable_multimodal": False, "mm_enable_dp_encoder": True}
"""Without the first, SGLang would need the processor of images, which is code in the published folder. With the second,
each rank has the vision tower's whole attention; its 16 heads could not be divided among more ranks."""


def tower_elements_k25(hf: HFConfig) -> int:
    """Return the number of weights of the vision tower and its projector, of which each rank of an engine has all."""
    vision = _TOWER_K25 | hf["vision_config"]
    hidden, ffn, text = vision["vt_hidden_size"], vision["vt_intermediate_size"], vision["text_hidden_size"]
    merged = hidden * prod(vision["merge_kernel_size"])
    positions = vision["init_pos_emb_height"] * vision["init_pos_emb_width"]
    patches = (3 * vision["patch_size"] ** 2 + 1 + positions) * hidden
    layer = 4 * (hidden + 1) * hidden + (2 * hidden + 1) * ffn + hidden + 4 * hidden  # attention, MLP, two norms
    projector = 2 * hidden + (merged + 1) * (merged + text)
    return int(patches + vision["vt_num_hidden_layers"] * layer + 2 * hidden + projector)


_TOWER_K25: dict[str, Any] = {
    "init_pos_emb_height": 64,
    "init_pos_emb_width": 64,
    "merge_kernel_size": [2, 2],
    "patch_size": 14,
    "text_hidden_size": 7168,
    "vt_hidden_size": 1152,
    "vt_intermediate_size": 4304,
    "vt_num_hidden_layers": 27,
}
"""Sizes of the published tower, SGLang's defaults."""


def _check_k25(hf: HFConfig) -> None:
    _check_v3(hf)
    for key in ("num_nextn_predict_layers", "num_mtp_layers"):
        if hf.get(key):
            raise ConfigError(
                f"config.json of {K25.architecture}: {key}={hf[key]} is not implemented: SGLang has no draft model of "
                "it; remove the layer"
            )


K25 = replace(
    V3,
    architecture="KimiK25ForConditionalGeneration",
    model_type=KIMI_K25,
    check=_check_k25,
    megatron_config=partial(latent_config, check=_check_k25, routing=SIGMOID_ROUTING),
    tool_call_parser="kimi_k2",
    parsers_by_type={},
    stored_slice=lambda hf, name: StoredSlice(f"language_model.{name}"),
    untrained_prefixes=lambda hf: ("vision_tower.", "mm_projector."),
    num_mtp_layers=lambda hf: 0,
    engine_settings=ENGINE_SETTINGS_K25,
    engine_only_elements=tower_elements_k25,
)
