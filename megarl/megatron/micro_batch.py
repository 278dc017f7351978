"""One micro-batch as Megatron takes it, and the shift between what a model emits and the token that it is about.

Sequences are laid end to end. Where padding is needed it follows a sequence, which a causal model does not notice, or
all of them, as a sequence of its own: P tokens, of which a context parallel rank has the P / cp that
`parallel/context_parallel.py` says.

A micro-batch is made on the host when Megatron's schedule comes to it, and of its tensors those go to the device that
are asked for there: a stage in the middle has none of the loss's, a loss those that it reads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from math import lcm
from typing import Any, Self

import torch
from megatron.core.packed_seq_params import PackedSeqParams

from megarl.config.strict import ConfigError
from megarl.megatron.routing_replay import ReplayShard
from megarl.parallel.context_parallel import zigzag
from megarl.types import TOKEN_COLUMNS, SamplingMask, TrainBatch
from megarl.types.batch import REQUIRED_COLUMNS, get_declared_columns


class Arriving:
    """Base of a frozen dataclass whose tensors are on the host until each is first asked for: then it is on `place`."""

    place: torch.device | None = None

    def at(self, place: torch.device) -> Self:
        object.__setattr__(self, "place", place)
        return self

    def __getattribute__(self, name: str) -> Any:
        value = super().__getattribute__(name)
        if isinstance(value, torch.Tensor) and self.place is not None and value.device != self.place:
            value = value.to(self.place)
            object.__setattr__(self, name, value)
        return value


class ArrivingBatch(Arriving, TrainBatch):
    """What a loss is given. Columns that it has not named cannot be read: they may not be here."""

    named: tuple[str, ...] | None = None
    """What the loss has named; None where it may read everything."""

    def for_loss(self, loss: Callable[..., Any]) -> Self:
        object.__setattr__(self, "named", get_declared_columns(loss))
        return self

    def __getattribute__(self, name: str) -> Any:
        if name in TOKEN_COLUMNS and not self._given(name):
            names = ", ".join(f'"{one}"' for one in (*(self.named or ()), name))
            raise ConfigError(f"the loss reads the column {name!r}, which it does not name: mark it @reads({names})")
        return super().__getattribute__(name)

    def _given(self, name: str) -> bool:
        return self.named is None or name in self.named or name in REQUIRED_COLUMNS

    def with_(self, **changes: Any) -> TrainBatch:
        kept = {item.name: object.__getattribute__(self, item.name) for item in fields(self)}
        made = ArrivingBatch(**kept | changes)
        object.__setattr__(made, "place", self.place)
        object.__setattr__(made, "named", None if self.named is None else (*self.named, *changes))
        return made

    def columns(self) -> tuple[str, ...]:
        return tuple(name for name in TOKEN_COLUMNS if self._given(name) and getattr(self, name) is not None)


@dataclass(frozen=True)
class MicroBatch(Arriving):
    """Some sequences of a batch."""

    indices: list[int]  # of the sequences in the whole batch
    batch: ArrivingBatch  # those sequences, T tokens, without padding and records; T may be 0
    tokens: torch.Tensor  # [1, P / cp] int64, of this context parallel rank
    positions: torch.Tensor  # [1, P / cp] int64
    next_tokens: (
        torch.Tensor
    )  # [1 + MTP layers, P / cp] int64, the next token of the sequence, and those that follow it; 0
    # where there is none
    context_indices: torch.Tensor  # [cp, P / cp] int64, where in the whole micro-batch each rank's tokens are
    unpadded_indices: torch.Tensor  # [T] int64, where in it the tokens of `batch` are
    sequence_positions: torch.Tensor  # [T] int64, their positions in their sequences
    packed: PackedSeqParams
    routing: torch.Tensor | None  # [P / cp / tp, layers of the chunk, topk] int16, like the tokens; -1 in the padding
    sampling_mask: SamplingMask | None  # [P / cp], on the host, of `ahead[0]`: of each token's next one

    def align(self, emitted: torch.Tensor, by: int = 1) -> torch.Tensor:
        """[P] as emitted, index t about token t + by -> [T], index t about token t, 0 for the first of a sequence."""
        shifted = emitted.roll(by)[self.unpadded_indices]
        return torch.where(self.sequence_positions >= by, shifted, torch.zeros_like(shifted))

    def remove_padding(self, emitted: torch.Tensor) -> torch.Tensor:
        """[P] as emitted -> [T], index t about the tokens up to and including t: without the padding, nothing else."""
        return emitted[self.unpadded_indices]


def make_micro_batch(
    chosen: TrainBatch,
    indices: Sequence[int],
    device: torch.device,
    tp: int = 1,
    cp: int = 1,
    cp_rank: int = 0,
    mtp_layers: int = 0,
    replayed: ReplayShard | None = None,
) -> MicroBatch:
    """chosen: the sequences, all here, and no others; none make all padding. indices: their numbers in the whole batch.

    P is at least 1 and each rank's part a multiple of `tp`, for sequence parallelism, or of a multiple of that; with
    cp > 1 every sequence is padded to a multiple of 2 cp. replayed: what the model takes of the record of routing;
    None of a model that chooses for itself.
    """
    unit, multiple = (2 * cp, cp * lcm(2, tp)) if cp > 1 else (1, tp)
    lengths = [-(-length // unit) * unit for length in chosen.lengths.tolist()]
    rest = max(1, -(-sum(lengths) // multiple)) * multiple - sum(lengths)
    lengths += [rest] if rest else []
    sizes = torch.tensor(lengths)
    cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)])
    positions = torch.arange(int(cu_seqlens[-1])) - torch.repeat_interleave(cu_seqlens[:-1], sizes)
    tokens = torch.zeros(len(positions), dtype=torch.int64)
    if cp == 1:  # all padding comes last
        real, nth = torch.arange(len(chosen.tokens)), positions[: len(chosen.tokens)]
        tokens[: len(real)] = chosen.tokens
    else:
        nth = chosen.positions
        real = cu_seqlens[chosen.sequence_ids] + nth
        tokens[real] = chosen.tokens.long()
    ahead = torch.stack([tokens.roll(-by) for by in range(1, 2 + mtp_layers)])
    for by in range(1, 2 + mtp_layers):  # the last so many of a sequence have none so far ahead
        ahead[by - 1 :, (cu_seqlens[1:] - by)[sizes >= by]] = 0
    places = zigzag(cu_seqlens, cp)
    mine: Any = places[cp_rank] if cp > 1 else slice(None)
    offsets = cu_seqlens.to(device=device, dtype=torch.int32)
    routing = None
    if chosen.routing is not None and replayed is not None:
        known = torch.tensor([len(record) for record in chosen.routing], dtype=torch.int64)
        on_record = nth < known[chosen.sequence_ids]
        rows = torch.full_like(tokens, -1)
        rows[real[on_record]] = torch.arange(int(known.sum()))
        routing = replayed.select(_concat_routing(chosen.routing, len(replayed.layers)), rows[mine])
    support = None
    if chosen.sampling_mask is not None:
        rows = torch.full_like(tokens, -1)
        follows = nth > 0
        rows[real[follows] - 1] = torch.arange(len(nth))[follows]
        support = SamplingMask.concat([SamplingMask.unrestricted(0), *chosen.sampling_mask]).index_select(rows[mine])
    columns = {item.name: getattr(chosen, item.name) for item in fields(chosen)} | {"routing": None, "sampling_mask": None}
    return MicroBatch(
        indices=list(indices),
        batch=ArrivingBatch(**columns).at(device),
        tokens=tokens[None, mine],
        positions=positions[None, mine],
        next_tokens=ahead[:, mine],
        context_indices=places,
        unpadded_indices=real,
        sequence_positions=nth,
        packed=PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=offsets,
            cu_seqlens_kv=offsets,
            max_seqlen_q=max(lengths),
            max_seqlen_kv=max(lengths),
        ),
        routing=routing,
        sampling_mask=support,
    ).at(device)


def _concat_routing(records: Sequence[torch.Tensor], layers: int) -> torch.Tensor:
    """One after another. Those of sequences without a record may be of no layers."""
    whole = [record for record in records if len(record)]
    return torch.cat(whole) if whole else torch.zeros((0, layers, 1), dtype=torch.uint8)
