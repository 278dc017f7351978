"""Two ranks claim 200 groups from one queue at the same time, complete them, and exchange one returned group each."""

from __future__ import annotations

import json

from megarl.config import ParallelConfig
from megarl.parallel import ranks
from megarl.parallel.kv_store import KVStore
from megarl.rollout.group_queue import GroupQueue


def main() -> None:
    job = ranks.initialize(ParallelConfig(world_size=2)).job
    queue = GroupQueue(200, job.world, KVStore(), "step")
    claimed, completion_order = [], []
    while (number := queue.claim()) is not None:
        claimed.append(number)
        completion_order.append(place := queue.next_place(0))
        queue.mark_complete(0, place)
    queue.return_group(b"abc" if job.rank else bytes(9 << 20))
    ranks.barrier()
    returned = queue.claim_returned()
    ranks.barrier()
    result = {
        "claimed": claimed,
        "completion_order": completion_order,
        "finished": sum(queue.is_complete(0, place) for place in range(200)),
        "unclaimed": queue.count_unclaimed(),
        "returned": [len(returned)],
    }
    print("RESULT", json.dumps(result), flush=True)
    ranks.shutdown()


if __name__ == "__main__":
    main()
