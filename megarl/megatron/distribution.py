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
from megarl.parallel.row_exchange_plan import RowSpec
from megarl.types import SamplingMask, TrainBatch

MicroBatchPlan = Sequence[Sequence[Sequence[int]]]
"""[data parallel rank][micro-batch] -> numbers of sequences, see `data.packing`."""
MicroBatchOutput = tuple[Sequence[int], Mapping[str, torch.Tensor]]
"""Of a micro-batch, the numbers of its sequences, and by name [T] of them."""


@dataclass(frozen=True)
class ModelRank:
    """What a rank is for a model."""

    dp_rank: int
    needs_tokens: bool
    """Whether it has the tokens of its micro-batches: it embeds them, or emits something about them."""
    is_last_stage: bool
    """Whether it emits the numbers, and computes losses."""
    is_reporter: bool
    """Whether it is the one of those of its replica that reports them."""
    replayed_layers: tuple[int, ...]
    """With experts that replay a record, by their places among all layers with experts."""


class LocalRows:
    """A rank's part of a batch: the sequences of its micro-batches.

    layers: those that the records of routing are of.
    """

    def __init__(
        self,
        batch: TrainBatch,
        columns: Mapping[str, Mapping[int, torch.Tensor]],
        records: Mapping[int, torch.Tensor] | None,
        layers: tuple[int, ...],
        supports: Mapping[int, SamplingMask] | None = None,
    ) -> None:
        self._batch, self._columns, self._records, self.layers = batch, columns, records, layers
        self._sampling_masks = supports
        self._lengths = batch.lengths

    def select(self, indices: Sequence[int]) -> TrainBatch:
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
            sampling_mask=None if self._sampling_masks is None else tuple(self._sampling_masks[i] for i in indices),
            **found,
        )


