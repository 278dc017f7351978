"""What Gemma 2 has and Megatron 0.16.1 has not: capped attention with windows, norms behind attention and MLP, scaled
embeddings. Plain torch, the same on every device: Transformer Engine's attention of that time has no cap.
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
    """Causal attention whose logits x become cap * tanh(x / cap), with a window where the layer has one.

    The probabilities of `QUERIES_AT_ONCE` queries exist at a time: the backward pass makes them again.
    """

    def __init__(self, config: TransformerConfig, layer_number: int, *args: Any, cap: float, **kwargs: Any) -> None:
        super().__init__(config, layer_number, *args, **kwargs)
        self.cap = cap
        has_window = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)
        self.window = config.window_size[0] if has_window else None  # keys that a query sees before its own

    def _attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """query [s, b, heads, d], key and value [t, b, groups, d], the queries being those of the last keys
        -> [s, b, heads * d]."""
        s, b, heads, d = query.shape
        t, _, groups, _ = key.shape
        q = query.reshape(s, b, groups, heads // groups, d).permute(1, 2, 3, 0, 4)  # [b, groups, heads of one, s, d]
        k, v = (x.permute(1, 2, 0, 3)[:, :, None] for x in (key, value))  # [b, groups, 1, t, d]
        outputs = []
        for start in range(0, s, QUERIES_AT_ONCE):
            stop = min(s, start + QUERIES_AT_ONCE)
            last = t - s + stop
            first = 0 if self.window is None else max(0, t - s + start - self.window)
            part = q[..., start:stop, :], k[..., first:last, :], v[..., first:last, :]
            outputs.append(checkpoint(self._attend_chunk, *part, use_reentrant=False, preserve_rng_state=False))
        return torch.cat(outputs, dim=-2).permute(3, 0, 1, 2, 4).reshape(s, b, heads * d)

    def _attend_chunk(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """query [.., s, d] of the last of keys and values [.., t, d] -> [.., s, d]. Logits in fp32."""
        logits = (query @ key.transpose(-1, -2)).float() * (self.scale / self.cap)
        s, t = logits.shape[-2:]
        distance = torch.arange(t - s, t, device=query.device)[:, None] - torch.arange(t, device=query.device)
        seen = distance >= 0
        if self.window is not None:
            seen &= distance <= self.window
        weights = (self.cap * logits.tanh()).masked_fill(~seen, -torch.inf).softmax(-1)
        return weights.to(value.dtype) @ value


class PostNormLayer(TransformerLayer):  # type: ignore[misc]
    """Megatron's layer with a norm, of the class `post_norm`, of what attention and MLP add to the residual stream."""

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
    """Megatron's function for (output and its bias, residual, dropout) -> sum, with the output normed."""
    add = bias_dropout_add(training, fused)

    def run(output_and_bias: tuple[torch.Tensor, torch.Tensor | None], *rest: Any) -> torch.Tensor:
        output, bias = output_and_bias
        result: torch.Tensor = add((norm(output if bias is None else output + bias), None), *rest)
        return result

    return run


class ScaledEmbedding(LanguageModelEmbedding):  # type: ignore[misc]
    """Megatron's embedding, multiplied by `scale`; an instance is made one by `scale_embedding`."""

    scale: float

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """[s / tp, b, hidden]"""
        embeddings: torch.Tensor = super().forward(*args, **kwargs)
        return embeddings * self.scale


def scale_embedding(embedding: LanguageModelEmbedding, scale: float) -> None:
    """Make an embedding a `ScaledEmbedding`, in place. HF and SGLang, too, round the scale to the model's type."""
    embedding.__class__ = ScaledEmbedding
    embedding.scale = float(torch.tensor(scale, dtype=embedding.config.params_dtype))
