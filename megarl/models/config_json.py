"""Read config.json strictly: reject options that a table does not implement, wrong types and values out of range.

An absent key has the default of its configuration class in transformers (`DEFAULTS`), with which SGLang reads the file
too. A key without a default there or here is required. `tests/models/test_config_keys.py` checks for every such key
that trainer and transformers agree.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, get_args

from megarl.config import ConfigError, strict
from megarl.config.strict import PositiveFloat, PositiveInt, Range
from megarl.models.fp8 import is_fp8
from megarl.models.int4 import is_int4
from megarl.models.mxfp4 import is_mxfp4

Size = Annotated[int, Range(1, 1 << 24)]
Heads = Annotated[int, Range(1, 1 << 16)]
Layers = Annotated[int, Range(1, 1000)]
Experts = Annotated[int, Range(1, 4096)]
Few = Annotated[int, Range(0, 1000)]
"""Upper bounds beyond any real model, so that building a table of all layers and experts takes seconds at most."""

_Share = Annotated[float, Range(above=0, most=1)]
FIELDS: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "hidden_size", "intermediate_size"), Size),
    "num_hidden_layers": Layers,
    "num_attention_heads": Heads,
    "num_key_value_heads": Heads | None,
    "head_dim": Size | None,
    "max_position_embeddings": PositiveInt,
    "original_max_position_embeddings": PositiveInt | None,
    "rms_norm_eps": Annotated[float, Range(above=0, below=1)],
    "initializer_range": Annotated[float, Range(0, 100)],
    **dict.fromkeys(("tie_word_embeddings", "attention_bias"), bool),
    "rope_theta": PositiveFloat,
    "partial_rotary_factor": _Share,
    "layer_types": list[str] | None,
    **dict.fromkeys(("rope_scaling", "rope_parameters", "quantization_config"), dict | None),
}
"""Keys that families read, with their types. Null is rejected unless the type allows it, as in transformers."""

ROPE: dict[str, Any] = {
    **dict.fromkeys(("type", "rope_type"), str),
    "rope_theta": PositiveFloat,
    "partial_rotary_factor": _Share,
    "factor": Annotated[float, Range(1, 1e6)],
    "original_max_position_embeddings": PositiveInt,
    **dict.fromkeys(("beta_fast", "beta_slow"), PositiveFloat),
    **dict.fromkeys(("low_freq_factor", "high_freq_factor"), PositiveFloat),
    **dict.fromkeys(("mscale", "mscale_all_dim"), Annotated[float, Range(0, 1000)]),
    "attention_factor": PositiveFloat | None,
    "truncate": bool,
}
"""Keys of rope_parameters and rope_scaling. All others are rejected: SGLang reads some that change the output."""

ROPE_BY_LENGTH = {
    "dynamic": "in transformers its frequencies depend on the longest sequence so far, in SGLang they do not",
    "longrope": "its frequencies depend on the length, in transformers of the sequence, in SGLang of the whole batch",
}
"""Types of rotary embeddings that no table can have, and why."""

SHARED: dict[str, Any] = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "head_dim": None,  # hidden_size / num_attention_heads
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "partial_rotary_factor": 1.0,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
}
EXPERTS: dict[str, Any] = SHARED | {"n_group": 1, "topk_group": 1, "norm_topk_prob": True, "num_mtp_layers": 1}
_DELTA_NETS: dict[str, Any] = (
    SHARED
    | {"head_dim": 256, "partial_rotary_factor": 0.25, "full_attention_interval": 4, "norm_topk_prob": True}
    | {"linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128}
    | {"linear_num_key_heads": 16, "linear_num_value_heads": 32, "n_shared_experts": 1}
)
_VISION_TOKENS = {
    "image_token_id": 151655,
    "video_token_id": 151656,
    "vision_start_token_id": 151652,
    "vision_end_token_id": 151653,
}
DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": SHARED | {"mlp_bias": False, "num_key_value_heads": None},
    "qwen2": SHARED,
    "qwen3": SHARED | {"head_dim": 128},
    "qwen3moe": SHARED | {"decoder_sparse_step": 1, "mlp_only_layers": None, "norm_topk_prob": False},
    "gemma2": {key: value for key, value in SHARED.items() if key != "hidden_act"}
    | {"tie_word_embeddings": True, "hidden_activation": "gelu_pytorch_tanh", "use_bidirectional_attention": None}
    | {"head_dim": 256, "query_pre_attn_scalar": 256, "sliding_window": 4096}
    | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    "deepseekv2": SHARED
    | {"mlp_bias": False, "num_key_value_heads": None, "q_lora_rank": 1536, "n_shared_experts": 2}
    | {"first_k_dense_replace": 0, "routed_scaling_factor": 1.0, "norm_topk_prob": False}
    | {"topk_method": "greedy", "n_group": None, "topk_group": None},
    "deepseekv3": EXPERTS
    | {"q_lora_rank": 1536, "n_shared_experts": 1, "first_k_dense_replace": 3, "routed_scaling_factor": 2.5}
    | {"n_group": 8, "topk_group": 4, "rope_interleave": True},
    "qwen3next": _DELTA_NETS | {"decoder_sparse_step": 1, "mlp_only_layers": None},
    "qwen35moe": _DELTA_NETS,
    "deepseekv32": SHARED
    | {"mlp_bias": False, "q_lora_rank": 1536, "n_shared_experts": 1, "first_k_dense_replace": 3}
    | {"routed_scaling_factor": 2.5, "n_group": 8, "topk_group": 4, "norm_topk_prob": True, "mlp_layer_types": None}
    | {"index_topk": 2048, "index_head_dim": 128, "index_n_heads": 64},
    "glmmoedsa": SHARED
    | {"mlp_bias": False, "q_lora_rank": 2048, "n_shared_experts": 1, "first_k_dense_replace": 3}
    | {"routed_scaling_factor": 2.5, "n_group": 1, "topk_group": 1, "norm_topk_prob": True, "mlp_layer_types": None}
    | {"index_topk": 2048, "index_head_dim": 128, "index_n_heads": 32, "indexer_types": None},
    "qwen35": {key: value for key, value in _DELTA_NETS.items() if key not in ("norm_topk_prob", "n_shared_experts")},
    "qwen25vl": SHARED | _VISION_TOKENS | {"rope_theta": 1000000.0},
    "qwen3vlmoe": SHARED
    | _VISION_TOKENS
    | {"rope_theta": 500000.0, "decoder_sparse_step": 1, "mlp_only_layers": None, "norm_topk_prob": True},
    "glm4moe": EXPERTS
    | {"n_shared_experts": 1, "first_k_dense_replace": 1, "routed_scaling_factor": 1.0}
    | {"use_qk_norm": False, "partial_rotary_factor": 0.5},
    "gptoss": SHARED
    | {"attention_bias": True, "head_dim": 64, "rope_theta": 150000.0, "sliding_window": 128}
    | {"swiglu_alpha": 1.702, "swiglu_limit": 7.0},
}
DEFAULTS["kimik25"] = DEFAULTS["deepseekv3"]  # of its language model
"""Defaults of absent keys by model, from its configuration class in transformers. Tables in other files add theirs.

