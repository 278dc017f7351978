"""config.json of small models, for plans that build none."""

from __future__ import annotations

from typing import Any

QWEN2: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "vocab_size": 1024,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