@dataclass(frozen=True)
class BatchDispatcher:
    """How the work of one model is shared among its ranks. All ranks of the job have the same, also those that the
    model is not on: they send it rows, and get back what is about their sequences.

    budget: tokens of a micro-batch, on all context parallel ranks together. quadratic: see `models.flops`. multiple: of
    which the number of micro-batches is one. together: whether training must not part the sequences of a group. shape:
    of the record of routing that the model replays, if it does. words: whether it emits distributions of words, which
    are over what could have been sampled, where that was cut off.
    """

    model_ranks: Mapping[int, ModelRank]
    """By the job's numbers of the ranks that the model is on."""
    dp: int
    token_budget: int
    quadratic_cost: float
    multiple: int
    should_keep_groups: bool
    routing_shape: RoutingShape | None
    has_logits: bool = False

    @property
    def this_rank(self) -> ModelRank | None:
        return self.model_ranks.get(dist.get_rank())

    @property
    def is_reporter(self) -> bool:
        return self.this_rank is not None and self.this_rank.is_reporter

    def plan(self, batch: TrainBatch, forward_only: bool) -> MicroBatchPlan:
        """Sequences stay with the replica that their home is of, where they can."""
        together, home = batch.group if self.should_keep_groups and not forward_only else None, None
        if batch.sharding is not None:
            replica = torch.full((dist.get_world_size(),), -1, dtype=torch.int64)
            for rank, place in self.model_ranks.items():
                replica[rank] = place.dp_rank
            home = replica[batch.sharding.home]
        return plan_micro_batches(
            batch.lengths, self.dp, self.token_budget, self.quadratic_cost, self.multiple, together, home
        )

    def dispatch(self, batch: TrainBatch, plan: MicroBatchPlan, columns: Iterable[str]) -> LocalRows:
        """What this rank needs of the batch for its micro-batches. columns: what a last stage reads. Of a batch in
        shares this is done by all ranks of the job."""
        names, replays = tuple(columns), self.routing_shape is not None and batch.routing is not None
        if batch.sharding is None:
            whole = {name: _split_by_sequence(getattr(batch, name), batch) for name in names}
            layers = tuple(range(len(self.routing_shape.moe_layers))) if self.routing_shape is not None else ()
            records = None if not replays or batch.routing is None else dict(enumerate(batch.routing))
            for record in (records or {}).values():
                assert self.routing_shape is not None
                check_shape(record, self.routing_shape)
            supports = (
                dict(enumerate(batch.sampling_mask)) if self.has_logits and batch.sampling_mask is not None else None
            )
            return LocalRows(batch, whole, records, layers, supports)
        shares, needs = batch.sharding, self._sequences_by_rank(plan)
        mine = needs.get(dist.get_rank(), [])
        found: dict[str, dict[int, torch.Tensor]] = {}
        for own, wanting in (
            (
                [name for name in names if name == "tokens"],
                {rank: place.needs_tokens for rank, place in self.model_ranks.items()},
            ),
            (
                [name for name in names if name != "tokens"],
                {rank: place.is_last_stage for rank, place in self.model_ranks.items()},
            ),
        ):
            wants = self._as_list({rank: need for rank, need in needs.items() if wanting[rank]})
            if not own or not any(wants):
                continue
            sent = {name: getattr(batch, name) for name in own}
            kinds: dict[str, RowSpec] = {name: (column.dtype, ()) for name, column in sent.items()}
            arrived = row_exchange.get_row_exchange().deliver(sent, kinds, shares.lengths, shares.home, wants)
            if wanting.get(dist.get_rank()):
                found |= {name: dict(zip(mine, arrived.rows(name), strict=True)) for name in own}
        records = self._dispatch_routing(batch, needs) if replays else None
        supports = (
            self._dispatch_sampling_masks(batch, needs) if self.has_logits and batch.sampling_mask is not None else None
        )
        return LocalRows(batch, found, records, self.this_rank.replayed_layers if self.this_rank else (), supports)

    def _sequences_by_rank(self, plan: MicroBatchPlan) -> dict[int, list[int]]:
        return {rank: list(chain.from_iterable(plan[place.dp_rank])) for rank, place in self.model_ranks.items()}

    @staticmethod
    def _as_list(needs: Mapping[int, list[int]]) -> list[list[int]]:
        return [needs.get(rank, []) for rank in range(dist.get_world_size())]

    def _dispatch_routing(self, batch: TrainBatch, needs: Mapping[int, list[int]]) -> dict[int, torch.Tensor]:
        assert batch.sharding is not None and batch.routing is not None and self.routing_shape is not None
        kind = self.routing_shape.dtype, (len(self.routing_shape.moe_layers), self.routing_shape.topk)
        own = [record if len(record) else torch.zeros((0, *kind[1]), dtype=kind[0]) for record in batch.routing]
        for record in own:
            check_shape(record, self.routing_shape)
        packed = torch.cat(own) if own else torch.zeros((0, *kind[1]), dtype=kind[0])
        mine = needs.get(dist.get_rank(), [])
        world = range(dist.get_world_size())
        arrived = row_exchange.get_row_exchange().deliver(
            {"routing": packed},
            {"routing": kind},
            batch.sharding.routed_tokens,
            batch.sharding.home,
            self._as_list({rank: need for rank, need in needs.items() if self.model_ranks[rank].replayed_layers}),
            {"routing": [self.model_ranks[rank].replayed_layers if rank in self.model_ranks else () for rank in world]},
        )
        if self.this_rank is None or not self.this_rank.replayed_layers:
            return {i: packed[:0] for i in mine}
        return dict(zip(mine, arrived.rows("routing"), strict=True))

    def _dispatch_sampling_masks(
        self, batch: TrainBatch, needs: Mapping[int, list[int]]
    ) -> dict[int, SamplingMask] | None:
        """The records of what could have been sampled, to the last stages, which read logits."""
        assert (
            batch.sharding is not None
            and batch.sampling_mask is not None
            and batch.sharding.sampling_mask_sizes is not None
        )
        own = SamplingMask.concat([SamplingMask.unrestricted(0), *batch.sampling_mask])
        kind: RowSpec = torch.int32, ()
        arrived = row_exchange.get_row_exchange().deliver(
            {"counts": own.counts, "ids": own.ids},
            {"counts": kind, "ids": kind},
            {"counts": batch.sharding.lengths, "ids": batch.sharding.sampling_mask_sizes},
            batch.sharding.home,
            self._as_list({rank: need for rank, need in needs.items() if self.model_ranks[rank].is_last_stage}),
        )
        if self.this_rank is None or not self.this_rank.is_last_stage:
            return None
        rows = zip(needs[dist.get_rank()], arrived.rows("counts"), arrived.rows("ids"), strict=True)
        return {number: SamplingMask(counts, ids) for number, counts, ids in rows}

    def collect(
        self, batch: TrainBatch, plan: MicroBatchPlan, done: Sequence[MicroBatchOutput], names: Sequence[str]
    ) -> Callable[[], dict[str, torch.Tensor]]:
        """Numbers per token of this rank's micro-batches, each with its sequences -> by name, [T] of those of the batch
        that are here, for which one waits when one asks. Only what a rank that speaks has done is looked at."""
        if batch.sharding is None:
            everything = assemble(
                batch, ranks.all_gather_objects(done if self.is_reporter else [], self._model_group())
            )
            return lambda: everything
        spoken: dict[str, dict[int, torch.Tensor]] = {name: {} for name in names}
        lengths = batch.lengths
        if self.is_reporter:
            for indices, values in done:
                sizes = [int(lengths[i]) for i in indices]
                for name in names:
                    spoken[name] |= dict(zip(indices, values[name].split(sizes), strict=True))
        homes = torch.empty(batch.num_sequences, dtype=torch.int64)
        speaker = {place.dp_rank: rank for rank, place in self.model_ranks.items() if place.is_reporter}
        for dp_rank, parts in enumerate(plan):
            homes[list(chain.from_iterable(parts))] = speaker[dp_rank]
        columns = {name: torch.cat([torch.zeros(0), *(rows[i] for i in sorted(rows))]) for name, rows in spoken.items()}
        wanting: dict[int, list[int]] = {}
        for number, rank in enumerate(batch.sharding.home.tolist()):
            wanting.setdefault(rank, []).append(number)
        kinds: dict[str, RowSpec] = {name: (torch.float32, ()) for name in names}
        arrived = row_exchange.get_row_exchange().deliver(columns, kinds, lengths, homes, self._as_list(wanting))
        return lambda: {name: torch.cat([torch.zeros(0), *arrived.rows(name)]) for name in names}

    def _model_group(self) -> dist.ProcessGroup:
        return ranks.layout_group(tuple(sorted(self.model_ranks)))

    def join_forward(self, batch: TrainBatch, names: Sequence[str]) -> Callable[[], dict[str, torch.Tensor]]:
        """`MegatronModel.forward` on a rank that the model is not on, which goes on at once."""
        plan = self.plan(batch, forward_only=True)
        self.dispatch(batch, plan, ("tokens",))
        return self.collect(batch, plan, [], names)

    def join_train_step(self, batch: TrainBatch, columns: Iterable[str]) -> None:
        """`MegatronModel.train_step` on a rank that the model is not on. columns: what the loss reads."""
        self.dispatch(batch, self.plan(batch, forward_only=False), columns)