None means null, or computed from other keys. Sizes that every published config.json has are required and have no
default.
"""

ENGINE_ONLY = frozenset(
    # attention
    "attention_chunk_size dual_chunk_attention_config index_topk llama_4_scaling mla_nope original_num_attention_heads "
    "sliding_window_size swa_head_dim swa_v_head_dim window_size "
    # experts and MLPs
    "num_hash_layers router_fp32 routing_method_type swiglu_limit "
    # other
    "attn_logit_softcapping bias compression_config enable_lm_head_fp32 enable_lm_head_output_fp32 "
    "final_logit_softcapping qkv_bias scale_emb "
    # nested models
    "language_config llm_config text_config thinker_config".split()
) | {"per_layer_config"}  # read by transformers
"""Keys that change what SGLang, or transformers' generic code, computes in any model, but not what the trainer does.
A family that reads one of them lists it among its fields."""


def require_types(hf: Mapping[str, Any], family_fields: Mapping[str, Any] | None = None) -> None:
    """Raise ConfigError for a field of the wrong type or out of range, or for a field that only the engine would read.

    Families call this first, because their other checks read the fields.

    family_fields: in addition to `FIELDS`.
    """
    fields = {**FIELDS, **(family_fields or {})}
    _check_types(hf, hf, fields)
    for block in ("rope_scaling", "rope_parameters"):
        options = hf.get(block) or {}
        if any(isinstance(value, dict) for value in options.values()):
            raise _error(hf, f"{block} per layer type are not implemented")
        kind = options.get("rope_type") or options.get("type")
        if isinstance(kind, str) and kind in ROPE_BY_LENGTH:
            raise _error(hf, f"rope_type={kind!r} is not implemented: {ROPE_BY_LENGTH[kind]}")
        for key in sorted(options.keys() - ROPE.keys()):
            raise _error(hf, f"{block}.{key} is not implemented; known: {', '.join(ROPE)}")
        _check_types(hf, options, ROPE, f"{block}.")
    rope_options(hf)  # raises if the blocks contradict each other
    for key in sorted(ENGINE_ONLY - fields.keys()):
        if hf.get(key) not in (None, False):
            raise _error(hf, f"{key}={strict.short_repr(hf[key])} is not implemented in training; remove it")


def _check_types(hf: Mapping[str, Any], values: Mapping[str, Any], types: Mapping[str, Any], prefix: str = "") -> None:
    """Check `values`, config.json or a block of it. prefix: of the keys in errors."""
    for key, kind in types.items():
        if values.get(key) is not None:
            strict.check_value(values[key], kind, f"config.json of {_name(hf)}: {prefix}{key}")
        elif key in values and type(None) not in get_args(kind):
            raise ConfigError(f"config.json of {_name(hf)} has no {prefix}{key}: it is null")


def require_present(hf: Mapping[str, Any], key: str, value: Any) -> None:
    """Like `require`, for a key that SGLang reads without a default and transformers does not read."""
    if hf.get(key) is None:
        raise ConfigError(f"config.json of {_name(hf)} has no {key}, which SGLang reads; add {json.dumps(value)}")
    require(hf, key, value)


def require_experts(hf: Mapping[str, Any], experts: int) -> None:
    """Raise ConfigError if more experts are chosen than exist, or if the table would take too long to build."""
    layers, topk = need(hf, "num_hidden_layers"), need(hf, "num_experts_per_tok")
    if topk > experts:
        raise _error(hf, f"num_experts_per_tok={topk}, but there are {experts} experts")
    if layers * experts > 1 << 17:
        raise _error(hf, f"no model has {experts} experts in each of {layers} layers")


def require_same(hf: Mapping[str, Any], key: str, other: str) -> None:
    """Raise ConfigError if two names of one option have different values."""
    if key in hf and other in hf and hf[key] != hf[other]:
        options = f"{key}={strict.short_repr(hf[key])} and {other}={strict.short_repr(hf[other])}"
        raise _error(hf, f"{options} are two names of an option; remove one")


def read(hf: Mapping[str, Any], key: str) -> Any:
    """Return the value of a key, possibly None; for an absent key, its default in transformers.

    Raises ConfigError, naming the key, if it is absent and has no default.
    """
    if key in hf:
        return hf[key]
    defaults = _defaults(hf)
    if key not in defaults:
        raise ConfigError(f"config.json of {_name(hf)} has no {key}")
    return defaults[key]


def need(hf: Mapping[str, Any], key: str) -> Any:
    """Return the value of a key as `read` does. Raises ConfigError if it is null."""
    if (value := read(hf, key)) is None:
        raise ConfigError(f"config.json of {_name(hf)} has no {key}")
    return value


def require(hf: Mapping[str, Any], key: str, default: Any, allowed: tuple[Any, ...] = ()) -> None:
    """Raise ConfigError unless an option is `default` or in `allowed`.

    An absent option has its default in transformers, or `default` if it has none there.
    """
    value = hf[key] if key in hf else _defaults(hf).get(key, default)
    if value != default and value not in allowed:
        implemented = ", ".join(str(item) for item in (default, *allowed))
        raise _error(hf, f"{key}={strict.short_repr(value)} is not implemented (implemented: {implemented})")


def require_common(
    hf: Mapping[str, Any],
    partial_rotary: bool = False,
    activation: str = "silu",
    layer_types: Sequence[str] | None = None,
    mxfp4: bool = False,
    neox_rope: bool = True,
) -> None:
    """Raise ConfigError for options that no family implements.

    partial_rotary: whether this family supports rotating only a part of each head.
    neox_rope: whether it rotates the halves of a head, not neighbouring pairs.
    layer_types: the attention type of each layer; None for full attention everywhere.
    mxfp4: whether checkpoints of this family may be in MXFP4, and then not in FP8.
    """
    is_int4(hf)  # raises for other kinds of compressed-tensors
    declares_fp8 = is_fp8(hf)  # raises for any other quantisation
    if declares_fp8 if mxfp4 else is_mxfp4(hf):
        method = hf["quantization_config"]["quant_method"]
        raise _error(hf, f"quantization_config with quant_method={method!r} is not implemented; use bfloat16 weights")
    require(hf, "hidden_act", activation)
    require(hf, "attention_dropout", 0.0)
    require(hf, "use_sliding_window", False)
    if not partial_rotary:
        require(rope_options(hf), "partial_rotary_factor", 1.0)
        require(hf, "partial_rotary_factor", 1.0)
    require(hf, "rope_is_neox_style", neox_rope)
    require(hf, "pruned_heads", {}, (None,))
    types = list(hf.get("layer_types") or ())
    if layer_types is not None:
        if types and types != list(layer_types):
            expected = strict.short_repr(list(layer_types))
            raise _error(hf, f"layer_types={strict.short_repr(types)} is not implemented: it would be {expected}")
        return
    for layer_type in types:
        if layer_type != "full_attention":
            raise _error(hf, f"layer_types with {layer_type!r} is not implemented")
    if types and len(types) != (layers := need(hf, "num_hidden_layers")):
        raise _error(hf, f"layer_types has {len(types)} entries for {layers} layers")


def rope_options(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Return normalised rotary options: `rope_theta`, `rope_type`, `partial_rotary_factor` and those of the type.

    transformers 5 writes `rope_parameters`; earlier versions wrote `rope_theta` and `rope_scaling`. Raises ConfigError
    if both are present and differ: transformers and SGLang would ignore all of `rope_parameters`.
    """
    scaling, parameters = hf.get("rope_scaling"), hf.get("rope_parameters")
    options = _rope(hf, scaling or parameters)
    if scaling and parameters and options != _rope(hf, parameters):
        raise _error(
            hf,
            "rope_scaling and rope_parameters are both there and differ; keep one of them, with rope_type, rope_theta "
            "and all else in it",
        )
    return options


