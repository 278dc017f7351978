"""Record the collectives that `initialize` runs, or run two jobs of one rank each at once."""

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from megarl.config import ParallelConfig
from megarl.parallel import ranks


def warm_up_groups() -> list[list[int]]:
    """Return the ranks of each device collective that `initialize` and `create_layout` run, in order."""
    groups: list[list[int]] = []
    all_reduce = dist.all_reduce

    def record(tensor: torch.Tensor, *args: object, group: dist.ProcessGroup | None = None) -> None:
        all_reduce(tensor, group=group)
        groups.append(dist.get_process_group_ranks(group or dist.group.WORLD))

    dist.all_reduce = record
    ranks.initialize(ParallelConfig(world_size=4, pp=2))
    ranks.create_layout(ParallelConfig(world_size=4, pp=4))  # like a critic in a layout of its own
    return groups


def single_rank_run(folder: Path) -> str:
    """Run a collective in a job of one rank while another such job has its own store."""
    rank = os.environ["RANK"]
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        del os.environ[name]
    ranks.initialize(ParallelConfig())
    (folder / rank).touch()
    while len(list(folder.iterdir())) < 2:
        time.sleep(0.05)
    dist.all_reduce(torch.ones(1))
    return rank


result = single_rank_run(Path(sys.argv[2])) if sys.argv[1] == "alone" else warm_up_groups()
print("RESULT", json.dumps({"result": result}))
ranks.shutdown()
