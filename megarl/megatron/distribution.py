"""Dispatch a batch's sequences to the ranks of a model, and collect per-token outputs on the sequences' home ranks.

The micro-batch plan is a function of sequence lengths and home ranks, so every rank knows what every other rank needs
without asking. Middle pipeline stages need only lengths, and stages with experts the routing of their own layers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from megarl.config import Config, ParallelConfig
from megarl.data.packing import MicroBatchPlan, plan_micro_batches
from megarl.data.shared_prefixes import skippable
from megarl.megatron.routing_replay import check_shape
from megarl.models.routing import RoutingShape
from megarl.models.sparse_indices import IndexShape, check_record
from megarl.parallel import ranks, row_exchange
from megarl.parallel.ranks import Ranks
from megarl.parallel.row_exchange_plan import RowSpec
from megarl.types import SamplingMask, TrainBatch

MicroBatchOutput = tuple[Sequence[int], Mapping[str, torch.Tensor]]
"""A micro-batch's sequence indices, and its [T] outputs by name."""


@dataclass(frozen=True)
class ModelRank:
    """A rank's position in a model's layout, and what it needs of a batch."""

    row: int  # of the plan, see `MicroBatchPlan`
    needs_tokens: bool  # it is the first or the last stage
    is_last_stage: bool  # it emits the outputs and computes losses
    is_reporter: bool  # it reports outputs and metrics of the micro-batches of which its row is the first
    replayed_layers: tuple[int, ...]  # its MoE layers that replay recorded routing, as indices among all MoE layers
    indexed_layers: tuple[int, ...] = ()  # those that replay sparse attention indices, among all with an indexer


class LocalRows(NamedTuple):
    """A rank's part of a batch: the sequences of its micro-batches, by index."""

    batch: TrainBatch
    columns: Mapping[str, Mapping[int, torch.Tensor]]
    records: Mapping[int, torch.Tensor] | None
    layers: tuple[int, ...]  # the MoE layers that the routing records cover
    sampling_masks: Mapping[int, SamplingMask] | None
    index_records: Mapping[int, torch.Tensor] | None = None
    indexed_layers: tuple[int, ...] = ()  # the layers with an indexer that the records of indices cover
    images: Mapping[int, torch.Tensor] | None = None  # packed

    def select(self, indices: Sequence[int]) -> TrainBatch:
        """Return a batch of these sequences. Columns that this rank does not need are zeros or None."""
        index_tensor = torch.as_tensor(list(indices), dtype=torch.int64)
        lengths = self.batch.lengths[index_tensor]
        fields: dict[str, Any] = {}
        for name, rows in self.columns.items():
            fields[name] = torch.cat([rows[i] for i in indices]) if len(indices) else getattr(self.batch, name)[:0]
        for name in ("tokens", "loss_mask", "rollout_logprobs"):
            if name not in fields:
                fields[name] = torch.zeros(int(lengths.sum()), dtype=getattr(self.batch, name).dtype)
        return TrainBatch(
            cu_seqlens=torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]),
            group=self.batch.group[index_tensor],
            sequence_reward=self.batch.sequence_reward[index_tensor],
            routing=None if self.records is None else tuple(self.records[i] for i in indices),
            sparse_indices=None if self.index_records is None else tuple(self.index_records[i] for i in indices),
            counts=self.batch.counts,
            sampling_mask=None if self.sampling_masks is None else tuple(self.sampling_masks[i] for i in indices),
            images=None if self.images is None else tuple(self.images[i] for i in indices),
            prefixes=None if self.batch.prefixes is None else self.batch.prefixes.select(index_tensor),
            **fields,
        )


