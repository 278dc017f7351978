"""What messages between ranks cost, for `bench_scale.py`: how many exchanges there are, and how long one takes."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist

from megarl.parallel import collectives

TIMES, BYTES = 50, 1 << 26
_taken = [0]


def count() -> None:
    """From now on, the exchanges in which figures go from every rank to every rank."""
    around = collectives.all_gather_small

    def counted(*arguments: Any, **named: Any) -> Any:
        _taken[0] += 1
        return around(*arguments, **named)

    collectives.all_gather_small = counted


def taken_part() -> int:
    """In how many of them this rank has taken part."""
    return _taken[0]


def latency(group: dist.ProcessGroup) -> float:
    """Seconds of a processor for one that says little, as many ranks do it: of a rank for its rounds, where each has a
    processor, and without what a wire takes."""
    small = torch.zeros(4)
    dist.barrier(group=group)
    begun = time.process_time()
    for _ in range(TIMES):
        collectives.bruck_all_gather(small, group, 600.0)
    return (time.process_time() - begun) / TIMES


def wire(group: dist.ProcessGroup) -> float:
    """Seconds a byte from rank 0 to rank 1 by gloo, as to another machine; the least that was seen."""
    found = [0.0] if group.size() == 1 else []
    for _ in range(0 if found else 5):
        dist.barrier(group=group)
        begun = time.perf_counter()
        if group.rank() == 0:
            dist.send(torch.ones(BYTES, dtype=torch.uint8), 1, group=group)
        elif group.rank() == 1:
            dist.recv(torch.empty(BYTES, dtype=torch.uint8), 0, group=group)
        dist.barrier(group=group)
        found.append(time.perf_counter() - begun)
    return min(found) / BYTES
