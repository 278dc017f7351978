"""Write gpt-oss folders in MXFP4, which MegaRL only reads."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def quantise(stack: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return blocks, scales, and the stack that they mean, of a transposed stack [experts, columns, rows]."""
    groups = stack.float().mT.contiguous().unflatten(-1, (-1, 32))  # [experts, rows, columns / 32, 32]
    exponents = groups.abs().amax(-1).clamp(min=2.0**-100).log2().floor() - 2
    scaled = groups / torch.exp2(exponents)[..., None]
    grid = torch.tensor(MAGNITUDES)
    codes = (scaled.abs()[..., None] - grid).abs().argmin(-1)
    values = grid[codes] * scaled.sign() * torch.exp2(exponents)[..., None]
    codes = codes + 8 * (scaled < 0)
    blocks = (codes[..., ::2] + 16 * codes[..., 1::2]).to(torch.uint8)
    return blocks, (exponents + 127).to(torch.uint8), values.flatten(-2).mT.contiguous()


def quantise_folder(folder: Path) -> dict[str, torch.Tensor]:
    """Quantise the experts of a folder in place. Return the tensors that it means."""
    file = folder / "model.safetensors"
    stored: dict[str, torch.Tensor] = {}
    meaning: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(file).items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            stored[f"{name}_blocks"], stored[f"{name}_scales"], meaning[name] = quantise(tensor)
        else:
            stored[name] = meaning[name] = tensor
    save_file(stored, file, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (folder / "config.json").write_text(json.dumps(config))
    return meaning
