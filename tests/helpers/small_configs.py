"""config.json of small models, for plans that build none."""

from __future__ import annotations

import json
from pathlib import Path
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
DEEPSEEK_V3: dict[str, Any] = {
    **json.loads((Path(__file__).resolve().parents[2] / "configs/models/deepseek_v3.json").read_text()),
    **{"hidden_size": 256, "intermediate_size": 512, "moe_intermediate_size": 256, "vocab_size": 512},
    **{"num_hidden_layers": 3, "first_k_dense_replace": 1, "num_attention_heads": 4, "num_key_value_heads": 4},
    **{"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
    **{"q_lora_rank": 128, "kv_lora_rank": 128, "rope_scaling": None, "num_nextn_predict_layers": 0},
}
