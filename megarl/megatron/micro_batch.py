"""One micro-batch as Megatron takes it, and the shift between what a model emits and the token that it is about."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams

from megarl.types import TrainBatch


@dataclass(frozen=True)
class MicroBatch:
    """Some sequences of a batch, on the device, padded to P tokens by a dummy sequence at the end."""

    indices: list[int]  # of the sequences in the whole batch
    batch: TrainBatch  # those sequences, T tokens, without padding; T may be 0
    tokens: torch.Tensor  # [1, P] int64
    positions: torch.Tensor  # [1, P] int64
    targets: torch.Tensor  # [P] int64, the next token of the sequence; 0 where there is none
    has_prediction: torch.Tensor  # [T] bool, False for the first token of a sequence
    packed: PackedSeqParams
    routing: torch.Tensor | None  # [P, MoE layers, topk] int16, laid out like the tokens; -1 in the padding

    def align(self, emitted: torch.Tensor) -> torch.Tensor:
        """[P] as emitted, index t about token t + 1 -> [T], index t about token t, 0 for the first of a sequence."""
        shifted = emitted.roll(1)[: len(self.has_prediction)]
        return torch.where(self.has_prediction, shifted, torch.zeros_like(shifted))


def make_micro_batch(batch: TrainBatch, indices: Sequence[int], multiple: int, device: torch.device) -> MicroBatch:
    """Take `indices` out of `batch`, padded to a multiple of `multiple` tokens, at least one; none make all padding."""
    chosen = batch.select(indices)
    real = len(chosen.tokens)
    padded = max(1, -(-real // multiple)) * multiple
    lengths = chosen.lengths.tolist() + ([padded - real] if padded > real else [])
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
    tokens = torch.cat([chosen.tokens, chosen.tokens.new_zeros(padded - real)])
    starts = torch.repeat_interleave(cu_seqlens[:-1], cu_seqlens.diff())
    targets = tokens.roll(-1)
    targets[cu_seqlens[1:] - 1] = 0
    positions = torch.arange(padded) - starts
    offsets = cu_seqlens.to(device=device, dtype=torch.int32)
    routing = chosen.routing
    if routing is not None:
        routing = torch.cat([routing, routing.new_full((padded - real, *routing.shape[1:]), -1)]).to(device)
    return MicroBatch(
        indices=list(indices),
        batch=_moved(chosen.with_(routing=None), device),
        tokens=tokens[None].to(device),
        positions=positions[None].to(device),
        targets=targets.to(device),
        has_prediction=(positions[:real] > 0).to(device),
        packed=PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=offsets,
            cu_seqlens_kv=offsets,
            max_seqlen_q=max(lengths),
            max_seqlen_kv=max(lengths),
        ),
        routing=routing,
    )


def _moved(batch: TrainBatch, device: torch.device) -> TrainBatch:
    values: dict[str, Any] = {item.name: getattr(batch, item.name) for item in fields(batch)}
    return batch.with_(**{name: value.to(device) for name, value in values.items() if value is not None})
