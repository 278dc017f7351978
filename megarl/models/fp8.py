"""FP8 checkpoints: matrices as e4m3 with an FP32 scale for each block of 128 x 128, as DeepSeek-V3 is published.

The definition, for a block x (BF16 or FP32) of the logical tensor, the last ones of a row or column being smaller:

    scale = max(amax |x|, 1e-4) / 448        FP32, correctly rounded; the checkpoint's `weight_scale_inv`
    q = e4m3fn(x * (1 / scale))              1 / scale and the product are rounded to FP32, the cast to nearest even

That is `per_block_cast_to_fp8` of DeepGEMM (deep_gemm/utils/math.py) without UE8M0, bit for bit. SGLang makes no such
blocks as it loads: it takes them from a checkpoint. Where it does cast a BF16 weight by itself it uses this function
(models/dots3_common, and with the scales rounded up to powers of two its own copy in quantization/fp8_utils.py), and
its DeepSeek kernels are DeepGEMM's. Other converters divide x / scale, or do not bound amax, by which a block of zeros
becomes NaN; their last bits differ. An amax that is NaN makes its whole block NaN, an infinite one zeros and NaN.
The sign of a NaN is the device's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from megarl.config import ConfigError, strict
from megarl.models.layout_algebra import Param

BLOCK = 128
"""Side of the blocks that share a scale."""
SCALE_SUFFIX = "_scale_inv"
"""A scale grid [ceil(R / 128), ceil(C / 128)] has its matrix's name with this behind it."""
_IMPLEMENTED = {
    "quant_method": ("fp8",),
    "weight_block_size": ([BLOCK, BLOCK],),
    "fmt": (None, "e4m3"),
    "activation_scheme": (None, "dynamic"),
    "scale_fmt": (None, "float"),
}

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
"""The largest number of e4m3fn."""
MIN_AMAX = 1e-4
"""The least amax that a scale is made from."""
_CHUNK_ELEMENTS = 1 << 22  # elements, which bounds the temporary memory


def is_fp8(hf: Mapping[str, Any]) -> bool:
    """Whether a config.json says that the checkpoint is of this kind, and with it SGLang's engine.

    Raises ConfigError for any other quantization_config. Scales that are powers of two (scale_fmt "ue8m0", for
    Blackwell) are among these.
    """
    found = hf.get("quantization_config")
    if found is None:
        return False
    for key, known in _IMPLEMENTED.items():
        if found.get(key) not in known:
            raise ConfigError(
                f"config.json: quantization_config with {key}={found.get(key)!r} is not implemented (implemented: "
                f"{', '.join(map(repr, known))}); convert the weights to bfloat16"
            )
    left_out = found.get("modules_to_not_convert") or found.get("ignored_layers") or []
    strict.check_value(left_out, list[str], "config.json: modules_to_not_convert of quantization_config")
    for name in left_out:
        if str(name).endswith("_proj"):
            raise ConfigError(f"config.json: quantization_config that leaves out {name} is not implemented")
    return True


def is_quantised(param: Param) -> bool:
    """Whether it is FP8 in such a checkpoint: the matrices of attention, MLP and experts; not the router, norms,
    embedding, head, and projection of MTP."""
    in_layer = param.megatron.startswith(("decoder.layers.", "mtp.layers."))
    left_out = ".router." in param.megatron or ".eh_proj." in param.megatron
    return in_layer and not left_out and all(len(tensor.shape) == 2 for tensor in param.hf)


def grid_shape(shape: Sequence[int]) -> tuple[int, int]:
    """Of the scales of a matrix [R, C]: (ceil(R / 128), ceil(C / 128))."""
    rows, columns = shape
    return -(-rows // BLOCK), -(-columns // BLOCK)


def block_amax(weight: torch.Tensor, r0: int, c0: int, grid_shape: Sequence[int]) -> torch.Tensor:
    """[*grid_shape] FP32: the largest |element| of each logical block that is in a shard `weight` [rows, columns] whose
    first element is at row r0 and column c0 of the logical tensor; 0 for blocks that it has nothing of, NaN where it
    has any. Raises ValueError where the shard is not inside of the grid, or not BF16 or FP32.
    """
    grid = torch.zeros(*grid_shape, dtype=torch.float32, device=weight.device)
    if weight.numel():
        update_amax(grid, weight, r0, c0)
    return grid


def update_amax(grid: torch.Tensor, weight: torch.Tensor, r0: int, c0: int) -> None:
    """Make each element of a grid of maxima at least the shard's."""
    inside = _block_slices(weight, r0, c0, grid)
    top, left = r0 % BLOCK, c0 % BLOCK
    size = weight.abs()
    bottom, right = -(top + len(weight)) % BLOCK, -(left + weight.shape[1]) % BLOCK
    if top or bottom or left or right:
        size = torch.nn.functional.pad(size, (left, right, top, bottom))
    rows, columns = (n // BLOCK for n in size.shape)
    found = size.view(rows, BLOCK, columns, BLOCK).amax(dim=3).amax(dim=1).float()
    grid[inside] = torch.maximum(grid[inside], found)


def _block_slices(weight: torch.Tensor, r0: int, c0: int, grid: torch.Tensor) -> tuple[slice, slice]:
    """The blocks that a shard is in."""
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
    """FP32, the same shape: the scale of each block, from its amax."""
    # By a tensor, for by a number CUDA multiplies with its reciprocal, and that rounds otherwise.
    return amax.clamp(min=MIN_AMAX) / torch.full_like(amax, FP8_MAX)


def quantise(weight: torch.Tensor, scales: torch.Tensor, r0: int, c0: int) -> torch.Tensor:
    """[rows, columns] e4m3fn of any box `weight` (BF16, FP32) of a logical tensor, whose first element is at row r0 and
    column c0. scales: of the whole tensor. Raises ValueError where the box is not inside of the grid, or another type.
    """
    factors = 1.0 / scales[_block_slices(weight, r0, c0, scales)]
    quantised = torch.empty(weight.shape, dtype=FP8, device=weight.device)
    step = max(1, _CHUNK_ELEMENTS // max(1, weight.shape[1]))
    for first in range(0, len(weight), step):
        part = weight[first : first + step]
        quantised[first : first + step] = part * _expand_blocks(factors, part, r0 % BLOCK + first, c0 % BLOCK)
    return quantised


def dequantise(
    quantised: torch.Tensor, scales: torch.Tensor, r0: int = 0, c0: int = 0, dtype: torch.dtype = torch.bfloat16
) -> torch.Tensor:
    """[rows, columns]: `quantise` undone, as SGLang's `block_quant_dequant` does: the product in FP32, then `dtype`."""
    rows, columns = grid_shape((r0 + len(quantised), c0 + quantised.shape[1]))
    inside = scales[r0 // BLOCK : rows, c0 // BLOCK : columns]
    return (quantised.float() * _expand_blocks(inside, quantised, r0 % BLOCK, c0 % BLOCK)).to(dtype)


def _expand_blocks(values: torch.Tensor, box: torch.Tensor, top: int, left: int) -> torch.Tensor:
    """The value of each element's block, in the box's shape, which begins in row `top` and column `left` of the blocks
    that `values` are of."""
    rows = torch.arange(top, top + box.shape[0], device=box.device) // BLOCK
    columns = torch.arange(left, left + box.shape[1], device=box.device) // BLOCK
    return values[rows][:, columns]
