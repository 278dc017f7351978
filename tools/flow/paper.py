"""Bytes that a rank of a job sends in a step, and its planning time: the planning code, without job and values.

    traffic = PlannedJob(config, lengths, homes, routing, layers).step(rank, seed=0)

The plans of micro-batches, who needs what from whom, and what is laid out for whom, come from MegaRL's own code
(`megatron/distribution.py`, `parallel/row_exchange_plan.py`); the tensors have shapes and dtypes but no data.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

from megarl.config import Config
from megarl.controllers.mini_batches import split_indices
from megarl.controllers.policy_gradient import policy_loss_columns
from megarl.data import packing
from megarl.megatron import distribution
from megarl.megatron.distribution import BatchDispatcher, make_model_rank
from megarl.models.routing import RoutingShape
from megarl.parallel.row_exchange_plan import ExchangePlan
from megarl.types import LOCAL, TrainBatch
from megarl.types.batch import REQUIRED_COLUMNS, BatchSharding


@dataclass
class PlannedTraffic:
    """Bytes that a rank writes for ranks of its machine, once for all of them, and for other machines; and the CPU
    seconds of its plans. computed: tokens of its micro-batches, over all passes."""

    machine: int = 0
    network: int = 0
    seconds: float = 0.0
    computed: int = 0
    deliveries: int = 0
    by_forward: list[int] = field(default_factory=list)
    by_update: list[int] = field(default_factory=list)


class PlannedJob:
    """lengths, homes: [N] of the sequences. layers: by pipeline stage, indices of its layers in the routing records."""

    def __init__(
        self,
        config: Config,
        lengths: torch.Tensor,
        homes: torch.Tensor,
        routing: RoutingShape | None = None,
        layers: Sequence[tuple[int, ...]] = (),
        quadratic: float = 0.0,
    ) -> None:
        self.config, self.lengths, self.homes, self.routing = config, lengths, homes, routing
        parallel = config.parallel
        dp = parallel.world_size // (parallel.tp * parallel.cp * parallel.pp)
        places = {}
        for rank in range(parallel.world_size):
            tp_rank, rest = rank % parallel.tp, rank // parallel.tp
            cp_rank, rest = rest % parallel.cp, rest // parallel.cp
            at: Any = SimpleNamespace(
                pp=parallel.pp,
                pp_rank=rest // dp,
                dp_rank=rest % dp,
                tp_rank=tp_rank,
                cp_rank=cp_rank,
                dynamic_cp=False,
            )
            places[rank] = make_model_rank(at, layers[at.pp_rank] if layers else ())
        budget = config.train.max_tokens_per_gpu * parallel.cp
        self._actor = BatchDispatcher(places, dp, budget, quadratic, 1, routing)
        self._critic = BatchDispatcher(
            {rank: make_critic_rank(place) for rank, place in places.items()}, dp, budget, quadratic, 1, None
        )
        size = min(parallel.world_size, parallel.ranks_per_node)
        self._machines = [list(range(first, first + size)) for first in range(0, parallel.world_size, size)]

    def step(self, rank: int, seed: int) -> PlannedTraffic:
        """Plan a step of PPO with a reference, or of GRPO. seed: of the mini-batches, the number of steps taken."""
        config, traffic = self.config, PlannedTraffic()
        ppo = config.algorithm == "ppo"
        with self._as(rank, traffic):
            batch = self._batch(rank, range(len(self.lengths)), ("rollout_logprobs",))
            reference = batch.with_(routing=None)  # the reference routes for itself
            passes = [(self._actor, batch, "logprobs"), (self._critic, batch, "values")]
            for model, rows, name in (*passes[: 1 + ppo], (self._actor, reference, "logprobs")):
                before = traffic.machine + traffic.network
                model.join_forward(rows, (name,))
                traffic.by_forward.append(traffic.machine + traffic.network - before)
                traffic.computed += self._computed(model, batch, rank, True)
            losses = [(self._actor, policy_loss_columns(config))]
            if ppo:
                losses.insert(0, (self._critic, ("values", "returns")))
            for part in split_indices(len(self.lengths), config.run.num_update, config.run.ppo_epochs, seed):
                for model, columns in losses:
                    before = traffic.machine + traffic.network
                    mini = self._batch(rank, part, ("rollout_logprobs", *columns, "loss_weights"))
                    model.join_train_step(
                        mini, [name for name in mini.columns() if name in (*REQUIRED_COLUMNS, *columns)]
                    )
                    traffic.by_update.append(traffic.machine + traffic.network - before)
                    traffic.computed += self._computed(model, mini, rank, False)
        return traffic

    def _computed(self, model: BatchDispatcher, batch: TrainBatch, rank: int, forward_only: bool) -> int:
        rank_plan = model.plan(batch, forward_only)[model.model_ranks[rank].row]
        return int(batch.lengths[[i for micro in rank_plan for i in micro]].sum())

    def _batch(self, rank: int, part: Sequence[int], columns: Sequence[str]) -> TrainBatch:
        numbers = torch.as_tensor(list(part), dtype=torch.int64)
        lengths, homes = self.lengths[numbers], self.homes[numbers]
        local_indices = (homes == rank).nonzero().squeeze(1)
        routed = lengths - 1 if self.routing is not None else torch.zeros_like(lengths)
        records = None
        if self.routing is not None:
            tail = len(self.routing.moe_layers), self.routing.topk
            records = tuple(
                torch.empty((size, *tail), dtype=self.routing.dtype, device="meta")
                for size in routed[local_indices].tolist()
            )

        def column(dtype: torch.dtype) -> torch.Tensor:
            return torch.empty(int(lengths[local_indices].sum()), dtype=dtype, device="meta")

        return TrainBatch(
            tokens=column(torch.int32),
            cu_seqlens=torch.cat([torch.zeros(1, dtype=torch.int64), lengths[local_indices].cumsum(0)]),
            loss_mask=column(torch.bool),
            group=torch.zeros_like(lengths),
            sequence_reward=torch.zeros(len(lengths)),
            routing=records,
            sampling_mask=None,
            sharding=BatchSharding(lengths, routed, homes, local_indices, LOCAL),
            **{name: column(torch.bool if name == "marked" else torch.float32) for name in columns},  # type: ignore[arg-type]
        )

    @contextmanager
    def _as(self, rank: int, traffic: PlannedTraffic) -> Iterator[None]:
        """Act as a rank within the block; its row exchange plans and sends nothing."""
        packing._cached_plan.cache_clear()  # each rank makes its own plan
        before = distribution.dist, distribution.row_exchange
        world, start = self.config.parallel.world_size, time.thread_time()
        job = SimpleNamespace(get_rank=lambda: rank, get_world_size=lambda: world)
        post = _Post(self._machines, rank, traffic)
        distribution.dist, distribution.row_exchange = job, SimpleNamespace(get_row_exchange=lambda: post)  # type: ignore[assignment]
        try:
            yield
        finally:
            distribution.dist, distribution.row_exchange = before
            traffic.seconds = time.thread_time() - start


def make_critic_rank(place: distribution.ModelRank) -> distribution.ModelRank:
    """Return the critic's place: it replays no routing."""
    return distribution.ModelRank(place.row, place.needs_tokens, place.is_last_stage, place.is_reporter, ())


class _Post:
    """Stands in for `parallel.row_exchange.RowExchange` and counts the bytes it would send."""

    def __init__(self, machines: Sequence[Sequence[int]], rank: int, traffic: PlannedTraffic) -> None:
        self._machines, self._rank, self._traffic = machines, rank, traffic

    def deliver(
        self, columns: Any, kinds: Any, lengths: Any, homes: Any, wants: Any, parts: Mapping[str, Any] | None = None
    ) -> Any:
        plan = ExchangePlan(kinds, lengths, homes, wants, parts or {}, self._machines, self._rank)
        if any(plan.needs_rows(other, self._rank) for other in plan.members if other != self._rank):
            self._traffic.machine += plan.blocks(plan.local_selection(self._rank))[1]
        self._traffic.network += sum(plan.blocks(chosen)[1] for _, chosen in plan.iter_sends())
        self._traffic.deliveries += 1
        plan.inbox(self._rank)
        empty = [torch.empty(0)] * len(wants[self._rank])
        return SimpleNamespace(rows=lambda name: empty)
