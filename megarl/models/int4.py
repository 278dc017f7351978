"""INT4 checkpoints: routed experts in groups of 32 along each row, compressed-tensors' "pack-quantized" format.

Kimi-K2-Thinking has it. A matrix [R, C] is stored as three tensors: `weight_packed`, int32 [R, C / 8], with element
8 i + k in bits 4 k to 4 k + 3 of word i, plus 8; `weight_scale`, bfloat16 [R, C / 32]; and `weight_shape`.

Dequantisation: w = bfloat16(q * scale), q in -8 ... 7, the product being rounded once, as compressed-tensors and
SGLang's Triton kernel compute it.

Quantisation, for the 32 elements x of a group: q = clamp(round(x / scale), -8, 7), in FP32, ties to even. Candidates of
the scale are

    max(max x / 7, -min x / 8)     the finest grid that covers the group
    max |x| / 7                    the finest symmetric one

in bfloat16, with the numbers next to each, since dequantisation has rounded 7 * scale. The candidate with the least
squared error wins, the first of equals. So dequantised weights are quantised without any change if a code of their
group is 7, -7 or -8, as after any quantiser that uses its range. A group with a number that is not finite becomes NaN.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch

from megarl.config import ConfigError, strict
from megarl.models.layout_algebra import Param

GROUP = 32  # elements of a row that share a scale
PACKED_SUFFIX, SCALE_SUFFIX, SHAPE_SUFFIX = "_packed", "_scale", "_shape"
"""Suffixes of the tensors of a matrix, after "weight", in checkpoints and in SGLang."""
QUANT_METHOD = "compressed-tensors"
_WEIGHTS = {
    "num_bits": (4,),
    "type": ("int",),
    "symmetric": (True,),
    "strategy": ("group",),
    "group_size": (GROUP,),
    "dynamic": (False, None),
    "actorder": (None,),
}
_CHUNK_ELEMENTS = 1 << 22  # bounds temporary memory
_MIN_SCALE = 2.0**-120  # smaller groups become zeros


def is_int4(hf: Mapping[str, Any]) -> bool:
    """Return whether config.json declares INT4 experts, and so an INT4 engine in SGLang.

    Raises ConfigError for any other kind of compressed-tensors.
    """
    quantization = hf.get("quantization_config")
    if quantization is None or quantization.get("quant_method") != QUANT_METHOD:
        return False
    _require("format", quantization.get("format"), ("pack-quantized",))
    _require("kv_cache_scheme", quantization.get("kv_cache_scheme"), (None,))
    _require("linear_fp8_config", quantization.get("linear_fp8_config"), (None,))
    _require("sparsity_config", quantization.get("sparsity_config") or None, (None,))
    strict.check_value(quantization.get("ignore") or [], list[str], "config.json: ignore of quantization_config")
    groups = quantization.get("config_groups")
    if not isinstance(groups, dict) or len(groups) != 1 or not isinstance(group := [*groups.values()][0], dict):
        raise ConfigError("config.json: quantization_config needs exactly one of config_groups, for the routed experts")
    _require("targets", group.get("targets"), (["Linear"],))
    for key in ("input_activations", "output_activations"):
        _require(key, group.get(key), (None,))
    _require("format", group.get("format"), (None, "pack-quantized"))
    weights = group.get("weights")
    for key, implemented in _WEIGHTS.items():
        _require(f"weights.{key}", weights.get(key) if isinstance(weights, dict) else None, implemented)
    return True


def _require(key: str, value: Any, implemented: tuple[Any, ...]) -> None:
    if value not in implemented:
        raise ConfigError(
            f"config.json: quantization_config of {QUANT_METHOD} with {key}={strict.short_repr(value)} is not "
            f"implemented (implemented: {', '.join(map(repr, implemented))}); convert the weights to bfloat16"
        )


def is_quantised(param: Param) -> bool:
    """Return whether a parameter is INT4 in such a checkpoint: the routed experts are, all others are BF16."""
    return param.expert is not None


class Int4Matrix(NamedTuple):
    """A part of a matrix [R, C] that cuts no group. packed: uint8 [R, C / 2], the even element in the lower half of a
    byte, which is the memory of `weight_packed`. scales: bfloat16 [R, C / 32]."""

    packed: torch.Tensor
    scales: torch.Tensor


def compute_scales(weight: torch.Tensor) -> torch.Tensor:
    """Return the scale of each group of a matrix [R, C], BF16 or FP32, as bfloat16 [R, C / 32]."""
    if weight.dim() != 2 or weight.shape[1] % GROUP:
        raise ValueError(f"a matrix of shape {list(weight.shape)} does not consist of groups of {GROUP}")
    scales = torch.empty(len(weight), weight.shape[1] // GROUP, dtype=torch.bfloat16, device=weight.device)
    for rows in _row_chunks(weight):
        scales[rows] = _search_scales(weight[rows].float().unflatten(1, (-1, GROUP)))
    return scales


def quantise(weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Quantise a matrix with the scales of its groups; return the codes packed as in `Int4Matrix`."""
    packed = torch.empty(len(weight), weight.shape[1] // 2, dtype=torch.uint8, device=weight.device)
    for rows in _row_chunks(weight):
        codes = _codes(weight[rows].float().unflatten(1, (-1, GROUP)), scales[rows].float())
        low, high = (codes.nan_to_num(0.0) + 8).to(torch.uint8).view(len(codes), -1, 2).unbind(-1)
        packed[rows] = low | high << 4
    return packed


def dequantise(matrix: Int4Matrix, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Invert quantisation: the products are rounded to bfloat16, and returned as `dtype`."""
    packed, scales = matrix
    weight = torch.empty(len(packed), 2 * packed.shape[1], dtype=dtype, device=packed.device)
    for rows in _row_chunks(weight):
        codes = torch.stack([packed[rows] & 15, packed[rows] >> 4], dim=-1).float() - 8
        products = codes.view(len(codes), -1, GROUP) * scales[rows].float()[..., None]
        weight[rows] = products.to(torch.bfloat16).flatten(1).to(dtype)
    return weight


def round_to_grid(weight: torch.Tensor) -> None:
    """Replace a matrix by its dequantised quantisation, in place. A second call changes nothing."""
    for rows in _row_chunks(weight):
        part = weight[rows]
        groups = part.float().unflatten(1, (-1, GROUP))
        scales = _search_scales(groups).float()
        part.copy_((_codes(groups, scales) * scales[..., None]).to(torch.bfloat16).flatten(1))


def _row_chunks(weight: torch.Tensor) -> Iterator[slice]:
    step = max(1, _CHUNK_ELEMENTS // max(1, weight.shape[1]))
    return (slice(start, start + step) for start in range(0, len(weight), step))


def _search_scales(groups: torch.Tensor) -> torch.Tensor:
    """Return the best scale of each group, bfloat16 [R, G]. groups: FP32 [R, G, 32]."""
    high, low = groups.amax(-1), groups.amin(-1)
    seven = torch.full_like(high, 7.0)  # divide by a tensor: CUDA multiplies by the reciprocal of a scalar
    amax = torch.maximum(high, -low)
    best, least = torch.empty_like(high, dtype=torch.bfloat16), torch.full_like(high, torch.inf)
    for base in (torch.maximum(high / seven, -low / 8), amax / seven):
        rounded = base.clamp(min=_MIN_SCALE).to(torch.bfloat16)
        for step in (0, -1, 1):
            # the next smaller or larger bfloat16: bits of positive numbers are ordered like the numbers
            scales = (rounded.view(torch.int16) + step).view(torch.bfloat16).clamp(min=_MIN_SCALE)
            error = _squared_error(groups, scales.float())
            is_better = error < least
            best, least = torch.where(is_better, scales, best), torch.where(is_better, error, least)
    return torch.where(torch.isfinite(amax), best, torch.nan)


def _squared_error(groups: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return each group's squared error, summed in a fixed order, so that ranks and shapes cannot differ in it."""
    rounded = (_codes(groups, scales) * scales[..., None]).to(torch.bfloat16)
    error = (groups - rounded).square_()
    while (half := error.shape[-1] // 2) > 0:
        error = error[..., :half] + error[..., half:]
    return error[..., 0]


def _codes(groups: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return (groups / scales[..., None]).round_().clamp_(-8, 7)
