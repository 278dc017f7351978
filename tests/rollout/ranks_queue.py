"""Tickets of 200 groups, taken by two ranks at the same time; each says which it got, and that it has finished them.
Each gives one back and takes one."""

from __future__ import annotations

import json

from megarl.config import ParallelConfig
from megarl.parallel import ranks
from megarl.parallel.kv_store import KVStore
from megarl.rollout.group_queue import GroupQueue


def main() -> None:
    job = ranks.initialize(ParallelConfig(world_size=2)).job
    tickets = GroupQueue(200, job.world, KVStore(), "step")
    got, places = [], []
    while (number := tickets.claim()) is not None:
        got.append(number)
        places.append(tickets.mark_complete())
    tickets.return_group(b"abc" if job.rank else bytes(9 << 20))
    ranks.barrier()
    back = tickets.claim_returned()
    ranks.barrier()
    result = {
        "got": got,
        "places": places,
        "finished": tickets.count_complete(),
        "left": tickets.count_unclaimed(),
        "back": [len(back)],
    }
    print("RESULT", json.dumps(result), flush=True)
    ranks.shutdown()


if __name__ == "__main__":
    main()
