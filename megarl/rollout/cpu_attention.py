"""Decode attention for SGLang's torch_native backend, over all sequences at once instead of one after the other."""

from __future__ import annotations

import torch

_MOST_ELEMENTS = 1 << 23
"""Of keys gathered at once; longer batches are done in parts, so that memory stays bounded."""


def decode_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """[n, heads, value dim]: softmax(scale * q k) v for one query per sequence; heads share keys in groups.

    query [n, heads, dim]; keys [cache, kv heads, dim] and values [cache, kv heads, value dim], the whole cache;
    slots [n, at least max(lengths)] where each sequence's tokens lie in it; lengths [n] in tokens, at least 1.
    """
    longest = int(lengths.max())
    rows = max(1, _MOST_ELEMENTS // max(1, longest * keys[0].numel()))
    parts = []
    for q, where, length in zip(query.split(rows), slots.split(rows), lengths.split(rows), strict=True):
        valid = torch.arange(longest) < length[:, None]  # [n, longest]
        where = where[:, :longest].long() * valid  # slot 0 is SGLang's padding; its content is multiplied by 0
        k, v = keys[where].to(q.dtype), values[where].to(q.dtype)  # [n, longest, kv heads, dim]
        grouped = q.reshape(len(q), k.shape[2], -1, q.shape[-1])  # [n, kv heads, heads per kv head, dim]
        scores = (grouped * scale) @ k.permute(0, 2, 3, 1)
        weights = scores.masked_fill(~valid[:, None, None], float("-inf")).softmax(-1)
        parts.append((weights @ v.transpose(1, 2)).reshape(len(q), q.shape[1], v.shape[-1]))
    return torch.cat(parts)
