"""What of a batch each rank's model computes: rows come from where the sequences are, numbers per token go back there.

The plan of micro-batches follows from lengths and homes, so every rank knows what every other needs, and nobody asks. A
first stage needs the tokens, the last one those and what a loss reads, where sampling was cut off with what could have
been sampled, one in between nothing but lengths; the record of routing goes to the stages with experts, each its own
layers. What a replica of the model has already stays there, as far as the replicas then still have equally much to do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist

from megarl.data.packing import plan_micro_batches
from megarl.megatron.routing_replay import check_shape
from megarl.models.routing import RoutingShape
from megarl.parallel import ranks, row_exchange
from megarl.parallel.ranks import Ranks
from megarl.parallel.row_exchange_plan import Kind
from megarl.types import Support, TrainBatch

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
        supports: Mapping[int, Support] | None = None,
    ) -> None:
        self._batch, self._columns, self._records, self.layers = batch, columns, records, layers
        self._supports = supports
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
            counts=self._batch.counts,
            support=None if self._supports is None else tuple(self._supports[i] for i in indices),
            **found,
        )


@dataclass(frozen=True)
class Distribution:
    """How the work of one model is shared among its ranks. All ranks of the job have the same, also those that the
    model is not on: they send it rows, and get back what is about their sequences.

    budget: tokens of a micro-batch, on all context parallel ranks together. quadratic: see `models.flops`. multiple: of
    which the number of micro-batches is one. together: whether training must not part the sequences of a group. shape:
    of the record of routing that the model replays, if it does. words: whether it emits distributions of words, which
    are over what could have been sampled, where that was cut off.
    """

    places: Mapping[int, Place]
    """By the job's numbers of the ranks that the model is on."""
    dp: int
    budget: int
    quadratic: float
    multiple: int
    together: bool
    shape: RoutingShape | None
    words: bool = False

    @property
    def here(self) -> Place | None:
        return self.places.get(dist.get_rank())

    @property
    def speaks(self) -> bool:
        return self.here is not None and self.here.speaks

    def plan(self, batch: TrainBatch, forward_only: bool) -> Plan:
        """Sequences stay with the replica that their home is of, where they can."""
        together, home = batch.group if self.together and not forward_only else None, None
        if batch.shares is not None:
            replica = torch.full((dist.get_world_size(),), -1, dtype=torch.int64)
            for rank, place in self.places.items():
                replica[rank] = place.dp_rank
            home = replica[batch.shares.home]
        return plan_micro_batches(batch.lengths, self.dp, self.budget, self.quadratic, self.multiple, together, home)

    def give(self, batch: TrainBatch, plan: Plan, columns: Iterable[str]) -> Rows:
        """What this rank needs of the batch for its micro-batches. columns: what a last stage reads. Of a batch in
        shares this is done by all ranks of the job."""
        names, replays = tuple(columns), self.shape is not None and batch.routing is not None
        if batch.shares is None:
            whole = {name: _by_number(getattr(batch, name), batch) for name in names}
            layers = tuple(range(len(self.shape.moe_layers))) if self.shape is not None else ()
            records = None if not replays or batch.routing is None else dict(enumerate(batch.routing))
            for record in (records or {}).values():
                assert self.shape is not None
                check_shape(record, self.shape)
            supports = dict(enumerate(batch.support)) if self.words and batch.support is not None else None
            return Rows(batch, whole, records, layers, supports)
        shares, needs = batch.shares, self._needs(plan)
        mine = needs.get(dist.get_rank(), [])
        found: dict[str, dict[int, torch.Tensor]] = {}
        for own, wanting in (
            ([name for name in names if name == "tokens"], {rank: place.reads for rank, place in self.places.items()}),
            ([name for name in names if name != "tokens"], {rank: place.ends for rank, place in self.places.items()}),
        ):
            wants = self._by_rank({rank: need for rank, need in needs.items() if wanting[rank]})
            if not own or not any(wants):
                continue
            sent = {name: getattr(batch, name) for name in own}
            kinds: dict[str, Kind] = {name: (column.dtype, ()) for name, column in sent.items()}
            arrived = row_exchange.post().deliver(sent, kinds, shares.lengths, shares.home, wants)
            if wanting.get(dist.get_rank()):
                found |= {name: dict(zip(mine, arrived.rows(name), strict=True)) for name in own}
        records = self._give_records(batch, needs) if replays else None
        supports = self._give_supports(batch, needs) if self.words and batch.support is not None else None
        return Rows(batch, found, records, self.here.layers if self.here else (), supports)

    def _needs(self, plan: Plan) -> dict[int, list[int]]:
        return {rank: list(chain.from_iterable(plan[place.dp_rank])) for rank, place in self.places.items()}

    @staticmethod
    def _by_rank(needs: Mapping[int, list[int]]) -> list[list[int]]:
        return [needs.get(rank, []) for rank in range(dist.get_world_size())]

    def _give_records(self, batch: TrainBatch, needs: Mapping[int, list[int]]) -> dict[int, torch.Tensor]:
        assert batch.shares is not None and batch.routing is not None and self.shape is not None
        kind = self.shape.dtype, (len(self.shape.moe_layers), self.shape.topk)
        own = [record if len(record) else torch.zeros((0, *kind[1]), dtype=kind[0]) for record in batch.routing]
        for record in own:
            check_shape(record, self.shape)
        packed = torch.cat(own) if own else torch.zeros((0, *kind[1]), dtype=kind[0])
        mine = needs.get(dist.get_rank(), [])
        world = range(dist.get_world_size())
        arrived = row_exchange.post().deliver(
            {"routing": packed},
            {"routing": kind},
            batch.shares.routed,
            batch.shares.home,
            self._by_rank({rank: need for rank, need in needs.items() if self.places[rank].layers}),
            {"routing": [self.places[rank].layers if rank in self.places else () for rank in world]},
        )
        if self.here is None or not self.here.layers:
            return {i: packed[:0] for i in mine}
        return dict(zip(mine, arrived.rows("routing"), strict=True))

    def _give_supports(self, batch: TrainBatch, needs: Mapping[int, list[int]]) -> dict[int, Support] | None:
        """The records of what could have been sampled, to the last stages, which read logits."""
        assert batch.shares is not None and batch.support is not None and batch.shares.supported is not None
        own = Support.joined([Support.whole(0), *batch.support])
        kind: Kind = torch.int32, ()
        arrived = row_exchange.post().deliver(
            {"counts": own.counts, "ids": own.ids},
            {"counts": kind, "ids": kind},
            {"counts": batch.shares.lengths, "ids": batch.shares.supported},
            batch.shares.home,
            self._by_rank({rank: need for rank, need in needs.items() if self.places[rank].ends}),
        )
        if self.here is None or not self.here.ends:
            return None
        rows = zip(needs[dist.get_rank()], arrived.rows("counts"), arrived.rows("ids"), strict=True)
        return {number: Support(counts, ids) for number, counts, ids in rows}

    def take_back(
        self, batch: TrainBatch, plan: Plan, done: Sequence[Spoken], names: Sequence[str]
    ) -> Callable[[], dict[str, torch.Tensor]]:
        """Numbers per token of this rank's micro-batches, each with its sequences -> by name, [T] of those of the batch
        that are here, for which one waits when one asks. Only what a rank that speaks has done is looked at."""
        if batch.shares is None:
            everything = assemble(batch, ranks.all_gather_objects(done if self.speaks else [], self._members()))
            return lambda: everything
        spoken: dict[str, dict[int, torch.Tensor]] = {name: {} for name in names}
        lengths = batch.lengths
        if self.speaks:
            for indices, values in done:
                sizes = [int(lengths[i]) for i in indices]
                for name in names:
                    spoken[name] |= dict(zip(indices, values[name].split(sizes), strict=True))
        homes = torch.empty(batch.num_sequences, dtype=torch.int64)
        speaker = {place.dp_rank: rank for rank, place in self.places.items() if place.speaks}
        for dp_rank, parts in enumerate(plan):
            homes[list(chain.from_iterable(parts))] = speaker[dp_rank]
        columns = {name: torch.cat([torch.zeros(0), *(rows[i] for i in sorted(rows))]) for name, rows in spoken.items()}
        wanting: dict[int, list[int]] = {}
        for number, rank in enumerate(batch.shares.home.tolist()):
            wanting.setdefault(rank, []).append(number)
        kinds: dict[str, Kind] = {name: (torch.float32, ()) for name in names}
        arrived = row_exchange.post().deliver(columns, kinds, lengths, homes, self._by_rank(wanting))
        return lambda: {name: torch.cat([torch.zeros(0), *arrived.rows(name)]) for name in names}

    def _members(self) -> dist.ProcessGroup:
        return ranks.group_of(tuple(sorted(self.places)))

    def forward_elsewhere(self, batch: TrainBatch, names: Sequence[str]) -> Callable[[], dict[str, torch.Tensor]]:
        """`MegatronModel.forward` on a rank that the model is not on, which goes on at once."""
        plan = self.plan(batch, forward_only=True)
        self.give(batch, plan, ("tokens",))
        return self.take_back(batch, plan, [], names)

    def train_elsewhere(self, batch: TrainBatch, columns: Iterable[str]) -> None:
        """`MegatronModel.train_step` on a rank that the model is not on. columns: what the loss reads."""
        self.give(batch, self.plan(batch, forward_only=False), columns)


def assemble(batch: TrainBatch, gathered: Sequence[Sequence[Spoken]]) -> dict[str, torch.Tensor]:
    """Of all replicas' micro-batches -> by name [T] in the order of the batch, which is here."""
    result: dict[str, torch.Tensor] = {}
    for indices, found in (item for share in gathered for item in share):
        spans = [torch.arange(int(batch.cu_seqlens[i]), int(batch.cu_seqlens[i + 1])) for i in indices]
        for name, values in found.items():
            full = result.setdefault(name, torch.zeros(len(batch.tokens)))
            if spans:
                full[torch.cat(spans)] = values
    return result


def place_of(here: Ranks, layers: tuple[int, ...]) -> Place:
    """This rank's. layers: those with experts that replay a record."""
    ends = here.pp_rank == here.pp - 1
    return Place(
        dp_rank=here.dp_rank,
        reads=here.pp_rank == 0 or ends,
        ends=ends,
        speaks=ends and here.tp_rank == here.cp_rank == 0,
        layers=layers,
    )


def _by_number(column: torch.Tensor, batch: TrainBatch) -> dict[int, torch.Tensor]:
    return dict(enumerate(column.split(batch.cu_seqlens.diff().tolist())))
