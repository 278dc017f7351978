"""Reading config.json strictly: an option that a table does not implement is refused by its name, as is a value of the
wrong type or out of range. Types are as of `strict.py`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from megarl import strict
from megarl.config import ConfigError
from megarl.models.fp8 import is_fp8
from megarl.strict import Count, Positive, Range

Size = Annotated[int, Range(1, 1 << 24)]
Heads = Annotated[int, Range(1, 1 << 16)]
Layers = Annotated[int, Range(1, 1000)]
Experts = Annotated[int, Range(1, 4096)]
Few = Annotated[int, Range(0, 1000)]
"""No model has more; a table of all layers and experts must be made in seconds."""

FIELDS: dict[str, Any] = {
    "vocab_size": Size,
    "hidden_size": Size,
    "intermediate_size": Size,
    "num_hidden_layers": Layers,
    "num_attention_heads": Heads,
    "num_key_value_heads": Heads,
    "head_dim": Size,
    "max_position_embeddings": Count,
    "rms_norm_eps": Annotated[float, Range(above=0, below=1)],
    "initializer_range": Annotated[float, Range(0, 100)],
    "tie_word_embeddings": bool,
    "attention_bias": bool,
    "rope_theta": Positive,
    "rope_scaling": dict,
    "rope_parameters": dict,
    "partial_rotary_factor": Annotated[float, Range(above=0, most=1)],
    "layer_types": list[str],
    "quantization_config": dict,
}
"""What families read, with its type. Null is as absent, and `need` is for what may not be."""

ROPE: dict[str, Any] = {
    "type": str,
    "rope_type": str,
    "rope_theta": Positive,
    "partial_rotary_factor": Annotated[float, Range(above=0, most=1)],
    "factor": Annotated[float, Range(1, 1e6)],
    "original_max_position_embeddings": Count,
    "beta_fast": Positive,
    "beta_slow": Positive,
    "low_freq_factor": Positive,
    "high_freq_factor": Positive,
    "mscale": Annotated[float, Range(0, 1000)],
    "mscale_all_dim": Annotated[float, Range(0, 1000)],
}
"""The same of rope_parameters or rope_scaling."""


def require_types(hf: Mapping[str, Any], own: Mapping[str, Any] | None = None) -> None:
    """Raise ConfigError for a field of the wrong type or out of range: of those that all families read, and of the
    family's `own`. The first that a family checks, for what follows reads them."""
    where = f"config.json of {_name(hf)}: "
    _require_kinds(hf, {**FIELDS, **(own or {})}, where)
    _require_kinds(rope(hf), ROPE, where + ("rope_parameters." if hf.get("rope_parameters") else "rope_scaling."))


def _require_kinds(values: Mapping[str, Any], kinds: Mapping[str, Any], where: str) -> None:
    for key, kind in kinds.items():
        if values.get(key) is not None:
            strict.require(values[key], kind, where + key)


def require_experts(hf: Mapping[str, Any], experts: int) -> None:
    """Refuse more chosen experts than there are, and tables that nobody waits for."""
    layers, topk = need(hf, "num_hidden_layers"), need(hf, "num_experts_per_tok")
    if topk > experts:
        raise ConfigError(f"config.json of {_name(hf)}: num_experts_per_tok={topk}, but there are {experts} experts")
    if layers * experts > 1 << 17:
        raise ConfigError(f"config.json of {_name(hf)}: no model has {experts} experts in each of {layers} layers")


def need(hf: Mapping[str, Any], key: str) -> Any:
    """The value of a key that has no default; raises ConfigError naming it."""
    if hf.get(key) is None:
        raise ConfigError(f"config.json of {_name(hf)} has no {key}")
    return hf[key]


def require(hf: Mapping[str, Any], key: str, default: Any, allowed: tuple[Any, ...] = ()) -> None:
    """Refuse an option unless it is absent, its `default`, or one of `allowed`."""
    value = hf.get(key, default)
    if value is not None and value != default and value not in allowed:
        known = ", ".join(str(item) for item in (default, *allowed))
        found = f"{key}={strict.shown(value)}"
        raise ConfigError(f"config.json of {_name(hf)}: {found} is not implemented (implemented: {known})")


def require_common(
    hf: Mapping[str, Any],
    partial_rotary: bool = False,
    activation: str = "silu",
    layer_types: Sequence[str] | None = None,
) -> None:
    """Refuse what no family implements. partial_rotary: whether this one can turn a part of each head only.
    activation: the one of its MLPs. layer_types: the attention of each layer; None: full everywhere."""
    is_fp8(hf)  # refuses what is quantised otherwise
    require(hf, "hidden_act", activation)
    require(hf, "attention_dropout", 0.0)
    require(hf, "use_sliding_window", False)
    if not partial_rotary:
        require(rope(hf), "partial_rotary_factor", 1.0)
    require(hf, "pruned_heads", {})
    kinds = hf.get("layer_types") or ()
    if layer_types is not None:
        if kinds and list(kinds) != list(layer_types):
            raise ConfigError(
                f"config.json of {_name(hf)}: layer_types={strict.shown(kinds)} is not implemented: it would be "
                f"{strict.shown(list(layer_types))}"
            )
        return
    for kind in kinds:
        if kind != "full_attention":
            raise ConfigError(f"config.json of {_name(hf)}: layer_types with {kind!r} is not implemented")
    if kinds and len(kinds) != (layers := need(hf, "num_hidden_layers")):
        raise ConfigError(f"config.json of {_name(hf)}: layer_types has {len(kinds)} entries for {layers} layers")


def tied(hf: Mapping[str, Any]) -> bool:
    """Whether the output layer's weight is the embedding's. Gemma 2's published config.json does not say that it is."""
    gemma2 = "Gemma2ForCausalLM" in (hf.get("architectures") or ()) or hf.get("model_type") == "gemma2"
    return bool(hf.get("tie_word_embeddings", gemma2))


def rope(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Rotary options in one form: `rope_theta`, `rope_type`, `partial_rotary_factor`, and what the type has besides.

    transformers 5 writes `rope_parameters`; before it there were `rope_theta` and `rope_scaling`.
    """
    options = dict(hf.get("rope_parameters") or hf.get("rope_scaling") or {})
    if any(isinstance(value, dict) for value in options.values()):
        raise ConfigError(f"config.json of {_name(hf)}: rope_parameters per layer type are not implemented")
    options["rope_type"] = options.pop("type", None) or options.get("rope_type") or "default"
    options["rope_theta"] = options.get("rope_theta") or hf.get("rope_theta") or 10000.0
    options.setdefault("partial_rotary_factor", hf.get("partial_rotary_factor") or 1.0)
    return options


def require_default_rope(hf: Mapping[str, Any]) -> None:
    """Refuse any scaled kind of rotary embeddings."""
    options = rope(hf)
    if options["rope_type"] != "default":
        raise ConfigError(
            f"config.json of {_name(hf)}: rope_type={options['rope_type']!r} is not implemented (implemented: default)"
        )


def _name(hf: Mapping[str, Any]) -> str:
    return str((hf.get("architectures") or ["the model"])[0])
