"""FP8 checkpoints: matrices as e4m3 with an FP32 scale for each block of 128 x 128, as DeepSeek-V3 is published.

`reshard/quantise.py` defines the numbers; here is which tensors have them, and in which config.json.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megarl import strict
from megarl.config import ConfigError
from megarl.models.cuts import Param

BLOCK = 128
"""Side of the blocks that share a scale."""
SCALE = "_scale_inv"
"""A scale grid [ceil(R / 128), ceil(C / 128)] has its matrix's name with this behind it."""
_IMPLEMENTED = {
    "quant_method": ("fp8",),
    "weight_block_size": ([BLOCK, BLOCK],),
    "fmt": (None, "e4m3"),
    "activation_scheme": (None, "dynamic"),
    "scale_fmt": (None, "float"),
}


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
    strict.require(left_out, list[str], "config.json: modules_to_not_convert of quantization_config")
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