def _rope(hf: Mapping[str, Any], block: Mapping[str, Any] | None) -> dict[str, Any]:
    options = dict(block or {})
    legacy_type = options.pop("type", None)
    options["rope_type"] = options.get("rope_type") or legacy_type or "default"
    for key in ("rope_theta", "partial_rotary_factor"):
        if key not in options:
            options[key] = need(hf, key)
    key = "original_max_position_embeddings"
    if options["rope_type"] in ("llama3", "yarn") and key not in options and hf.get(key) is None:
        # transformers, with which SGLang reads the file too, fills the block so
        options[key] = need(hf, "max_position_embeddings")
    length, block_length = (source.get(key) for source in (hf, options))
    if length is not None and options["rope_type"] != "default" and length != block_length:
        raise _error(
            hf,
            f"original_max_position_embeddings={strict.short_repr(length)} beside {strict.short_repr(block_length)} in "
            "rope_scaling or rope_parameters: transformers and SGLang differ in which counts; give the right one there "
            "alone",
        )
    return options


def require_default_rope(hf: Mapping[str, Any], reason: str) -> None:
    """Raise ConfigError for any scaled rotary embeddings."""
    if (rope_type := rope_options(hf)["rope_type"]) != "default":
        raise _error(hf, f"rope_type={rope_type!r} is not implemented (implemented: default): {reason}")


def _error(hf: Mapping[str, Any], problem: str) -> ConfigError:
    return ConfigError(f"config.json of {_name(hf)}: {problem}")


def _name(hf: Mapping[str, Any]) -> str:
    return str((hf.get("architectures") or ["the model"])[0])


def has_default(hf: Mapping[str, Any], key: str) -> bool:
    """Return whether an absent key has a default in the model's configuration class."""
    return key in _defaults(hf)


def _defaults(hf: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the defaults of the model in config.json, or the shared ones if `DEFAULTS` does not have it."""
    architecture = next(iter(hf.get("architectures") or ()), None)
    model = str(hf.get("model_type")) if architecture is None else str(architecture).partition("For")[0]
    return DEFAULTS.get(model.replace("_", "").lower(), SHARED)
