"""Model folders whose routed experts are INT4, as compressed-tensors writes them, from folders in other formats."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import tiny
import torch
from safetensors.torch import load_file, save_file

from megarl.models import int4
from megarl.models.registry import family_of, load_hf_config

QUANTIZATION: dict[str, Any] = {
    "config_groups": {
        "group_0": {
            "input_activations": None,
            "output_activations": None,
            "targets": ["Linear"],
            "weights": {
                "actorder": None,
                "block_structure": None,
                "dynamic": False,
                "group_size": 32,
                "num_bits": 4,
                "observer": "minmax",
                "observer_kwargs": {},
                "strategy": "group",
                "symmetric": True,
                "type": "int",
            },
        }
    },
    "format": "pack-quantized",
    "ignore": [
        "lm_head",
        "re:.*self_attn.*",
        "re:.*shared_experts.*",
        "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
    ],
    "kv_cache_scheme": None,
    "quant_method": "compressed-tensors",
    "quantization_status": "compressed",
}
"""Kimi-K2-Thinking's quantization_config."""


def expert_names(hf: dict[str, Any]) -> set[str]:
    return {tensor.name for p in family_of(hf).params(hf, 1) if p.expert is not None for tensor in p.hf}


def write_model(folder: Path, hf: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(hf))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def quantise_experts(folder: Path, target: Path) -> dict[str, torch.Tensor]:
    """Write `target`, the model in `folder` with INT4 experts and all else in bfloat16 (the router's bias excepted).
    Return its tensors by name, dequantised."""
    shutil.copytree(folder, target)
    hf = load_hf_config(folder)
    experts, stored, dense = expert_names(hf), {}, {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if name not in experts:
            stored[name] = dense[name] = tensor if name.endswith("e_score_correction_bias") else tensor.bfloat16()
            continue
        scales = int4.compute_scales(tensor.bfloat16())
        packed = int4.quantise(tensor.bfloat16(), scales)
        stored[name + "_packed"], stored[name + "_scale"] = packed.view(torch.int32), scales
        stored[name + "_shape"] = torch.tensor(tensor.shape)
        dense[name] = int4.dequantise(int4.Int4Matrix(packed, scales))
    save_file(stored, target / "model.safetensors", {"format": "pt"})
    config = json.loads((target / "config.json").read_text()) | {"quantization_config": QUANTIZATION}
    (target / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    return dense


def dequantised_model(model: Any, dense: dict[str, torch.Tensor]) -> Any:
    """Return transformers' model, in fp32, with the tensors that `quantise_experts` returned."""
    with TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        save_file(dense, Path(folder) / "model.safetensors", {"format": "pt"})
        return tiny.set_latent_eps(type(model).from_pretrained(folder, dtype=torch.float32).eval())
