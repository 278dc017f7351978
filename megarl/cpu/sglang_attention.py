"""Attention for SGLang's torch_native backend: batched decoding, and soft caps of logits.

The backend itself decodes sequences one after the other, and silently ignores soft caps.
"""

from __future__ import annotations

import torch

_MAX_ELEMENTS = 1 << 23
"""Elements of keys gathered at once. Larger batches are processed in parts to bound memory."""


def decode_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
    cap: float = 0.0,
    window: int | None = None,
) -> torch.Tensor:
    """Return softmax(scale * q k) v for one query per sequence, [n, heads, value dim], with grouped-query heads.

    query: [n, heads, dim].
    keys, values: the whole cache, [cache, kv heads, dim] and [cache, kv heads, value dim].
    slots: [n, at least max(lengths)], the cache slots of each sequence's tokens.
    lengths: [n] in tokens, at least 1.
    cap: if above 0, logits x become cap * tanh(x / cap).
    window: how many keys before its own a query sees; None for all.
    """
    longest = int(lengths.max())
    rows = max(1, _MAX_ELEMENTS // max(1, longest * keys[0].numel()))
    parts = []
    for q, cache_slots, length in zip(query.split(rows), slots.split(rows), lengths.split(rows), strict=True):
        valid = torch.arange(longest) < length[:, None]  # [n, longest]
        if window is not None:
            valid &= torch.arange(longest) >= length[:, None] - 1 - window
        cache_slots = cache_slots[:, :longest].long() * valid  # slot 0 is SGLang's padding and gets weight 0
        k, v = keys[cache_slots].to(q.dtype), values[cache_slots].to(q.dtype)  # [n, longest, kv heads, dim]
        grouped = q.reshape(len(q), k.shape[2], -1, q.shape[-1])  # [n, kv heads, heads per kv head, dim]
        scores = cap_logits((grouped * scale) @ k.permute(0, 2, 3, 1), cap)
        weights = scores.masked_fill(~valid[:, None, None], float("-inf")).softmax(-1)
        parts.append((weights @ v.transpose(1, 2)).reshape(len(q), q.shape[1], v.shape[-1]))
    return torch.cat(parts)


def extend_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: torch.Tensor,
    lengths: torch.Tensor,
    new_lengths: torch.Tensor,
    scale: float,
    cap: float,
    window: int | None,
) -> torch.Tensor:
    """Return attention outputs of new tokens, [sum(new), heads, value dim].

    query: [sum(new), heads, dim], the last `new_lengths` [n] tokens of each sequence, one sequence after the other. Other
        arguments are those of `decode_attention`.
    """
    parts = []
    for q, cache_slots, length in zip(query.split(new_lengths.tolist()), slots, lengths.tolist(), strict=True):
        k, v = (cache[cache_slots[:length].long()].to(q.dtype).transpose(0, 1)[:, None] for cache in (keys, values))
        grouped = q.unflatten(1, (len(k), -1)).permute(1, 2, 0, 3)  # [kv heads, heads per kv head, queries, dim]
        distance = torch.arange(length - len(q), length)[:, None] - torch.arange(length)
        valid = (distance >= 0) & (distance <= (length if window is None else window))
        scores = cap_logits((grouped * scale) @ k.transpose(-1, -2), cap)
        weights = scores.masked_fill(~valid, float("-inf")).softmax(-1)
        parts.append((weights @ v).permute(2, 0, 1, 3).flatten(1, 2))
    return torch.cat(parts)


def cap_logits(scores: torch.Tensor, cap: float) -> torch.Tensor:
    return cap * torch.tanh(scores / cap) if cap else scores
