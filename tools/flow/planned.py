"""Planned bytes of a step of `bench_flow.py`, against those that its ranks held and sent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from flow.answers import QUADRATIC, Shape, config_of, groups, lengths, routing_of
from megarl.controllers.controller import load_requirements
from megarl.models.host_memory import FLOAT_BYTES, TOKEN_BYTES, BatchSize, bytes_by_phase, column_bytes, recording_bytes

if TYPE_CHECKING:
    from flow.paper import Paper, Sent


def homes_of(shape: Shape, world: int, engine_tp: int) -> torch.Tensor:
    """Return [sequences] ranks, as `flow/ranks.py` assigns groups to engines."""
    engines = world // engine_tp
    return torch.tensor(
        [group * engines // groups(shape) * engine_tp for group in range(groups(shape)) for _ in range(shape.samples)]
    )


def lengths_of(shape: Shape) -> torch.Tensor:
    return torch.from_numpy(np.concatenate([lengths(shape, group) for group in range(groups(shape))]))


def paper_of(order: Mapping[str, Any]) -> Paper:
    from flow.paper import Paper  # imports Megatron

    shape, pp = Shape(**order["shape"]), order["pp"]
    layers = [tuple(range(shape.layers))[stage::pp] for stage in range(pp)]
    homes = homes_of(shape, order["ranks"], order["engine_tp"])
    return Paper(config_of(order, Path()), lengths_of(shape), homes, routing_of(shape), layers, QUADRATIC)


def sent(order: Mapping[str, Any], seed: int) -> list[Sent]:
    """Return the bytes that each rank sends in a step; `seed` steps were taken before."""
    paper = paper_of(order)
    return [paper.step(rank, seed) for rank in range(order["ranks"])]


def held(order: Mapping[str, Any], by_rank: Sequence[Sent]) -> dict[str, int]:
    """Return the bytes of all ranks of one machine, in the phases of `host_memory.bytes_by_phase`, with rollouts alone,
    and while these are recorded."""
    config, shape = config_of(order, Path()), Shape(**order["shape"])
    declared, routing, sizes = load_requirements(config), routing_of(shape), lengths_of(shape)
    tokens = int(sizes.sum())
    columns, record = (
        column_bytes(config, declared),
        0 if routing is None else shape.layers * shape.topk * routing.dtype.itemsize,
    )
    whole = tokens * ((columns + FLOAT_BYTES) * (1 + ("critic" in declared.roles)) + record) * config.run.ppo_epochs
    moved = sum(sum(rank.by_update) for rank in by_rank) / whole
    # The first pass is the policy's, with replayed routing: tokens are sent there, and one value per token comes back.
    passed = sum(rank.by_forward[0] for rank in by_rank) / (tokens * (TOKEN_BYTES + FLOAT_BYTES + record))
    totals: dict[str, float] = {}
    for share, names in ((passed, ("forward",)), (moved, ("advantages", "cutting", "update"))):
        batch = BatchSize(tokens, len(sizes), int(sizes.max()), min(1.0, share))
        by_time = bytes_by_phase(config, declared, batch, routing)
        totals |= {name: sum(by_time[name].values()) for name in names if name in by_time}
    some = next(iter(bytes_by_phase(config, declared, batch, routing).values()))
    rollouts = some["rollouts"] + some["records of routing"]
    totals["recording"] = rollouts + tokens * columns + recording_bytes(config, batch, routing)
    return {"rollouts": round(rollouts)} | {name: round(amount) for name, amount in totals.items()}


def measured(by_rank: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Return the sum of each rank's peak at each of these moments."""
    names = {name for rank in by_rank for name in rank["held"]}
    return {name: sum(rank["held"].get(name, 0) for rank in by_rank) for name in sorted(names)}


def beside(order: Mapping[str, Any], by_rank: Sequence[Mapping[str, Any]]) -> dict[str, tuple[int, int]]:
    """Return planned and measured values: bytes by moment of a step, those that all ranks sent in the last step, and
    tokens of its micro-batches."""
    last = [rank["full"][-1] for rank in by_rank]
    paper = sent(order, last[0]["seed"])
    planned, counted = held(order, paper), measured(by_rank)
    pairs = {name: (amount, counted[name]) for name, amount in planned.items() if name in counted}
    pairs["sent"] = sum(rank.machine + rank.network for rank in paper), sum(step["posted"] for step in last)
    return pairs | {"computed": (sum(rank.computed for rank in paper), sum(step["computed"] for step in last))}
