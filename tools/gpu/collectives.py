"""NCCL on one GPU (gloo on the CPU): a world of one, and two processes on the same device."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from gpu.found import CheckResult, make_result
from megarl.parallel.device import SHARING_NCCL, sharing_variables
from megarl.utils.addresses import free_port

REFUSED = ("Duplicate GPU", "invalid usage")


def _run_rank(rank: int, world: int, device: str, port: int, results: Any) -> None:
    """Run each collective. Return a list of errors, or the text of the exception."""
    try:
        store = dist.TCPStore("127.0.0.1", port, world, rank == 0, timeout=timedelta(seconds=60))
        backend = "nccl" if device == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timedelta(seconds=60))
        results.put([name for name, is_correct in _check_collectives(rank, world, device) if not is_correct])
        dist.destroy_process_group()
    except Exception as error:  # whatever NCCL refuses is a result
        results.put(f"{type(error).__name__}: {' '.join(str(error).split())[:2000]}")


def _check_collectives(rank: int, world: int, device: str) -> list[tuple[str, bool]]:
    values = torch.full((1024 * world,), float(rank + 1), device=device)
    total = values.clone()
    dist.all_reduce(total)
    swapped = torch.empty_like(values)
    dist.all_to_all_single(swapped, values)
    received = values.clone()
    dist.broadcast(received, src=0)
    gathered = [torch.empty_like(values) for _ in range(world)]
    dist.all_gather(gathered, values)
    everyone = torch.arange(1, world + 1, device=device).float()
    return [
        ("all-reduce", bool((total == everyone.sum()).all())),
        ("all-to-all", torch.equal(swapped, everyone.repeat_interleave(1024))),
        ("broadcast", bool((received == 1).all())),
        ("all-gather", all(bool((part == number + 1).all()) for number, part in enumerate(gathered))),
    ]


def _world(world: int, device: str) -> list[Any]:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    context, port = mp.get_context("spawn"), free_port()
    queue = context.Queue()
    arguments = [(rank, world, device, port, queue) for rank in range(world)]
    processes = [context.Process(target=_run_rank, args=rank_arguments, daemon=True) for rank_arguments in arguments]
    for process in processes:
        process.start()
    rank_results = [queue.get(timeout=100) for _ in processes]
    for process in processes:
        process.join(timeout=10)
    return rank_results


def single_rank(device: str) -> CheckResult:
    (rank_result,) = _world(1, device)
    faults = [rank_result] if isinstance(rank_result, str) else [f"wrong: {name}" for name in rank_result]
    return make_result(faults, "all-reduce, all-to-all, broadcast and all-gather of a world of one")


def shared(device: str) -> CheckResult:
    """NCCL older than 2.30 may refuse two ranks on one GPU; the check is then that it raises and does not hang."""
    os.environ |= sharing_variables(2)  # for the two processes
    may_refuse = device == "cuda" and tuple(torch.cuda.nccl.version()) < SHARING_NCCL
    rank_results = _world(2, device)
    faults = []
    for rank_result in rank_results:
        if not isinstance(rank_result, str):
            faults += [f"wrong: {name}" for name in rank_result]
        elif may_refuse and any(text.lower() in rank_result.lower() for text in REFUSED):
            return CheckResult("passed", f"refused by this NCCL, which is older than 2.30: {rank_result[:160]}")
        else:
            faults.append(rank_result[:300])
    return make_result(faults, "all-reduce, all-to-all, broadcast and all-gather of two processes")