def assemble(batch: TrainBatch, gathered: Sequence[Sequence[MicroBatchOutput]]) -> dict[str, torch.Tensor]:
    """Of all replicas' micro-batches -> by name [T] in the order of the batch, which is here."""
    result: dict[str, torch.Tensor] = {}
    for indices, found in (item for share in gathered for item in share):
        spans = [torch.arange(int(batch.cu_seqlens[i]), int(batch.cu_seqlens[i + 1])) for i in indices]
        for name, values in found.items():
            full = result.setdefault(name, torch.zeros(len(batch.tokens)))
            if spans:
                full[torch.cat(spans)] = values
    return result


def make_model_rank(here: Ranks, layers: tuple[int, ...]) -> ModelRank:
    """This rank's. layers: those with experts that replay a record."""
    ends = here.pp_rank == here.pp - 1
    return ModelRank(
        dp_rank=here.dp_rank,
        needs_tokens=here.pp_rank == 0 or ends,
        is_last_stage=ends,
        is_reporter=ends and here.tp_rank == here.cp_rank == 0,
        replayed_layers=layers,
    )


def _split_by_sequence(column: torch.Tensor, batch: TrainBatch) -> dict[int, torch.Tensor]:
    return dict(enumerate(column.split(batch.cu_seqlens.diff().tolist())))
