"""Ling 2 (BailingMoeV2ForCausalLM) written out, since transformers has no class for it. From the report's equations,
arXiv:2510.22115, and the names of its checkpoints. The file is also the code in a saved folder by which SGLang reads
config.json."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel


class BailingMoeV2Config(PreTrainedConfig):
    model_type = "bailing_moe_v2"
    hidden_act: str = "silu"
    rope_parameters: dict[str, Any] | None = None
    embedding_dropout: float = 0.0


class BailingMoeV2ForCausalLM(PreTrainedModel):
    config_class = BailingMoeV2Config

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model = Trunk(config)
        self.lm_head = linear(config.hidden_size, config.vocab_size)
        self.post_init()

    def _init_weights(self, module: Any) -> None:
        for tensor in module.parameters(recurse=False):
            if tensor.dim() > 1:
                nn.init.normal_(tensor, std=self.config.initializer_range)

    def forward(self, input_ids: torch.Tensor, **_: Any) -> Any:
        return SimpleNamespace(logits=self.lm_head(self.model(input_ids).last_hidden_state))


def linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False)


class Trunk(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config, number) for number in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, input_ids: torch.Tensor) -> Any:
        x = self.word_embeddings(input_ids)
        for layer in self.layers:
            x = layer(x)
        return SimpleNamespace(last_hidden_state=self.norm(x))


class Layer(nn.Module):
    def __init__(self, config: Any, number: int) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.attention = Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        dense = number < config.first_k_dense_replace
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size) if dense else Experts(config)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.input_layernorm(x))
        result: torch.Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return result


class Attention(nn.Module):
    """Causal, with fewer heads of keys and values, each normed before the first part of it is rotated by halves."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.size = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        self.query_key_value = linear(config.hidden_size, (self.heads + 2 * self.kv_heads) * self.size)
        self.query_layernorm = nn.RMSNorm(self.size, config.rms_norm_eps)
        self.key_layernorm = nn.RMSNorm(self.size, config.rms_norm_eps)
        self.dense = linear(self.heads * self.size, config.hidden_size)
        options = config.rope_parameters
        self.rotated, self.theta = int(self.size * options["partial_rotary_factor"]), options["rope_theta"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.query_key_value(x).unflatten(-1, (-1, self.size)).transpose(1, 2)  # [b, heads, t, size]
        q, k, v = heads.split([self.heads, self.kv_heads, self.kv_heads], dim=1)
        q, k = self.rotate(self.query_layernorm(q)), self.rotate(self.key_layernorm(k))
        k, v = (part.repeat_interleave(self.heads // self.kv_heads, dim=1) for part in (k, v))
        scores = q @ k.transpose(-1, -2) / self.size**0.5
        future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        weights = scores.masked_fill(future, -torch.inf).softmax(-1)
        result: torch.Tensor = self.dense((weights @ v).transpose(1, 2).flatten(2))
        return result

    def rotate(self, x: torch.Tensor) -> torch.Tensor:
        half = self.rotated // 2
        angles = torch.arange(x.shape[-2])[:, None] * self.theta ** -(torch.arange(half) / half)
        a, b, rest = x[..., :half], x[..., half : self.rotated], x[..., self.rotated :]
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], dim=-1)


class GatedMLP(nn.Module):
    def __init__(self, hidden: int, width: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = (
            linear(hidden, width),
            linear(hidden, width),
            linear(width, hidden),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return result


class Gate(nn.Module):
    """Chooses experts by sigmoid scores plus a bias, among the groups whose two best experts have the largest sum."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config, self.norm_topk_prob = config, True
        self.routed_scaling_factor = config.routed_scaling_factor
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.hidden_size))
        self.register_buffer("expert_bias", torch.zeros(config.num_experts))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        logits = F.linear(x.flatten(0, -2), self.weight)
        scores = logits.sigmoid()
        biased = (scores + self.expert_bias).unflatten(-1, (self.config.n_group, -1))
        ranks = biased.topk(2, dim=-1).values.sum(-1)
        closed = torch.ones_like(ranks, dtype=torch.bool).scatter(1, ranks.topk(self.config.topk_group).indices, False)
        eligible = biased.masked_fill(closed[..., None], -torch.inf).flatten(1)
        chosen = eligible.topk(self.config.num_experts_per_tok).indices
        weights = scores.gather(1, chosen)
        return logits, weights / weights.sum(-1, keepdim=True) * self.routed_scaling_factor, chosen


class Experts(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        hidden, width = config.hidden_size, config.moe_intermediate_size
        self.gate = Gate(config)
        self.experts = nn.ModuleList(GatedMLP(hidden, width) for _ in range(config.num_experts))
        self.shared_experts = GatedMLP(hidden, width * config.num_shared_experts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.flatten(0, -2)
        _, weights, chosen = self.gate(x)
        result = self.shared_experts(rows)
        for number, expert in enumerate(self.experts):
            token, choice = (chosen == number).nonzero(as_tuple=True)
            result = result.index_add(0, token, expert(rows[token]) * weights[token, choice, None])
        return result.view(x.shape)


BailingMoeV2Config.register_for_auto_class()
