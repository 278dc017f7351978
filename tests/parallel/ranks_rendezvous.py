"""Ranks that meet: what `initialize` says to whom before it returns, and two runs of one rank each at once."""

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from megarl.config import ParallelConfig
from megarl.parallel import ranks


def spoken() -> list[list[int]]:
    """The ranks of each collective on the device, in order, that `initialize` runs."""
    actual: list[list[int]] = []
    all_reduce = dist.all_reduce

    def record(tensor: torch.Tensor, *args: object, group: dist.ProcessGroup | None = None) -> None:
        all_reduce(tensor, group=group)
        actual.append(dist.get_process_group_ranks(group or dist.group.WORLD))

    dist.all_reduce = record
    ranks.initialize(ParallelConfig(world_size=4, pp=2))
    ranks.create_layout(ParallelConfig(world_size=4, pp=4))  # as a critic's own
    return actual


def alone(folder: Path) -> str:
    """The port of a run of one rank, once another has its own, too."""
    me = os.environ["RANK"]
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        del os.environ[name]
    ranks.initialize(ParallelConfig())
    (folder / me).touch()
    while len(list(folder.iterdir())) < 2:
        time.sleep(0.05)
    dist.all_reduce(torch.ones(1))
    return me


result = alone(Path(sys.argv[2])) if sys.argv[1] == "alone" else spoken()
print("RESULT", json.dumps({"found": result}))
ranks.shutdown()
