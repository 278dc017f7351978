"""Engines in a rehearsal: the real `Engines` and `WeightSync`, with processes that stand in for engines."""

from __future__ import annotations

import dataclasses

from megarl.rehearse import engine_stand_in
from megarl.rehearse.engine_stand_in import EngineRank
from megarl.rehearse.sync_order import SyncRun
from megarl.reshard.plan.layout import engine_tensors
from megarl.workers.actor import ActorWorker
from megarl.workers.context import Context
from megarl.workers.engines import Engines
from megarl.workers.weight_sync import WeightSync

_runs: list[SyncRun] = []


def sync_runs() -> list[SyncRun]:
    """Return the passes of all weight syncs of this process."""
    return list(_runs)


def make_engine_rank(sync: WeightSync) -> EngineRank | None:
    """Return the engine rank that a weight sync expects on this rank's device; None if it expects none."""
    if sync.engine_rank is None:
        return None
    layout, wire = sync.plan.engine, sync.plan.assignment.wire
    position = sync.engine_rank % layout.tp
    rows = {
        draft: [param for param in sync.params if param.slot and param.slot.is_draft == draft]
        for draft in ((False, True) if layout.draft else (False,))
    }
    return EngineRank({draft: engine_tensors(rows[draft], layout, position, sync.num_experts, wire) for draft in rows})


class RehearsedEngines:
    """The engines of a role in a rehearsal. Methods are collective as those of `Engines`, which they call."""

    def __init__(self, context: Context) -> None:
        config = engine_stand_in.with_stand_ins(context.config)
        self.engines = Engines(dataclasses.replace(context, config=config))
        sync = self.engines.weight_sync
        self.rank = None if sync is None else make_engine_rank(sync)
        """The engine's process on this rank, if any."""

    def wait_ready(self) -> None:
        with engine_stand_in.activate(self.rank):
            self.engines.wait_ready()

    def sync_weights(self, actor: ActorWorker, version: int) -> None:
        """Sync the actor's weights as `RolloutWorker.update_weights` does."""
        sync = self.engines.weight_sync
        if sync is None:
            return
        with engine_stand_in.activate(self.rank):
            self.engines.sync_weights(actor, version)
        if sync.adapter_executor is not None:
            _runs.append(SyncRun(sync.adapter_executor.plan))
        if sync.weight_executor is not None:  # beside adapters, it compares
            _runs.append(SyncRun(sync.plan, only_hashes=sync.adapter_executor is not None))

    def sizes(self) -> dict[str, int]:
        """Return bytes on this rank: of the engine's weights, and of the weight sync's send and receive buffers."""
        result = {"engine_weights": self.rank.nbytes if self.rank else 0}
        sync = self.engines.weight_sync
        executors = [] if sync is None else [sync.weight_executor, sync.adapter_executor]
        for name in ("send", "receive"):
            buffers = [getattr(executor, f"{name}_bytes") for executor in executors if executor is not None]
            result[f"sync_{name}_buffers"] = 2 * max(buffers, default=0)
        return result
