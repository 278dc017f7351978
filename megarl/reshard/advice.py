"""Which split of the layers over the pipeline stages keeps the busiest stage of a push as idle as can be.

What one stage alone holds only its GPUs can send, so the stage with most to send sets the pace. A push looks only at
bytes: whether the stages also compute equally long is for the reader to judge.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megarl.models.cuts import HFConfig
from megarl.reshard.bound import Columns, Wire, members, whole
from megarl.reshard.layout import EngineLayout, TrainLayout
from megarl.reshard.sides import sides_of

SLACK = 1.002  # a more even split is preferred to one that is better by less


@dataclass(frozen=True)
class Advice:
    """Layers of each stage, and bytes that each GPU of the busiest stage has to send, as it is and as it would be."""

    now: tuple[int, ...]
    better: tuple[int, ...]
    bytes_now: float
    bytes_better: float

    @property
    def gain(self) -> float:
        return 1 - self.bytes_better / self.bytes_now if self.bytes_now else 0.0


def better_split(
    hf: HFConfig, train: TrainLayout, engine: EngineLayout, ranks_per_node: int, wire: Wire = "bf16"
) -> Advice:
    """The best of all splits into consecutive layers, at least one on each stage. Bytes are those that leave the node;
    where there is one node, those that leave the GPU."""
    model = members(hf, train, engine, wire)
    sides = sides_of(train, engine, ranks_per_node)
    known: dict[tuple[int, int], float] = {}

    def cost(columns: Columns, stage: int) -> float:
        """What each GPU of the stage has to send of a layer if it is there."""
        key = id(columns), stage
        if key not in known:
            size = sides.here if sides.here < sides.world else 1
            holds, needs = (
                np.array(matrix.reshape(-1, size, len(columns.weight)).any(1))
                for matrix in whole(columns, stage, train, engine, sides)
            )
            known[key] = float((columns.weight * (needs & ~holds).sum(0)).sum() / train.stage_ranks)
        return known[key]

    fixed = [sum(cost(m.columns, m.stage) for m in model if m.layer is None and m.stage == s) for s in range(train.pp)]
    layers = [member.columns for member in model if member.layer is not None]
    loads = [fixed[s] + sum(cost(layers[layer], s) for layer in held) for s, held in enumerate(train.stages)]
    # sums[s][i]: of the first i layers, were they on stage s
    sums = np.array([np.cumsum([0.0, *(cost(columns, s) for columns in layers)]) for s in range(train.pp)])
    counts = tuple(len(held) for held in train.stages)
    if len(layers) < train.pp:
        return Advice(counts, counts, max(loads), max(loads))
    lowest = max(_loads(_best(fixed, sums, None), fixed, sums))
    better = _best(fixed, sums, lowest * SLACK)
    return Advice(counts, better, max(loads), max(_loads(better, fixed, sums)))


def _loads(counts: tuple[int, ...], fixed: list[float], sums: np.ndarray) -> list[float]:
    edges = np.cumsum([0, *counts])
    return [float(fixed[s] + sums[s][edges[s + 1]] - sums[s][edges[s]]) for s in range(len(counts))]


def _best(fixed: list[float], sums: np.ndarray, limit: float | None) -> tuple[int, ...]:
    """The split whose busiest stage has least; with a limit for that, the most even one in layers that keeps to it."""
    stages, layers = len(sums), len(sums[0]) - 1
    value = np.full((stages + 1, layers + 1), np.inf)
    came = np.zeros((stages + 1, layers + 1), dtype=int)
    value[0, 0] = 0.0
    for s in range(stages):
        for stop in range(s + 1, layers - (stages - s - 1) + 1):
            start = np.arange(s, stop)
            load = fixed[s] + sums[s][stop] - sums[s][start]
            if limit is None:
                total = np.maximum(value[s, start], load)
            else:
                total = np.where(load <= limit, value[s, start] + (stop - start) ** 2, np.inf)
            came[s + 1, stop] = start[total.argmin()]
            value[s + 1, stop] = total.min()
    counts: list[int] = []
    stop = layers
    for s in range(stages, 0, -1):
        counts.insert(0, stop - int(came[s, stop]))
        stop = int(came[s, stop])
    return tuple(counts)
