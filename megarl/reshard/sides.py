"""The two sides of a push among the job's ranks: the trainer's and the engines', the same, others, or some of both."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megarl.config import ConfigError
from megarl.reshard.layout import EngineLayout, TrainLayout

Ints = NDArray[np.int64]


class Sides(NamedTuple):
    """world: ranks that a plan counts, whole nodes of `here`: rank r is on node r // here. Later ranks take no part.

    train [ranks of the trainer]: the job's number of each of its own ranks. engine [ranks of all engines]: likewise,
    one engine behind the other.
    """

    world: int
    here: int
    train: Ints
    engine: Ints

    def engine_rank(self, rank: int) -> int | None:
        """Which of the ranks of all engines a rank of the job is; None where it is none."""
        found = np.flatnonzero(self.engine == rank)
        return int(found[0]) if len(found) else None

    @property
    def taking_part(self) -> list[int]:
        """The ranks of either side, rising."""
        return [int(rank) for rank in np.union1d(self.train, self.engine)]

    @property
    def alike(self) -> bool:
        """Whether both are the same ranks, in the same order."""
        return np.array_equal(self.train, self.engine)


def sides_of(train: TrainLayout, engine: EngineLayout, ranks_per_node: int) -> Sides:
    """Raises ConfigError where engines do not divide their ranks, or all the job's ranks are not whole nodes."""
    own = np.array(train.ranks or range(train.world), dtype=np.int64)
    theirs = np.array(engine.ranks, dtype=np.int64) if engine.ranks else own
    if len(theirs) % engine.tp:
        of = "engines" if engine.ranks or train.ranks else "job"
        raise ConfigError(f"the engine's tp={engine.tp} does not divide the {len(theirs)} ranks of the {of}")
    world = int(max(own.max(), theirs.max())) + 1
    here = min(ranks_per_node, world)
    if world % here:
        if not (train.ranks or engine.ranks):
            raise ConfigError(f"{world} ranks are not whole nodes of {ranks_per_node}")
        world = -(-world // here) * here  # the others of the last node have other roles
    return Sides(world, here, own, theirs)
