"""FP8 checkpoints: e4m3 matrices with an FP32 scale per block of 128 x 128, the format of DeepSeek-V3.

Definition, for a block x (BF16 or FP32) of the logical tensor, where the last blocks of a row or column may be smaller:

    scale = max(amax |x|, 1e-4) / 448        FP32, correctly rounded; the checkpoint's `weight_scale_inv`
    q = e4m3fn(x * (1 / scale))              1 / scale and the product are rounded to FP32, the cast to nearest even

This equals `per_block_cast_to_fp8` of DeepGEMM (deep_gemm/utils/math.py) without UE8M0, bit for bit, as SGLang's own
casts do. Other converters divide x / scale, or do not bound amax, which turns a block of zeros into NaN; their last
bits differ. A NaN amax makes its whole block NaN, and an infinite one makes it zeros and NaN.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from megarl.config import ConfigError, strict
from megarl.models.int4 import QUANT_METHOD as INT4_METHOD
from megarl.models.layout_algebra import Param
from megarl.models.mxfp4 import is_mxfp4

BLOCK = 128  # side length of the blocks that share a scale
SCALE_SUFFIX = "_scale_inv"  # of the name of a matrix's scale grid, [ceil(R / 128), ceil(C / 128)]
_IMPLEMENTED = {
    "quant_method": ("fp8",),
    "weight_block_size": ([BLOCK, BLOCK],),
    "fmt": (None, "e4m3", "float8_e4m3fn"),
    "activation_scheme": (None, "dynamic"),
    "scale_fmt": (None, "float"),
}

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0  # the largest number of e4m3fn
MIN_AMAX = 1e-4  # lower bound on the amax of a scale
_CHUNK_ELEMENTS = 1 << 22  # bounds temporary memory


def is_fp8(hf: Mapping[str, Any]) -> bool:
    """Return whether config.json declares an FP8 checkpoint, and so an FP8 engine in SGLang.

    Raises ConfigError for any other quantization_config but MXFP4's and INT4's, including power-of-two scales
    (scale_fmt "ue8m0", for Blackwell).
    """
    quantization = hf.get("quantization_config")
    if quantization is None or is_mxfp4(hf) or quantization.get("quant_method") == INT4_METHOD:
        return False
    for key, implemented in _IMPLEMENTED.items():
        if (value := quantization.get(key)) not in implemented:
            raise ConfigError(
                f"config.json: quantization_config with {key}={value!r} is not implemented (implemented: "
                f"{', '.join(map(repr, implemented))}); convert the weights to bfloat16"
            )
    excluded = quantization.get("modules_to_not_convert") or quantization.get("ignored_layers") or []
    strict.check_value(excluded, list[str], "config.json: modules_to_not_convert of quantization_config")
    for name in excluded:
        if str(name).endswith("_proj"):
            raise ConfigError(f"config.json: quantization_config that omits {name} is not implemented")
    return True


def is_quantised(param: Param) -> bool:
    """Return whether a parameter is FP8 in such a checkpoint.

    The matrices of attention, MLPs and experts are; router, norms, embedding, head, the MTP projection and the head
    weights of indexers are not.
    """
    in_layer = param.megatron.startswith(("decoder.layers.", "mtp.layers."))
    is_excluded = any(name in param.megatron for name in (".router.", ".eh_proj.", ".linear_weights_proj."))
    return in_layer and not is_excluded and all(len(tensor.shape) == 2 for tensor in param.hf)


def grid_shape(shape: Sequence[int]) -> tuple[int, int]:
    """Return the shape of the scale grid of a matrix [R, C]: (ceil(R / 128), ceil(C / 128))."""
    rows, columns = shape
    return -(-rows // BLOCK), -(-columns // BLOCK)


def block_amax(weight: torch.Tensor, r0: int, c0: int, grid_shape: Sequence[int]) -> torch.Tensor:
    """Return the largest |element| of each logical block within a shard, [*grid_shape] FP32.

    Blocks outside of the shard have 0; blocks with a NaN have NaN. For the arguments see `quantise`.
    """
    grid = torch.zeros(*grid_shape, dtype=torch.float32, device=weight.device)
    if weight.numel():
        update_amax(grid, weight, r0, c0)
    return grid


def update_amax(grid: torch.Tensor, weight: torch.Tensor, r0: int, c0: int) -> None:
    """Raise the elements of an amax grid to at least those of a shard, in place."""
    block_slices = _block_slices(weight, r0, c0, grid)
    top, left = r0 % BLOCK, c0 % BLOCK
    magnitude = weight.abs()
    bottom, right = -(top + len(weight)) % BLOCK, -(left + weight.shape[1]) % BLOCK
    if top or bottom or left or right:
        magnitude = torch.nn.functional.pad(magnitude, (left, right, top, bottom))
    rows, columns = (n // BLOCK for n in magnitude.shape)
    shard_amax = magnitude.view(rows, BLOCK, columns, BLOCK).amax(dim=3).amax(dim=1).float()
    grid[block_slices] = torch.maximum(grid[block_slices], shard_amax)


def _block_slices(weight: torch.Tensor, r0: int, c0: int, grid: torch.Tensor) -> tuple[slice, slice]:
    """Return the grid rows and columns of the blocks that a shard overlaps."""
    if weight.dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f"weights are quantised from BF16 or FP32, not from {weight.dtype}")
    rows, columns = grid_shape((r0 + weight.shape[0], c0 + weight.shape[1]))
    if r0 < 0 or c0 < 0 or rows > grid.shape[0] or columns > grid.shape[1]:
        raise ValueError(
            f"rows {r0}:{r0 + weight.shape[0]}, columns {c0}:{c0 + weight.shape[1]} need {rows} x {columns} blocks, "
            f"the grid has {' x '.join(map(str, grid.shape))}"
        )
    return slice(r0 // BLOCK, rows), slice(c0 // BLOCK, columns)


def compute_scales(amax: torch.Tensor) -> torch.Tensor:
    """Return the scale of each block, FP32 of the same shape."""
    # Divide by a tensor: by a scalar, CUDA multiplies with the reciprocal, which rounds differently.
    return amax.clamp(min=MIN_AMAX) / torch.full_like(amax, FP8_MAX)


def quantise(weight: torch.Tensor, scales: torch.Tensor, r0: int, c0: int) -> torch.Tensor:
    """Quantise a shard of a logical tensor to e4m3fn, [rows, columns].

    Raises ValueError unless the shard lies within the grid and is BF16 or FP32.

    scales: of the whole tensor.
    r0, c0: position of the shard's first element in the logical tensor.
    """
    factors = 1.0 / scales[_block_slices(weight, r0, c0, scales)]
    quantised = torch.empty(weight.shape, dtype=FP8, device=weight.device)
    step = max(1, _CHUNK_ELEMENTS // max(1, weight.shape[1]))
    for start in range(0, 0 if weight.is_meta else len(weight), step):
        chunk = weight[start : start + step]
        scaled = chunk * _expand_blocks(factors, chunk, r0 % BLOCK + start, c0 % BLOCK)
        quantised[start : start + step] = scaled.clamp_(-FP8_MAX, FP8_MAX)  # torch 2.11 casts larger numbers to NaN
    return quantised


def dequantise(
    quantised: torch.Tensor, scales: torch.Tensor, r0: int = 0, c0: int = 0, dtype: torch.dtype = torch.bfloat16
) -> torch.Tensor:
    """Invert `quantise` like SGLang's `block_quant_dequant`: multiply in FP32, then cast to `dtype`."""
    rows, columns = grid_shape((r0 + len(quantised), c0 + quantised.shape[1]))
    local_scales = scales[r0 // BLOCK : rows, c0 // BLOCK : columns]
    return (quantised.float() * _expand_blocks(local_scales, quantised, r0 % BLOCK, c0 % BLOCK)).to(dtype)


def _expand_blocks(values: torch.Tensor, part: torch.Tensor, top: int, left: int) -> torch.Tensor:
    """Return the value of each element's block, in the shape of `part`.

    top, left: position of its first element relative to the first block of `values`.
    """
    rows = torch.arange(top, top + part.shape[0], device=part.device) // BLOCK
    columns = torch.arange(left, left + part.shape[1], device=part.device) // BLOCK
    return values[rows][:, columns]
