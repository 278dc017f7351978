"""Writes the files of an HF folder beside config.json: zero weights and a tokenizer of a few words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from megarl.models.registry import family_of


def write_tokenizer(folder: Path, words: tuple[str, ...]) -> None:
    """Write a tokenizer of these words, followed by one control token."""
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="a"))
    tokenizer.add_special_tokens(["<end>"])
    tokenizer.save(str(folder / "tokenizer.json"))


def write_weights(folder: Path, hf: dict[str, Any], heads: tuple[str, ...] = ()) -> None:
    """Write zeros for all tensors that config.json describes, and for scalar heads of these names."""
    table = {tensor.name: tensor.shape for param in family_of(hf).params(hf, 1) for tensor in param.hf}
    shapes = {**table, **dict.fromkeys(heads, (1, hf["hidden_size"]))}
    save_file({name: torch.zeros(shape) for name, shape in shapes.items()}, folder / "model.safetensors")
