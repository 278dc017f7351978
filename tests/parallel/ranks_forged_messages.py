"""Ranks meet in a TCP store, into which another process writes forged messages."""

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megarl.config import ParallelConfig
from megarl.parallel import kv_store, ranks
from megarl.parallel.job_secret import ForgedError
from megarl.parallel.kv_store import KVStore
from megarl.rollout.group_queue import GroupQueue

executed = Path(sys.argv[1], "harm")
ATTACKER = """
import os, sys, torch.distributed as dist
store = dist.TCPStore("127.0.0.1", int(sys.argv[1]), is_master=False, wait_for_workers=False)
ticket = bytes.fromhex(sys.argv[2])
for prefix in ("0//", "default_pg//", "default_pg/", ""):
    for name in ("back/0", "back/1", "back/2"):
        store.set(f"{prefix}groups/{name}/0", ticket)
        store.set(f"{prefix}groups/{name}", "1" if name != "back/2" else str(1 << 40))
    store.add(f"{prefix}groups/back", 3)
    for place in range(3):
        store.add(f"{prefix}groups/there/{place}", 1)
    store.set(f"{prefix}megarl/last words", "rank 7: forged")
"""


class CreatesFolder:
    """Creates a folder when it is unpickled."""

    def __reduce__(self) -> Any:
        return os.mkdir, (str(executed),)


def is_forged(value: Any) -> bool:
    try:
        value()
    except ForgedError:
        return True
    return False


ranks.initialize(ParallelConfig(world_size=2))
if dist.get_rank() == 0:
    environment = {name: text for name, text in os.environ.items() if name != "MEGARL_SECRET"}
    forged = pickle.dumps(CreatesFolder()).hex()
    subprocess.run([sys.executable, "-c", ATTACKER, os.environ["MASTER_PORT"], forged], env=environment, check=True)
ranks.barrier()
group_queue = GroupQueue(4, 2, KVStore(), "groups")
result = {
    "prefix": dist.distributed_c10d._get_default_store().check(["groups/back", "megarl/last words"]),
    "refused_tickets": [is_forged(group_queue.claim_returned) for _ in range(3)] if dist.get_rank() == 0 else [],
    "root_cause": kv_store.exchange_root_cause(RuntimeError("gloo"), "lost"),
}
ranks.barrier()
if dist.get_rank() == 0:
    group_queue.return_group({"group": (1, 2)})
ranks.barrier()
result["returned"] = group_queue.claim_returned() if dist.get_rank() == 1 else None
result["harm"] = executed.exists()
ranks.barrier()
print("RESULT", json.dumps(result))
ranks.shutdown()
