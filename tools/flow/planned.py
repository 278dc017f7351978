"""Planned bytes of a step of `bench.py flow`, against those that its ranks held and sent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from flow.answers import QUADRATIC, Shape, build_config, groups, lengths, routing_shape
from megarl.controllers.controller import load_requirements
from megarl.models.host_memory import FLOAT_BYTES, TOKEN_BYTES, BatchSize, bytes_by_phase, column_bytes, recording_bytes

if TYPE_CHECKING:
    from flow.paper import PlannedJob, PlannedTraffic


def home_ranks(shape: Shape, world: int, engine_tp: int) -> torch.Tensor:
    """Return [sequences] ranks, as `flow/ranks.py` assigns groups to engines."""
    engines = world // engine_tp
    return torch.tensor(
        [group * engines // groups(shape) * engine_tp for group in range(groups(shape)) for _ in range(shape.samples)]
    )


def all_lengths(shape: Shape) -> torch.Tensor:
    return torch.from_numpy(np.concatenate([lengths(shape, group) for group in range(groups(shape))]))


def plan_job(spec: Mapping[str, Any]) -> PlannedJob:
    from flow.paper import PlannedJob  # imports Megatron

    shape, pp = Shape(**spec["shape"]), spec["pp"]
    layers = [tuple(range(shape.layers))[stage::pp] for stage in range(pp)]
    homes = home_ranks(shape, spec["ranks"], spec["engine_tp"])
    return PlannedJob(build_config(spec, Path()), all_lengths(shape), homes, routing_shape(shape), layers, QUADRATIC)


def planned_traffic(spec: Mapping[str, Any], seed: int) -> list[PlannedTraffic]:
    """Return the bytes that each rank sends in a step; `seed` steps were taken before."""
    plan = plan_job(spec)
    return [plan.step(rank, seed) for rank in range(spec["ranks"])]


def planned_memory(spec: Mapping[str, Any], by_rank: Sequence[PlannedTraffic]) -> dict[str, int]:
    """Return the bytes of all ranks of one machine, in the phases of `host_memory.bytes_by_phase`, with rollouts alone,
    and while these are recorded."""
    config, shape = build_config(spec, Path()), Shape(**spec["shape"])
    declared, routing, sizes = load_requirements(config), routing_shape(shape), all_lengths(shape)
    tokens = int(sizes.sum())
    columns, record = (
        column_bytes(config, declared),
        0 if routing is None else shape.layers * shape.topk * routing.dtype.itemsize,
    )
    full_bytes = (
        tokens * ((columns + FLOAT_BYTES) * (1 + ("critic" in declared.roles)) + record) * config.run.ppo_epochs
    )
    moved = sum(sum(rank.by_update) for rank in by_rank) / full_bytes
    # The first pass is the policy's, with replayed routing: tokens are sent there, and one value per token comes back.
    passed = sum(rank.by_forward[0] for rank in by_rank) / (tokens * (TOKEN_BYTES + FLOAT_BYTES + record))
    totals: dict[str, float] = {}
    for share, names in ((passed, ("forward",)), (moved, ("advantages", "cutting", "update"))):
        batch = BatchSize(tokens, len(sizes), int(sizes.max()), min(1.0, share))
        by_time = bytes_by_phase(config, declared, batch, routing)
        totals |= {name: sum(by_time[name].values()) for name in names if name in by_time}
    phase_bytes = next(iter(bytes_by_phase(config, declared, batch, routing).values()))
    rollouts = phase_bytes["rollouts"] + phase_bytes["records of routing"]
    totals["recording"] = rollouts + tokens * columns + recording_bytes(config, batch, routing)
    return {"rollouts": round(rollouts)} | {name: round(amount) for name, amount in totals.items()}


def measured(by_rank: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Return the sum of each rank's peak at each of these moments."""
    names = {name for rank in by_rank for name in rank["held"]}
    return {name: sum(rank["held"].get(name, 0) for rank in by_rank) for name in sorted(names)}


def compare_with_measured(spec: Mapping[str, Any], by_rank: Sequence[Mapping[str, Any]]) -> dict[str, tuple[int, int]]:
    """Return planned and measured values: bytes by moment of a step, those that all ranks sent in the last step, and
    tokens of its micro-batches."""
    last = [rank["full"][-1] for rank in by_rank]
    plan = planned_traffic(spec, last[0]["seed"])
    planned, counted = planned_memory(spec, plan), measured(by_rank)
    pairs = {name: (amount, counted[name]) for name, amount in planned.items() if name in counted}
    pairs["sent"] = sum(rank.machine + rank.network for rank in plan), sum(step["posted"] for step in last)
    return pairs | {"computed": (sum(rank.computed for rank in plan), sum(step["computed"] for step in last))}
