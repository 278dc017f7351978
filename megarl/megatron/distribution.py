"""What of a batch each rank's model computes: rows come from where the sequences are, numbers per token go back there.

The plan of micro-batches follows from the lengths, so every rank knows what every other needs, and nobody asks. A first
stage needs the tokens, the last one those and what a loss reads, one in between nothing but lengths; the record of
routing goes to the stages with experts, each its own layers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch

from megarl.megatron.replay import check_shape
from megarl.models.routing import RoutingShape
from megarl.parallel import everyone
from megarl.parallel.delivery_plan import Kind
from megarl.parallel.ranks import Ranks, all_gather_objects
from megarl.types import TrainBatch

Plan = Sequence[Sequence[Sequence[int]]]
"""[data parallel rank][micro-batch] -> numbers of sequences, see `data.packing`."""
Spoken = tuple[Sequence[int], Mapping[str, torch.Tensor]]
"""Of a micro-batch, the numbers of its sequences, and by name [T] of them."""


@dataclass(frozen=True)
class Place:
    """What a rank is for a model."""

    dp_rank: int
    reads: bool
    """Whether it has the tokens of its micro-batches: it embeds them, or emits something about them."""
    ends: bool
    """Whether it emits the numbers, and computes losses."""
    speaks: bool
    """Whether it is the one of those of its replica that reports them."""
    layers: tuple[int, ...]
    """With experts that replay a record, by their places among all layers with experts."""


class Rows:
    """A rank's part of a batch: the sequences of its micro-batches.

    layers: those that the records of routing are of.
    """

    def __init__(
        self,
        batch: TrainBatch,
        columns: Mapping[str, Mapping[int, torch.Tensor]],
        records: Mapping[int, torch.Tensor] | None,
        layers: tuple[int, ...],
    ) -> None:
        self._batch, self._columns, self._records, self.layers = batch, columns, records, layers
        self._lengths = batch.lengths

    def take(self, indices: Sequence[int]) -> TrainBatch:
        """These sequences, all here; columns that this rank has no use for are zeros, or None."""
        numbers = torch.as_tensor(list(indices), dtype=torch.int64)
        lengths = self._lengths[numbers]
        found: dict[str, Any] = {}
        for name, rows in self._columns.items():
            found[name] = torch.cat([rows[i] for i in indices]) if len(indices) else getattr(self._batch, name)[:0]
        for name in ("tokens", "loss_mask", "rollout_logprobs"):
            if name not in found:
                found[name] = torch.zeros(int(lengths.sum()), dtype=getattr(self._batch, name).dtype)
        return TrainBatch(
            cu_seqlens=torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]),
            group=self._batch.group[numbers],
            sequence_reward=self._batch.sequence_reward[numbers],
            routing=None if self._records is None else tuple(self._records[i] for i in indices),
            **found,
        )


class Distribution:
    """Of one model; made by all ranks of the job together. shape: of the record that it replays, if it does."""

    def __init__(self, ranks: Ranks, layers: tuple[int, ...], shape: RoutingShape | None) -> None:
        self.ranks, self.shape = ranks, shape
        ends = ranks.pp_rank == ranks.pp - 1
        self.here = Place(
            dp_rank=ranks.dp_rank,
            reads=ranks.pp_rank == 0 or ends,
            ends=ends,
            speaks=ends and ranks.tp_rank == ranks.cp_rank == 0,
            layers=layers,
        )
        self.places: list[Place] = all_gather_objects(self.here)
        self.speaker = {place.dp_rank: rank for rank, place in enumerate(self.places) if place.speaks}
        self._post = everyone.post()

    def give(self, batch: TrainBatch, plan: Plan, columns: Iterable[str]) -> Rows:
        """What this rank needs of the batch for its micro-batches. columns: what a last stage reads."""
        names, replays = tuple(columns), self.shape is not None and batch.routing is not None
        if batch.shares is None:
            whole = {name: _by_number(getattr(batch, name), batch) for name in names}
            layers = tuple(range(len(self.shape.moe_layers))) if self.shape is not None else ()
            records = None if not replays or batch.routing is None else dict(enumerate(batch.routing))
            for record in (records or {}).values():
                assert self.shape is not None
                check_shape(record, self.shape)
            return Rows(batch, whole, records, layers)
        shares, needs = batch.shares, [list(chain.from_iterable(plan[place.dp_rank])) for place in self.places]
        mine = needs[self.ranks.job.rank]
        found: dict[str, dict[int, torch.Tensor]] = {}
        for own, wanting in (
            ([name for name in names if name == "tokens"], [place.reads for place in self.places]),
            ([name for name in names if name != "tokens"], [place.ends for place in self.places]),
        ):
            wants = [need if wanted else [] for need, wanted in zip(needs, wanting, strict=True)]
            if not own or not any(wants):
                continue
            sent = {name: getattr(batch, name) for name in own}
            kinds: dict[str, Kind] = {name: (column.dtype, ()) for name, column in sent.items()}
            arrived = self._post.deliver(sent, kinds, shares.lengths, shares.home, wants)
            if wanting[self.ranks.job.rank]:
                found |= {name: dict(zip(mine, arrived.rows(name), strict=True)) for name in own}
        records = self._give_records(batch, needs) if replays else None
        return Rows(batch, found, records, self.here.layers)

    def _give_records(self, batch: TrainBatch, needs: list[list[int]]) -> dict[int, torch.Tensor]:
        assert batch.shares is not None and batch.routing is not None and self.shape is not None
        kind = self.shape.dtype, (len(self.shape.moe_layers), self.shape.topk)
        own = [record if len(record) else torch.zeros((0, *kind[1]), dtype=kind[0]) for record in batch.routing]
        for record in own:
            check_shape(record, self.shape)
        packed = torch.cat(own) if own else torch.zeros((0, *kind[1]), dtype=kind[0])
        wants = [need if place.layers else [] for need, place in zip(needs, self.places, strict=True)]
        arrived = self._post.deliver(
            {"routing": packed},
            {"routing": kind},
            batch.shares.routed,
            batch.shares.home,
            wants,
            {"routing": [place.layers for place in self.places]},
        )
        if not self.here.layers:
            return {i: packed[:0] for i in needs[self.ranks.job.rank]}
        return dict(zip(needs[self.ranks.job.rank], arrived.rows("routing"), strict=True))

    def take_back(
        self, batch: TrainBatch, plan: Plan, done: Sequence[Spoken], names: Sequence[str]
    ) -> dict[str, torch.Tensor]:
        """Numbers per token of this rank's micro-batches, each with its sequences -> by name, [T] of those of the batch
        that are here. Only what a rank that speaks has done is looked at."""
        spoken: dict[str, dict[int, torch.Tensor]] = {name: {} for name in names}
        lengths = batch.lengths
        if self.here.speaks:
            for indices, values in done:
                sizes = [int(lengths[i]) for i in indices]
                for name in names:
                    spoken[name] |= dict(zip(indices, values[name].split(sizes), strict=True))
        homes = torch.empty(batch.num_sequences, dtype=torch.int64)
        for dp_rank, parts in enumerate(plan):
            homes[list(chain.from_iterable(parts))] = self.speaker[dp_rank]
        columns = {name: torch.cat([torch.zeros(0), *(rows[i] for i in sorted(rows))]) for name, rows in spoken.items()}
        everything = list(range(batch.num_sequences))
        if batch.shares is None:
            wants = [everything for _ in self.places]
        else:
            wants = [[] for _ in self.places]
            for number, rank in enumerate(batch.shares.home.tolist()):
                wants[rank].append(number)
        kinds: dict[str, Kind] = {name: (torch.float32, ()) for name in names}
        arrived = self._post.deliver(columns, kinds, lengths, homes, wants)
        return {name: torch.cat([torch.zeros(0), *arrived.rows(name)]) for name in names}


def _by_number(column: torch.Tensor, batch: TrainBatch) -> dict[int, torch.Tensor]:
    return dict(enumerate(column.split(batch.cu_seqlens.diff().tolist())))
