"""Replaces a tokenizer by a SentencePiece `tokenizer.model`, as in folders of LLaMA, Mixtral and Gemma."""

from __future__ import annotations

import json
from pathlib import Path

import sentencepiece


def put_pieces(model: Path, text: str) -> None:
    """Replace the tokenizer of a quickstart model by SentencePiece pieces trained on `text`.

    Keeps the chat template and the vocabulary size.
    """
    vocabulary = json.loads((model / "config.json").read_text())["vocab_size"]
    for file in [*model.glob("tokenizer*"), *model.glob("special_tokens*")]:
        file.unlink()
    (model / "corpus.txt").write_text(text)
    sentencepiece.SentencePieceTrainer.train(
        input=str(model / "corpus.txt"),
        model_prefix=str(model / "tokenizer"),
        vocab_size=vocabulary,
        model_type="bpe",
        byte_fallback=True,
        hard_vocab_limit=False,
        user_defined_symbols=["<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>"],
        normalization_rule_name="identity",
        minloglevel=2,
    )
    for name in ("corpus.txt", "tokenizer.vocab"):
        (model / name).unlink()
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 4]}))