@dataclass(frozen=True)
class BatchDispatcher:
    """Splits a model's work among its ranks. Every rank of the job has an equal instance.

    Ranks outside the model send it rows and receive the outputs of their own sequences.
    """

    model_ranks: Mapping[int, ModelRank]  # by job rank, for each rank that the model is on
    rows: int  # of a plan: data parallel ranks, with dynamic context parallelism times context parallel ranks
    token_budget: int  # of a micro-batch of a single row
    quadratic_cost: float  # see `models.flops`
    multiple: int  # the number of micro-batches is a multiple of this
    routing_shape: RoutingShape | None  # of the routing records that the model replays; None without replay
    index_shape: IndexShape | None = None  # of the sparse attention indices that the model replays
    has_logits: bool = False  # whether the model emits token distributions, which depend on the sampling masks
    min_trained: int = 1  # the least number of micro-batches of an update
    is_lockstep: bool = True  # whether data parallel ranks wait for each other in each micro-batch
    shares_prefixes: bool = False  # whether tokens that sequences have in common are computed once
    repeated_tokens: int = 1  # see `shared_prefixes.skipped_tokens`
    widths: tuple[tuple[int, float], ...] = ((1, 0.0),)  # of micro-batches, with costs, see `plan_micro_batches`

    @property
    def this_rank(self) -> ModelRank | None:
        return self.model_ranks.get(dist.get_rank())

    @property
    def is_reporter(self) -> bool:
        return self.this_rank is not None and self.this_rank.is_reporter

    def plan(self, batch: TrainBatch, forward_only: bool) -> MicroBatchPlan:
        """Plan the micro-batches. Sequences stay with the replica of their home rank where possible."""
        groups, home_row = batch.group if batch.keeps_groups and not forward_only else None, None
        if batch.sharding is not None:
            row_of_rank = torch.full((dist.get_world_size(),), -1, dtype=torch.int64)
            for rank, model_rank in self.model_ranks.items():
                row_of_rank[rank] = model_rank.row
            home_row = row_of_rank[batch.sharding.home]
        return plan_micro_batches(
            batch.lengths,
            self.rows,
            self.token_budget,
            self.quadratic_cost,
            self.multiple,
            groups,
            home_row,
            minimum=1 if forward_only else self.min_trained,
            common=self.common_tokens(batch),
            is_lockstep=self.is_lockstep,
            widths=dict(self.widths),
        )

    def common_tokens(
        self, batch: TrainBatch, indices: Sequence[int] | None = None
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return an order of these n sequences, by default all, and how many first tokens of each are not computed
        after the one before it, both [n] int64; None if all tokens are computed."""
        if batch.prefixes is None or not self.shares_prefixes:
            return None
        prefixes, lengths = batch.prefixes, batch.lengths
        if indices is not None:
            rows = torch.as_tensor(list(indices), dtype=torch.int64)
            prefixes, lengths = prefixes.select(rows), lengths[rows]
        return torch.tensor(prefixes.order()), skippable(prefixes, lengths, self.repeated_tokens)

    def count_tokens(self, batch: TrainBatch, micro_batch: Sequence[int]) -> int:
        """Return the tokens that a micro-batch computes, without padding."""
        common = self.common_tokens(batch, micro_batch)
        return int(batch.lengths[list(micro_batch)].sum()) - (int(common[1].sum()) if common else 0)

    def list_work(self, batch: TrainBatch, forward_only: bool) -> tuple[list[int], list[int]]:
        """Return the lengths of all sequences, and how many first tokens of each another one's computation covers."""
        skipped = [0] * batch.num_sequences
        for _, micro_batch in self.plan(batch, forward_only).micro_batches():
            common = self.common_tokens(batch, micro_batch)
            for sequence, tokens in zip(micro_batch, common[1].tolist() if common else (), strict=False):
                skipped[sequence] = tokens
        return batch.lengths.tolist(), skipped

    def dispatch(self, batch: TrainBatch, plan: MicroBatchPlan, columns: Iterable[str]) -> LocalRows:
        """Return the rows that this rank needs for its micro-batches.

        Collective over all ranks of the job if the batch is sharded.

        columns: those that the last stage reads.
        """
        names, shape = tuple(columns), self.routing_shape
        records = None if shape is None else batch.routing
        sampling_masks = batch.sampling_mask if self.has_logits else None
        for record in records or ():
            assert shape is not None
            check_shape(record, shape)
        index_shape, indices = self.index_shape, None if self.index_shape is None else batch.sparse_indices
        for record in indices or ():
            assert index_shape is not None
            check_record(record, index_shape)
        if batch.sharding is None:
            lengths = batch.lengths.tolist()
            return LocalRows(
                batch,
                {name: dict(enumerate(getattr(batch, name).split(lengths))) for name in names},
                None if records is None else dict(enumerate(records)),
                () if shape is None else tuple(range(len(shape.moe_layers))),
                None if sampling_masks is None else dict(enumerate(sampling_masks)),
                None if indices is None else dict(enumerate(indices)),
                () if index_shape is None else tuple(range(len(index_shape.layers))),
                None if batch.images is None else dict(enumerate(batch.images)),
            )
        last_stages = [rank for rank, model_rank in self.model_ranks.items() if model_rank.is_last_stage]
        with_tokens = [rank for rank, model_rank in self.model_ranks.items() if model_rank.needs_tokens]
        local_columns: dict[str, dict[int, torch.Tensor]] = {}
        for column_names, receivers in (
            ([name for name in names if name == "tokens"], with_tokens),
            ([name for name in names if name != "tokens"], last_stages),
        ):
            sources = {name: getattr(batch, name) for name in column_names}
            specs: dict[str, RowSpec] = {name: (column.dtype, ()) for name, column in sources.items()}
            local_columns |= self._deliver(batch, plan, sources, specs, batch.sharding.lengths, receivers)
        return LocalRows(
            batch,
            local_columns,
            None if records is None else self._dispatch_routing(batch, plan, records),
            self.this_rank.replayed_layers if self.this_rank else (),
            None if sampling_masks is None else self._dispatch_sampling_masks(batch, plan, sampling_masks, last_stages),
            None if indices is None else self._dispatch_indices(batch, plan, indices),
            self.this_rank.indexed_layers if self.this_rank else (),
            None if batch.images is None else self._dispatch_images(batch, plan, batch.images),
        )

    def _deliver(
        self,
        batch: TrainBatch,
        plan: MicroBatchPlan,
        columns: Mapping[str, torch.Tensor],
        specs: Mapping[str, RowSpec],
        lengths: torch.Tensor | Mapping[str, torch.Tensor],
        receivers: Collection[int],
        parts: Mapping[str, Sequence[Sequence[int]]] | None = None,
    ) -> dict[str, dict[int, torch.Tensor]]:
        """Send rows to the ranks in `receivers`, which need them for their micro-batches.

        Returns this rank's rows by column and sequence index; empty unless it is a receiver.
        """
        assert batch.sharding is not None
        sequences, receivers = [list(chain.from_iterable(micros)) for micros in plan], set(receivers)
        wants: list[list[int]] = [[] for _ in range(dist.get_world_size())]
        for rank in receivers:
            wants[rank] = sequences[self.model_ranks[rank].row]
        if not specs or not any(wants):
            return {name: {} for name in specs}
        exchange, local_sequences = row_exchange.get_row_exchange(), wants[dist.get_rank()]
        delivery = exchange.deliver(columns, specs, lengths, batch.sharding.home, wants, parts)
        if dist.get_rank() not in receivers:
            return {}
        return {name: dict(zip(local_sequences, delivery.rows(name), strict=True)) for name in specs}

    def _dispatch_routing(
        self, batch: TrainBatch, plan: MicroBatchPlan, records: Sequence[torch.Tensor]
    ) -> dict[int, torch.Tensor]:
        """Send each stage the routing of its own layers."""
        assert batch.sharding is not None and self.routing_shape is not None
        dtype, tail = self.routing_shape.dtype, (len(self.routing_shape.moe_layers), self.routing_shape.topk)
        layers = {rank: model_rank.replayed_layers for rank, model_rank in self.model_ranks.items()}
        return self._dispatch_records(batch, plan, records, (dtype, tail), batch.sharding.routed_tokens, layers)

    def _dispatch_indices(
        self, batch: TrainBatch, plan: MicroBatchPlan, records: Sequence[torch.Tensor]
    ) -> dict[int, torch.Tensor]:
        """Send each stage the sparse attention indices of its own layers."""
        assert batch.sharding is not None and batch.sharding.indexed_tokens is not None
        assert self.index_shape is not None
        spec = self.index_shape.dtype, (len(self.index_shape.layers), self.index_shape.topk)
        layers = {rank: model_rank.indexed_layers for rank, model_rank in self.model_ranks.items()}
        return self._dispatch_records(batch, plan, records, spec, batch.sharding.indexed_tokens, layers)

    def _dispatch_records(
        self,
        batch: TrainBatch,
        plan: MicroBatchPlan,
        records: Sequence[torch.Tensor],
        spec: RowSpec,
        num_rows: torch.Tensor,
        layers: Mapping[int, tuple[int, ...]],
    ) -> dict[int, torch.Tensor]:
        """Send each stage its part of the records. layers: those of each of the model's ranks."""
        no_tokens = torch.zeros((0, *spec[1]), dtype=spec[0])
        rows = self._deliver(
            batch,
            plan,
            {"record": torch.cat([record for record in records if len(record)] or [no_tokens])},
            {"record": spec},
            num_rows,
            [rank for rank in layers if layers[rank]],
            {"record": [layers.get(rank, ()) for rank in range(dist.get_world_size())]},
        )
        if "record" in rows or self.this_rank is None:
            return rows.get("record", {})
        return dict.fromkeys(chain.from_iterable(plan[self.this_rank.row]), no_tokens)

    def _dispatch_sampling_masks(
        self,
        batch: TrainBatch,
        plan: MicroBatchPlan,
        sampling_masks: Sequence[SamplingMask],
        last_stages: Sequence[int],
    ) -> dict[int, SamplingMask] | None:
        """Send the sampling masks to the last stages, which compute logits."""
        assert batch.sharding is not None and batch.sharding.sampling_mask_sizes is not None
        masks = SamplingMask.concat([SamplingMask.unrestricted(0), *sampling_masks])
        row_spec: RowSpec = torch.int32, ()
        rows = self._deliver(
            batch,
            plan,
            {"counts": masks.counts, "ids": masks.ids},
            {"counts": row_spec, "ids": row_spec},
            {"counts": batch.sharding.lengths, "ids": batch.sharding.sampling_mask_sizes},
            last_stages,
        )
        if self.this_rank is None or not self.this_rank.is_last_stage:
            return None
        return {index: SamplingMask(counts, rows["ids"][index]) for index, counts in rows["counts"].items()}

    def _dispatch_images(
        self, batch: TrainBatch, plan: MicroBatchPlan, images: Sequence[torch.Tensor]
    ) -> dict[int, torch.Tensor]:
        """Send the images of its sequences to every rank of the model: all stages need the positions of tokens."""
        assert batch.sharding is not None and batch.sharding.image_bytes is not None
        packed = torch.cat([torch.zeros(0, dtype=torch.uint8), *images])
        specs: dict[str, RowSpec] = {"images": (torch.uint8, ())}
        rows = self._deliver(batch, plan, {"images": packed}, specs, batch.sharding.image_bytes, self.model_ranks)
        return rows.get("images", {})

    def collect(
        self, batch: TrainBatch, plan: MicroBatchPlan, outputs: Sequence[MicroBatchOutput], names: Sequence[str]
    ) -> Callable[[], dict[str, torch.Tensor]]:
        """Send per-token outputs to the home ranks of their sequences; gather them if the batch is not sharded.

        Returns a function that waits for the exchange and returns, by name, [T] values of this rank's sequences. Only
        outputs of reporter ranks are read.

        outputs: of the micro-batches of which this rank's row is the first, each with its sequence indices.
        """
        outputs = outputs if self.is_reporter else []
        if batch.sharding is None:
            group = ranks.layout_group(tuple(sorted(self.model_ranks)))
            outputs = list(chain.from_iterable(ranks.all_gather_objects(outputs, group)))
        reported: dict[str, dict[int, torch.Tensor]] = {name: {} for name in names}
        for indices, values in outputs:
            sizes = batch.lengths[list(indices)].tolist()
            for name in names:
                reported[name] |= dict(zip(indices, values[name].split(sizes), strict=True))
        columns = {
            name: torch.cat([torch.zeros(0), *(rows[i] for i in sorted(rows))]) for name, rows in reported.items()
        }
        if batch.sharding is None:
            return lambda: columns
        specs: dict[str, RowSpec] = {name: (torch.float32, ()) for name in names}
        sources = torch.empty(batch.num_sequences, dtype=torch.int64)
        reporters = {model_rank.row: rank for rank, model_rank in self.model_ranks.items() if model_rank.is_reporter}
        for row, micro_batch in plan.micro_batches():
            sources[micro_batch] = reporters[row]
        wants: list[list[int]] = [[] for _ in range(dist.get_world_size())]
        for index, rank in enumerate(batch.sharding.home.tolist()):
            wants[rank].append(index)
        delivery = row_exchange.get_row_exchange().deliver(columns, specs, batch.lengths, sources, wants)
        return lambda: {name: torch.cat([torch.zeros(0), *delivery.rows(name)]) for name in names}

    def join_forward(self, batch: TrainBatch, names: Sequence[str]) -> Callable[[], dict[str, torch.Tensor]]:
        """Take part in `MegatronModel.forward` on a rank outside the model, without waiting for the result."""
        plan = self.plan(batch, forward_only=True)
        self.dispatch(batch, plan, ("tokens",))
        return self.collect(batch, plan, [], names)

    def join_train_step(self, batch: TrainBatch, columns: Iterable[str]) -> None:
        """Take part in `MegatronModel.train_step` on a rank outside the model. columns: those that the loss reads."""
        self.dispatch(batch, self.plan(batch, forward_only=False), columns)


def make_model_rank(layout: Ranks, layers: tuple[int, ...], indexed_layers: tuple[int, ...] = ()) -> ModelRank:
    """Return this rank's `ModelRank`.

    layers: its MoE layers that replay recorded routing.
    indexed_layers: its layers that replay sparse attention indices.
    """
    is_last_stage = layout.pp_rank == layout.pp - 1
    return ModelRank(
        row=layout.dp_rank * layout.cp + layout.cp_rank if layout.dynamic_cp else layout.dp_rank,
        needs_tokens=layout.pp_rank == 0 or is_last_stage,
        is_last_stage=is_last_stage,
        is_reporter=is_last_stage and layout.tp_rank == 0 and (layout.dynamic_cp or layout.cp_rank == 0),
        replayed_layers=layers,
        indexed_layers=indexed_layers,
    )


def row_budget(config: Config, layout: Ranks | ParallelConfig) -> int:
    """Return the tokens of a micro-batch of a single row of the plan."""
    return config.train.max_tokens_per_gpu * (1 if layout.dynamic_cp else layout.cp)
