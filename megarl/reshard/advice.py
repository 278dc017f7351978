"""Which split of the layers over the pipeline stages keeps the busiest stage of a push as idle as can be.

What one stage alone holds only its GPUs can send, so the stage with most to send sets the pace. A push looks only at
bytes: whether the stages also compute equally long is for the reader to judge.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from megarl.models.cuts import HFConfig
from megarl.models.stages import stage_layers
from megarl.reshard.bound import Columns, members, whole
from megarl.reshard.flows import Wire
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
    hf: HFConfig, train: TrainLayout, engine: EngineLayout, ranks_per_node: int, wire: Wire = "bf16", vpp: int = 1
) -> Advice:
    """The best of all splits that a run can have: numbers of their own on the first and the last stage, equal ones in
    between, and at least one layer on each, or one for each of the stage's `vpp` parts. Bytes are those that leave the
    node; where there is one node, those that leave the GPU."""
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
    costs = np.array([[cost(columns, s) for columns in layers] for s in range(train.pp)])

    def busiest(stages: Sequence[Sequence[int]]) -> float:
        return max(fixed[s] + float(costs[s, list(held)].sum()) for s, held in enumerate(stages))

    now = tuple(len(held) for held in train.stages)
    found = {now: busiest(train.stages)}
    for counts in splits(len(layers), train.pp, vpp):
        ends = {"num_layers_in_first_pipeline_stage": counts[0], "num_layers_in_last_pipeline_stage": counts[-1]}
        found[counts] = busiest(stage_layers(len(layers), train.pp, ends if train.pp > 1 else {}, vpp))
    limit = min(found.values()) * SLACK
    better = min((sum(count**2 for count in counts), load, counts) for counts, load in found.items() if load <= limit)
    return Advice(now, better[2], found[now], better[1])


def splits(layers: int, pp: int, vpp: int = 1) -> Iterator[tuple[int, ...]]:
    """Numbers of layers of the stages, in all ways that a run can have them."""
    if pp == 1:
        yield (layers,)
        return
    for middle in range(vpp, layers, vpp) if pp > 2 else (0,):
        ends = layers - middle * (pp - 2)
        for first in range(vpp, ends - vpp + 1, vpp):
            if (ends - first) % vpp == 0:
                yield (first, *[middle] * (pp - 2), ends - first)
