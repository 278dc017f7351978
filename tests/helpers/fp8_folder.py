"""Model folders in FP8 with a scale per block of 128 x 128, as DeepSeek-V3 is published, from other folders."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from megarl.models import fp8
from megarl.models.registry import family_of, load_hf_config

QUANTIZATION: dict[str, Any] = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
}
"""DeepSeek-V3's quantization_config."""


def quantise_folder(folder: Path, target: Path) -> dict[str, torch.Tensor]:
    """Write `target`, the model in `folder` with FP8 matrices. Return its tensors by name, dequantised to bfloat16."""
    shutil.copytree(folder, target)
    hf = load_hf_config(folder)
    quantised = {tensor.name for param in family_of(hf).params(hf, 1) if fp8.is_quantised(param) for tensor in param.hf}
    stored, dense = {}, {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if name not in quantised:
            stored[name] = dense[name] = tensor if name.endswith("e_score_correction_bias") else tensor.bfloat16()
            continue
        scales = fp8.compute_scales(fp8.block_amax(tensor, 0, 0, fp8.grid_shape(tensor.shape)))
        stored[name], stored[name + fp8.SCALE_SUFFIX] = fp8.quantise(tensor, scales, 0, 0), scales
        dense[name] = fp8.dequantise(stored[name], scales).bfloat16()
    save_file(stored, target / "model.safetensors", {"format": "pt"})
    config = json.loads((target / "config.json").read_text()) | {"quantization_config": QUANTIZATION}
    (target / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    return dense
