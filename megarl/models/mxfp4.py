"""MXFP4 checkpoints of gpt-oss: experts as 4-bit floats with a scale per 32 weights. Read, and never written.

A row of weights [columns] is stored as `..._blocks` [columns / 32, 16], two weights in a byte, the first in its low
bits, and `..._scales` [columns / 32], exponents of two with a bias of 127; all are uint8. Source: OCP Microscaling
Formats (MX) Specification 1.0, sections 5.3.3 (E2M1) and 5.4.1 (E8M0).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from megarl.config import ConfigError, strict

METHOD = "mxfp4"  # `quant_method` in config.json
BLOCKS_SUFFIX, SCALES_SUFFIX = "_blocks", "_scales"  # after the name of the dequantised stack
GROUP = 32  # weights that share a scale
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_NAN_SCALE = 255
_KNOWN_KEYS = ("quant_method", "modules_to_not_convert")


def is_mxfp4(hf: Mapping[str, Any]) -> bool:
    """Return whether config.json declares an MXFP4 checkpoint. Raises ConfigError for options beside the method.

    Which tensors are quantised follows from their names.
    """
    quantization = hf.get("quantization_config")
    if quantization is None or quantization.get("quant_method") != METHOD:
        return False
    for key in quantization:
        if key not in _KNOWN_KEYS:
            raise ConfigError(
                f"config.json: quantization_config with quant_method={METHOD} and {key} is not implemented; convert "
                "the weights to bfloat16"
            )
    excluded = quantization.get("modules_to_not_convert") or []
    strict.check_value(excluded, list[str], "config.json: modules_to_not_convert of quantization_config")
    return True


def dequantise(blocks: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Return weights [.., columns]. Exact in bfloat16, apart from exponents below its range.

    blocks: [.., columns / 32, 16] uint8. scales: [.., columns / 32] uint8.
    """
    magnitudes = torch.tensor(_MAGNITUDES, device=blocks.device)
    values = torch.cat([magnitudes, -magnitudes])
    pairs = torch.stack([blocks & 15, blocks >> 4], dim=-1)  # [.., columns / 32, 16, 2]
    factors = torch.ldexp(torch.ones_like(scales, dtype=torch.float32), scales.int() - 127)
    factors = factors.masked_fill(scales == _NAN_SCALE, torch.nan)
    weights = values[pairs.long()].flatten(-2) * factors[..., None]
    return weights.flatten(-2).to(dtype)
