"""Gemma 2 layers that Megatron 0.16.1 lacks: capped sliding-window attention, post-norms and scaled embeddings.

Plain torch on every device, because Transformer Engine's attention has no logit cap as of Megatron 0.16.1.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.core.transformer.utils import is_layer_window_attention
from torch.utils.checkpoint import checkpoint

from megarl.cpu.megatron_modules import PackedAttention

QUERIES_AT_ONCE = 512


class CappedAttention(PackedAttention):
    """Causal attention with logits cap * tanh(x / cap), and a sliding window on layers that have one.

    Probabilities of only `QUERIES_AT_ONCE` queries exist at a time; the backward pass recomputes them.
    """

    def __init__(self, config: TransformerConfig, layer_number: int, *args: Any, cap: float, **kwargs: Any) -> None:
        super().__init__(config, layer_number, *args, **kwargs)
        self.cap = cap
        has_window = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)
        self.window = config.window_size[0] if has_window else None  # keys that a query sees before its own position

    def _attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Return attention outputs [s, b, heads * d].

        query: [s, b, heads, d], at the positions of the last s keys. key, value: [t, b, groups, d].
        """
        s, b, heads, d = query.shape
        t, _, groups, _ = key.shape
        q = query.reshape(s, b, groups, heads // groups, d).permute(1, 2, 3, 0, 4)  # [b, groups, heads per group, s, d]
        k, v = (x.permute(1, 2, 0, 3)[:, :, None] for x in (key, value))  # [b, groups, 1, t, d]
        outputs = []
        for start in range(0, s, QUERIES_AT_ONCE):
            stop = min(s, start + QUERIES_AT_ONCE)
            key_stop = t - s + stop
            key_start = 0 if self.window is None else max(0, t - s + start - self.window)
            chunk = q[..., start:stop, :], k[..., key_start:key_stop, :], v[..., key_start:key_stop, :]
            outputs.append(checkpoint(self._attend_chunk, *chunk, use_reentrant=False, preserve_rng_state=False))
        return torch.cat(outputs, dim=-2).permute(3, 0, 1, 2, 4).reshape(s, b, heads * d)

    def _attend_chunk(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Attend with queries [.., s, d] at the last positions of keys and values [.., t, d]. Logits are fp32."""
        logits = (query @ key.transpose(-1, -2)).float() * (self.scale / self.cap)
        s, t = logits.shape[-2:]
        distance = torch.arange(t - s, t, device=query.device)[:, None] - torch.arange(t, device=query.device)
        is_visible = distance >= 0
        if self.window is not None:
            is_visible &= distance <= self.window
        weights = (self.cap * logits.tanh()).masked_fill(~is_visible, -torch.inf).softmax(-1)
        return weights.to(value.dtype) @ value


class PostNormLayer(TransformerLayer):  # type: ignore[misc]
    """Megatron's layer with a norm of class `post_norm` on attention and MLP outputs, before the residual add."""

    self_attn_bda: Any
    mlp_bda: Any

    def __init__(self, config: TransformerConfig, *args: Any, post_norm: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        sizes = dict(config=config, hidden_size=config.hidden_size, eps=config.layernorm_epsilon)
        self.post_self_attn_layernorm = post_norm(**sizes)
        self.post_mlp_layernorm = post_norm(**sizes)
        self.self_attn_bda = partial(_add_post_norm, self.post_self_attn_layernorm, self.self_attn_bda)
        self.mlp_bda = partial(_add_post_norm, self.post_mlp_layernorm, self.mlp_bda)


def _add_post_norm(norm: torch.nn.Module, bias_dropout_add: Callable[..., Any], training: bool, fused: bool) -> Any:
    """Return Megatron's bias-dropout-add, (output and bias, residual, dropout) -> sum, with the output normed first."""
    add = bias_dropout_add(training, fused)

    def run(output_and_bias: tuple[torch.Tensor, torch.Tensor | None], *rest: Any) -> torch.Tensor:
        output, bias = output_and_bias
        result: torch.Tensor = add((norm(output if bias is None else output + bias), None), *rest)
        return result

    return run


class ScaledEmbedding(LanguageModelEmbedding):  # type: ignore[misc]
    """Megatron's embedding, multiplied by `scale`. `scale_embedding` converts an instance."""

    scale: float

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return scaled embeddings, [s / tp, b, hidden]."""
        embeddings: torch.Tensor = super().forward(*args, **kwargs)
        return embeddings * self.scale


def scale_embedding(embedding: LanguageModelEmbedding, scale: float) -> None:
    """Make an embedding a `ScaledEmbedding`, in place. Like HF and SGLang, round the scale to the model's dtype."""
    embedding.__class__ = ScaledEmbedding
    embedding.scale = float(torch.tensor(scale, dtype=embedding.config.params_dtype))
