"""One micro-batch as Megatron takes it, and the shift between what a model emits and the token that it is about.

Sequences are laid end to end. Where padding is needed it follows a sequence, which a causal model does not notice, or
all of them, as a sequence of its own: P tokens, of which a context parallel rank has the P / cp that `context.py` says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from math import lcm
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams

from megarl.megatron.context import zigzag
from megarl.types import TrainBatch


@dataclass(frozen=True)
class MicroBatch:
    """Some sequences of a batch, on the device."""

    indices: list[int]  # of the sequences in the whole batch
    batch: TrainBatch  # those sequences, T tokens, without padding; T may be 0
    tokens: torch.Tensor  # [1, P / cp] int64, of this context parallel rank
    positions: torch.Tensor  # [1, P / cp] int64
    ahead: torch.Tensor  # [1 + MTP layers, P / cp] int64, the next token of the sequence, and those that follow it; 0
    # where there is none
    places: torch.Tensor  # [cp, P / cp] int64, where in the whole micro-batch each rank's tokens are
    real: torch.Tensor  # [T] int64, where in it the tokens of `batch` are
    packed: PackedSeqParams
    routing: torch.Tensor | None  # [P / cp, MoE layers, topk] int16, laid out like the tokens; -1 in the padding

    def align(self, emitted: torch.Tensor, by: int = 1) -> torch.Tensor:
        """[P] as emitted, index t about token t + by -> [T], index t about token t, 0 for the first of a sequence."""
        shifted = emitted.roll(by)[self.real]
        return torch.where(self.batch.positions >= by, shifted, torch.zeros_like(shifted))

    def unshifted(self, emitted: torch.Tensor) -> torch.Tensor:
        """[P] as emitted -> [T], index t about the tokens up to and including t: without the padding, nothing else."""
        return emitted[self.real]


def make_micro_batch(
    batch: TrainBatch,
    indices: Sequence[int],
    device: torch.device,
    tp: int = 1,
    cp: int = 1,
    cp_rank: int = 0,
    mtp_layers: int = 0,
) -> MicroBatch:
    """Take `indices` out of `batch`; none make all padding.

    P is at least 1 and each rank's part a multiple of `tp`, for sequence parallelism, or of a multiple of that; with
    cp > 1 every sequence is padded to a multiple of 2 cp.
    """
    chosen = batch.select(indices)
    unit, multiple = (2 * cp, cp * lcm(2, tp)) if cp > 1 else (1, tp)
    lengths = [-(-length // unit) * unit for length in chosen.lengths.tolist()]
    rest = max(1, -(-sum(lengths) // multiple)) * multiple - sum(lengths)
    lengths += [rest] if rest else []
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
    real = cu_seqlens[chosen.sequence_ids] + chosen.positions
    tokens = chosen.tokens.new_zeros(int(cu_seqlens[-1]))
    tokens[real] = chosen.tokens
    positions = torch.arange(len(tokens)) - torch.repeat_interleave(cu_seqlens[:-1], cu_seqlens.diff())
    left = torch.repeat_interleave(cu_seqlens[1:], cu_seqlens.diff()) - torch.arange(len(tokens))
    ahead = torch.stack([tokens.roll(-by) * (left > by) for by in range(1, 2 + mtp_layers)])
    places = zigzag(cu_seqlens, cp)
    mine = places[cp_rank]
    offsets = cu_seqlens.to(device=device, dtype=torch.int32)
    routing = None
    if chosen.routing is not None:
        routing = chosen.routing.new_full((len(tokens), *chosen.routing.shape[1:]), -1)
        routing[real] = chosen.routing
        routing = routing[mine].to(device)
    return MicroBatch(
        indices=list(indices),
        batch=_moved(chosen.with_(routing=None), device),
        tokens=tokens[None, mine].to(device),
        positions=positions[None, mine].to(device),
        ahead=ahead[:, mine].to(device),
        places=places.to(device),
        real=real.to(device),
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
