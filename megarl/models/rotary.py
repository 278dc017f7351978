"""Scaled rotary embeddings: linear, llama3 and YaRN, where transformers and SGLang compute the same.

Pair i of a head turns by `frequencies[i]` radians per position. Scaling lowers the low frequencies, so that positions
beyond the length of pretraining give angles that the model has seen. It does not depend on the length of a sequence.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from megarl.config import ConfigError
from megarl.models.config_json import need, rope_options


@dataclass(frozen=True)
class ScaledRotary:
    """Rotary embeddings other than Megatron's default ones."""

    frequencies: torch.Tensor = field(compare=False)
    """Radians per position of each pair, [dim / 2] fp32."""
    scale: float = 1.0
    """Factor on cosines and sines, thus on the rotated parts of queries and keys."""


def scaled_rotary(hf: Mapping[str, Any], dim: int) -> ScaledRotary | None:
    """Return the scaled rotary embeddings of grouped-query attention; None for the default ones. Raises ConfigError.

    dim: number of rotated elements of each head.
    """
    options = rope_options(hf)
    kind = options["rope_type"]
    if kind == "default":
        return None
    if kind not in _FREQUENCIES:
        implemented = ", ".join(["default", *_FREQUENCIES])
        raise ConfigError(f"config.json: rope_type={kind!r} is not implemented (implemented: {implemented})")
    frequencies = _FREQUENCIES[kind](options, dim)
    return ScaledRotary(frequencies, yarn_scale(options) if kind == "yarn" else 1.0)


def _periods(options: Mapping[str, Any], dim: int) -> torch.Tensor:
    """Return the unscaled positions per radian of each pair, rounded as in transformers."""
    return float(options["rope_theta"]) ** (torch.arange(0, dim, 2).float() / dim)  # type: ignore[no-any-return]


def _linear(options: Mapping[str, Any], dim: int) -> torch.Tensor:
    factor = need(options, "factor")
    if not isinstance(factor, float):
        raise ConfigError(
            f"config.json: rope_type linear with factor={factor}, an integer, which SGLang does not accept; "
            f"write {float(factor)}"
        )
    return 1.0 / _periods(options, dim) / factor


def _llama3(options: Mapping[str, Any], dim: int) -> torch.Tensor:
    """Divide frequencies that turn fewer than `low_freq_factor` times within the original length; above, blend."""
    factor, length = float(need(options, "factor")), need(options, "original_max_position_embeddings")
    low, high = (float(need(options, f"{name}_freq_factor")) for name in ("low", "high"))
    if low >= high:
        raise ConfigError(
            f"config.json: rope_type llama3 with low_freq_factor={low:g} not below high_freq_factor={high:g}: "
            "transformers and SGLang differ in which counts"
        )
    frequencies = 1.0 / _periods(options, dim)
    turns = length / (2 * math.pi / frequencies)
    share = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - share) * frequencies / factor + share * frequencies


def _yarn(options: Mapping[str, Any], dim: int) -> torch.Tensor:
    """YaRN (arXiv:2309.00071), section 3.2."""
    factor, length = float(need(options, "factor")), need(options, "original_max_position_embeddings")
    theta = float(options["rope_theta"])
    if theta <= 1:
        raise ConfigError(f"config.json: rope_type yarn with rope_theta={theta:g}: it must be above 1")

    def pair(turns: float) -> float:
        """Return the index of the pair that would turn this often within the original length."""
        return dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = (pair(float(options.get(*default))) for default in (("beta_fast", 32), ("beta_slow", 1)))
    if options.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    span = high - low if high != low else 0.001
    share = 1 - ((torch.arange(dim // 2).float() - low) / span).clamp(0, 1)
    periods = _periods(options, dim)
    return 1.0 / (factor * periods) * (1 - share) + 1.0 / periods * share


_FREQUENCIES = {"linear": _linear, "llama3": _llama3, "yarn": _yarn}


def yarn_scale(options: Mapping[str, Any], mla: bool = False) -> float:
    """Return the factor of YaRN on cosines and sines.

    Raises ConfigError where transformers and SGLang have different factors.

    mla: of multi-head latent attention, for which SGLang has another class.
    """
    factor, mscale, all_dim = (options.get(name) for name in ("factor", "mscale", "mscale_all_dim"))
    assert factor is not None

    def m(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0

    scale = options.get("attention_factor")
    if scale is None:
        scale = m(mscale) / m(all_dim) if mscale and all_dim else m(1)
    if mla:
        engine_scale = m(1 if mscale is None else mscale) / m(all_dim or 0)
    else:
        engine_scale = m(1) if mscale is None or all_dim is None else m(mscale) / m(all_dim)
    if abs(scale - engine_scale) > 1e-6:
        names = [key for key in ("attention_factor", "mscale", "mscale_all_dim") if options.get(key) is not None]
        values = " and ".join(f"{key}={options[key]:g}" for key in names)
        raise ConfigError(
            f"config.json: rope_type yarn with {values} is not implemented: transformers multiplies cosines and sines "
            f"by {scale:.6g}, SGLang by {engine_scale:.6g}; remove {'it' if len(names) == 1 else 'them'}"
        )
    return float(scale)
