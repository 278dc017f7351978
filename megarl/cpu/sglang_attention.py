"""Attention for SGLang's torch_native backend: decoding over all sequences at once instead of one after the other, and
logits with a soft cap, which that backend leaves out without a word."""

from __future__ import annotations

import torch

_MAX_ELEMENTS = 1 << 23
"""Of keys gathered at once; longer batches are done in parts, so that memory stays bounded."""


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
    """[n, heads, value dim]: softmax(scale * q k) v for one query per sequence; heads share keys in groups.

    query [n, heads, dim]; keys [cache, kv heads, dim] and values [cache, kv heads, value dim], the whole cache;
    slots [n, at least max(lengths)] where each sequence's tokens lie in it; lengths [n] in tokens, at least 1.
    cap: above 0, logits x are cap * tanh(x / cap). window: how many keys before its own a query sees; None for all.
    """
    longest = int(lengths.max())
    rows = max(1, _MAX_ELEMENTS // max(1, longest * keys[0].numel()))
    parts = []
    for q, where, length in zip(query.split(rows), slots.split(rows), lengths.split(rows), strict=True):
        valid = torch.arange(longest) < length[:, None]  # [n, longest]
        if window is not None:
            valid &= torch.arange(longest) >= length[:, None] - 1 - window
        where = where[:, :longest].long() * valid  # slot 0 is SGLang's padding; its content is multiplied by 0
        k, v = keys[where].to(q.dtype), values[where].to(q.dtype)  # [n, longest, kv heads, dim]
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
    new: torch.Tensor,
    scale: float,
    cap: float,
    window: int | None,
) -> torch.Tensor:
    """[sum(new), heads, value dim]: the last `new` [n] tokens of each sequence are its queries, one sequence after the
    other in query [sum(new), heads, dim]. The rest as in `decode_attention`."""
    parts = []
    for q, where, length in zip(query.split(new.tolist()), slots, lengths.tolist(), strict=True):
        k, v = (cache[where[:length].long()].to(q.dtype).transpose(0, 1)[:, None] for cache in (keys, values))
        grouped = q.unflatten(1, (len(k), -1)).permute(1, 2, 0, 3)  # [kv heads, heads per kv head, queries, dim]
        distance = torch.arange(length - len(q), length)[:, None] - torch.arange(length)
        valid = (distance >= 0) & (distance <= (length if window is None else window))
        scores = cap_logits((grouped * scale) @ k.transpose(-1, -2), cap)
        weights = scores.masked_fill(~valid, float("-inf")).softmax(-1)
        parts.append((weights @ v).permute(2, 0, 1, 3).flatten(1, 2))
    return torch.cat(parts)


def cap_logits(scores: torch.Tensor, cap: float) -> torch.Tensor:
    return cap * torch.tanh(scores / cap) if cap else scores
