"""Cost of messages between ranks, for `bench.py scale`: the number of exchanges, and the time of one."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist

from megarl.parallel import collectives

TIMES, BYTES = 50, 1 << 26
_count = [0]


def count() -> None:
    """Start counting the exchanges in which values go from every rank to every rank."""
    original = collectives.all_gather_small

    def counted(*arguments: Any, **keywords: Any) -> Any:
        _count[0] += 1
        return original(*arguments, **keywords)

    collectives.all_gather_small = counted


def num_exchanges() -> int:
    """Return the number of exchanges in which this rank has taken part."""
    return _count[0]


def latency(group: dist.ProcessGroup) -> float:
    """Return the CPU seconds of a small exchange between this many ranks: those of a rank for its rounds, with one core
    per rank, and without network time."""
    small = torch.zeros(4)
    dist.barrier(group=group)
    start = time.process_time()
    for _ in range(TIMES):
        collectives.bruck_all_gather(small, group, 600.0)
    return (time.process_time() - start) / TIMES


def wire(group: dist.ProcessGroup) -> float:
    """Return seconds per byte from rank 0 to rank 1 by gloo, as to another machine; the minimum measured."""
    times = [0.0] if group.size() == 1 else []
    for _ in range(0 if times else 5):
        dist.barrier(group=group)
        start = time.perf_counter()
        if group.rank() == 0:
            dist.send(torch.ones(BYTES, dtype=torch.uint8), 1, group=group)
        elif group.rank() == 1:
            dist.recv(torch.empty(BYTES, dtype=torch.uint8), 0, group=group)
        dist.barrier(group=group)
        times.append(time.perf_counter() - start)
    return min(times) / BYTES
