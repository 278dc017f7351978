"""Reading config.json strictly: an option that a table does not implement is refused by its name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megarl.config import ConfigError
from megarl.models.fp8 import is_fp8


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
        raise ConfigError(f"config.json of {_name(hf)}: {key}={value!r} is not implemented (implemented: {known})")


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
            raise ConfigError(f"config.json of {_name(hf)}: layer_types={kinds} is not implemented: not {layer_types}")
        return
    for kind in kinds:
        if kind != "full_attention":
            raise ConfigError(f"config.json of {_name(hf)}: layer_types with {kind!r} is not implemented")


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
