"""Plays ranks of a job, each in a process forked from this one; writes a line of JSON for each.

argv: JSON of [configuration, rank] of each. `model.path` is a config.json. Ranks without a model play the weight sync
alone.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from megarl.config import Config, from_dict
from megarl.models.registry import load_hf_config
from megarl.observe.clock import Clock
from megarl.parallel.placement import placement_of
from megarl.rehearse import fake_job, play


def main() -> None:
    play.prepare()
    for settings, rank in json.loads(sys.argv[1]):
        child = os.fork()
        if not child:
            print(json.dumps(describe(from_dict(settings), rank)), flush=True)
            os._exit(0)
        if os.waitpid(child, 0)[1]:
            sys.exit(f"rank {rank} failed")


def describe(config: Config, rank: int) -> dict[str, Any]:
    from megarl.rehearse import engine_stand_in, rehearsed_engines, sync_order

    orders = Counter[str]()
    execute = engine_stand_in.EngineRank.execute

    def count_and_execute(self: Any, order: Any, bucket: Any) -> Any:
        answer = execute(self, order, bucket)
        orders[f"{'draft ' * order['draft']}{order['do']}{' failed' * ('error' in answer)}"] += 1
        return answer

    engine_stand_in.EngineRank.execute = count_and_execute  # type: ignore[method-assign]
    if rank in placement_of(config).ranks_of("actor"):
        played = play.play(config, rank)
        result = {"faults": played.faults, "nbytes": played.nbytes, "phases": played.peaks}
        runs = rehearsed_engines.sync_runs()
        runs = runs[: len(runs) // 2]  # of the first step; a second one follows
    else:
        result = play_engine_rank(config, rank)
        runs = rehearsed_engines.sync_runs()
    planned = [transfer for batch in sync_order.planned_batches(runs, rank) for transfer in batch]
    result["planned_sends"] = sum(transfer.nbytes for transfer in planned if transfer.is_send)
    result["planned_receives"] = sum(transfer.nbytes for transfer in planned if not transfer.is_send)
    return result | {"orders": orders}


def play_engine_rank(config: Config, rank: int) -> dict[str, Any]:
    job = fake_job.join(rank, config.parallel.world_size, config.parallel.ranks_per_node)
    from megarl.parallel import ranks
    from megarl.rehearse import rehearsed_engines, sync_order
    from megarl.rehearse.host_reads import HostReads
    from megarl.workers.context import Context

    context = Context(
        config=config,
        job=ranks._job(),
        hf_config=load_hf_config(config.model.path),
        chat=None,  # type: ignore[arg-type]
        clock=Clock(),
        run_dir=Path("/nonexistent"),
        num_updates={"actor": 1},
        role="rollout",
    )
    actor: Any = SimpleNamespace(synced_weights=lambda: nullcontext({}))
    with HostReads():
        engines = rehearsed_engines.RehearsedEngines(context)
        engines.wait_ready()
        engines.sync_weights(actor, version=1)
    assert engines.rank is not None
    faults = sync_order.check_record(job.events, rehearsed_engines.sync_runs(), rank)
    received = [transfer for batch in sync_order.recorded_batches(job.events) for transfer in batch]
    nbytes = engines.sizes() | {
        "sync_received": sum(transfer.nbytes for transfer in received if not transfer.is_send),
        "sync_sent": sum(transfer.nbytes for transfer in received if transfer.is_send),
        "written": engines.rank.written_bytes,
    }
    return {"faults": faults, "nbytes": nbytes}


if __name__ == "__main__":
    main()
