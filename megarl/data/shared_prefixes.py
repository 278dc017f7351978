"""Tokens that sequences of a micro-batch have in common, computed once.

Of a sequence that begins like another one, a micro-batch has only the tokens after the common ones: its queries see the
keys and values of the other sequence's first tokens, and then its own. All other operations of a model are on single
tokens, so outputs and gradients are those of whole sequences. A token's gradient is the sum over the sequences that
have it.

A sequence begins `repeated` tokens before the first that differs: the token before that one predicts it, and so does
the state of an earlier token in each multi-token prediction layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megarl.types import TrainBatch
from megarl.types.prefixes import CommonPrefixes

MIN_TOKENS = 8
"""Fewer common tokens are not worth attention calls of their own."""
LENGTH_MULTIPLE = 32
"""Sequences whose lengths are equal after rounding up to a multiple of this share one attention call."""


def skippable(prefixes: CommonPrefixes, lengths: torch.Tensor, repeated: int) -> torch.Tensor:
    """Return how many first tokens of each sequence need not be computed after the one before it in the order, [N]."""
    tokens = torch.minimum(prefixes.shared, lengths) - repeated
    return torch.where(tokens >= MIN_TOKENS, tokens, 0)


def skipped_tokens(batch: TrainBatch, repeated: int) -> list[int]:
    """Return how many first tokens of each sequence another one of the micro-batch computes."""
    if batch.prefixes is None:
        return [0] * batch.num_sequences
    result: list[int] = skippable(batch.prefixes, batch.lengths, repeated).tolist()
    return result


def token_paths(batch: TrainBatch, starts: Sequence[int], skipped: Sequence[int]) -> list[torch.Tensor]:
    """Return the place of each sequence's tokens in the micro-batch, [length] int64 each.

    starts: the place of the first token that is computed of each.
    """
    assert batch.prefixes is not None
    paths: list[torch.Tensor] = [torch.empty(0)] * batch.num_sequences
    before = torch.zeros(0, dtype=torch.int64)
    for sequence in batch.prefixes.order():
        skip, length = skipped[sequence], int(batch.lengths[sequence])
        before = torch.cat([before[:skip], torch.arange(starts[sequence], starts[sequence] + length - skip)])
        paths[sequence] = before
    return paths


@dataclass(frozen=True)
class AttentionCall:
    """Queries of several sequences that follow equally many keys. Indices are on the device."""

    queries: torch.Tensor  # [n, size] int64, rows of the rank's queries; 0 for padding
    keys: torch.Tensor  # [n, before + size] int64, rows of the micro-batch's keys; 0 for padding
    outputs: torch.Tensor  # [rows] int64, of the flat [n * size] which are no padding


@dataclass(frozen=True)
class SharedAttention:
    """The attention of a micro-batch in which sequences have tokens in common."""

    calls: tuple[AttentionCall, ...]
    order: torch.Tensor  # [T] int64, of the rank's queries the row among all calls' outputs
    key_rows: torch.Tensor  # [K] int64, rows of the micro-batch's keys, piece by piece
    cu_queries: torch.Tensor  # [pieces + 1] int32, the first query of each piece, of which a sequence has cp or 2 cp
    cu_keys: torch.Tensor  # [pieces + 1] int32, the first of `key_rows`; the last keys are at the queries' positions
    max_queries: int
    max_keys: int


def plan_attention(
    paths: Sequence[torch.Tensor],
    skipped: Sequence[int],
    starts: Sequence[int],
    cp: int,
    cp_rank: int,
    device: torch.device,
) -> SharedAttention:
    """Plan the attention of a context parallel rank, which has two parts of what is computed of each sequence.

    paths: from `token_paths`. starts: [segments + 1], the first place of each sequence and of the padding at the end.
    """
    pieces: dict[tuple[int, int], list[tuple[int, torch.Tensor]]] = {}
    sizes: dict[tuple[int, int], list[int]] = {}
    key_rows, query_counts = list[torch.Tensor](), list[int]()
    offset = 0
    for segment, (start, stop) in enumerate(zip(starts[:-1], starts[1:], strict=True)):
        skip = skipped[segment] if segment < len(paths) else 0
        prefix = paths[segment][:skip] if skip else torch.zeros(0, dtype=torch.int64)
        size = (stop - start) // (2 * cp) if cp > 1 else stop - start
        for part in (cp_rank, 2 * cp - 1 - cp_rank) if cp > 1 else (0,):
            before = skip + part * size
            keys = torch.cat([prefix, torch.arange(start, start + (part + 1) * size)])
            kind = before, -(-size // LENGTH_MULTIPLE) * LENGTH_MULTIPLE
            pieces.setdefault(kind, []).append((offset, keys))
            sizes.setdefault(kind, []).append(size)
            key_rows.append(keys)
            query_counts.append(size)
            offset += size
    calls, order, total = [], torch.empty(offset, dtype=torch.int64), 0
    for (before, width), items in pieces.items():
        queries = torch.zeros(len(items), width, dtype=torch.int64)
        keys = torch.zeros(len(items), before + width, dtype=torch.int64)
        is_output = torch.zeros(len(items), width, dtype=torch.bool)
        for row, ((first, places), size) in enumerate(zip(items, sizes[before, width], strict=True)):
            queries[row, :size] = torch.arange(first, first + size)
            keys[row, : len(places)] = places
            is_output[row, :size] = True
            order[first : first + size] = torch.arange(total, total + size)
            total += size
        outputs = is_output.flatten().nonzero()[:, 0]
        calls.append(AttentionCall(queries.to(device), keys.to(device), outputs.to(device)))
    key_counts = [len(rows) for rows in key_rows]
    cu_queries, cu_keys = (
        torch.tensor([0, *counts]).cumsum(0).int().to(device) for counts in (query_counts, key_counts)
    )
    return SharedAttention(
        calls=tuple(calls),
        order=order.to(device),
        key_rows=torch.cat(key_rows).to(device),
        cu_queries=cu_queries,
        cu_keys=cu_keys,
        max_queries=max(query_counts),
        max_keys=max(key_counts),
    )
