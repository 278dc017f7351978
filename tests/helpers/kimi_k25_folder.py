"""Folders of a tiny Kimi-K2.5, as published, from folders of its language model, a DeepSeek-V3."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

PREFIX = "language_model."
VISION = ("vision_tower.", "mm_projector.")
_TOP_LEVEL = ("architectures", "dtype", "bos_token_id", "eos_token_id", "pad_token_id", "tie_word_embeddings")


def vision_config(text_hidden: int) -> dict[str, Any]:
    """Return the keys of the published `vision_config`, with small sizes, and fewer heads than ranks of an engine.

    SGLang reads the tower's sizes from the names without `vt_`, whose defaults are those of the published tower.
    """
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 1, "num_hidden_layers": 2}
    return {
        **sizes,
        **{f"vt_{key}": value for key, value in sizes.items()},
        "init_pos_emb_height": 4,
        "init_pos_emb_time": 4,
        "init_pos_emb_width": 4,
        "merge_kernel_size": [2, 2],
        "merge_type": "sd2_tpool",
        "mm_hidden_size": sizes["hidden_size"],
        "mm_projector_type": "patchmerger",
        "patch_size": 14,
        "pos_emb_type": "divided_fixed",
        "projector_hidden_act": "gelu",
        "projector_ln_eps": 1e-5,
        "text_hidden_size": text_hidden,
        "video_attn_type": "spatial_temporal",
    }


def vision_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes of the tower's and the projector's tensors, as in the published folder."""
    hidden, ffn, patch = config["vt_hidden_size"], config["vt_intermediate_size"], config["patch_size"]
    merged = hidden * config["merge_kernel_size"][0] * config["merge_kernel_size"][1]
    height, width = config["init_pos_emb_height"], config["init_pos_emb_width"]
    norms = ["vision_tower.encoder.final_layernorm", "mm_projector.pre_norm"]
    matrices: dict[str, tuple[int, ...]] = {
        "vision_tower.patch_embed.proj": (hidden, 3, patch, patch),
        "mm_projector.proj.0": (merged, merged),
        "mm_projector.proj.2": (config["text_hidden_size"], merged),
    }
    for layer in range(config["vt_num_hidden_layers"]):
        block = f"vision_tower.encoder.blocks.{layer}"
        norms += [f"{block}.norm0", f"{block}.norm1"]
        matrices |= {f"{block}.wqkv": (3 * hidden, hidden), f"{block}.wo": (hidden, hidden)}
        matrices |= {f"{block}.mlp.fc0": (ffn, hidden), f"{block}.mlp.fc1": (hidden, ffn)}
    modules = matrices | dict.fromkeys(norms, (hidden,))
    return {
        **{f"{name}.weight": shape for name, shape in modules.items()},
        **{f"{name}.bias": shape[:1] for name, shape in modules.items()},
        "vision_tower.patch_embed.pos_emb.weight": (height, width, hidden),
    }


def add_tower(folder: Path) -> Path:
    """Turn a folder of DeepSeek-V3 into one of Kimi-K2.5 with a random vision tower, in place."""
    file, weights = folder / "config.json", folder / "model.safetensors"
    text = json.loads(file.read_text())
    vision = vision_config(text["hidden_size"])
    config = {key: text[key] for key in _TOP_LEVEL if key in text} | {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "model_type": "kimi_k25",
        "ignore_index": -100,
        "media_placeholder_token_id": text["vocab_size"] - 1,
        "text_config": text | {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "kimi_k2"},
        "use_unified_vision_chunk": True,
        "video_placeholder": "<|kimi_k25_video_placeholder|>",
        "vision_config": vision,
    }
    file.write_text(json.dumps(config))
    stored, generator = load_file(weights), torch.Generator().manual_seed(3)
    dtype = next(tensor.dtype for name, tensor in stored.items() if name.endswith("embed_tokens.weight"))
    tensors = {f"{PREFIX}{name}": tensor for name, tensor in stored.items()}
    for name, shape in vision_shapes(vision).items():
        tensors[name] = torch.randn(shape, generator=generator).to(dtype)
    save_file(tensors, weights, {"format": "pt"})
    return folder
