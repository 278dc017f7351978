"""Throughput in FLOP/s and MFU per role, and GPU utilization."""

from __future__ import annotations

import statistics
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from megarl.models.flops import Flops

SAMPLE_INTERVAL_S = 2.0
"""Interval between GPU samples."""


@dataclass
class RoleFlops:
    """FLOPs of a role's model in the current step, summed over its ranks, as counted by `models.flops`.

    Args:
        phase: phase in which the model is updated or, if it is not trained, queried.
        num_ranks: ranks that hold the model.
        first_rank: first of these ranks; its clock measures `phase`.
    """

    name: str
    flops: Flops
    phase: str = ""
    num_ranks: int = 1
    first_rank: int = 0
    is_trained: bool = True
    forward_flops: float = 0.0
    update_flops: float = 0.0
    tokens: int = 0
    shared_tokens: int = 0

    def add_forward(self, lengths: Sequence[int], shared: Sequence[int] = ()) -> None:
        """Count a forward pass over sequences of these lengths, of which `shared` first tokens are not computed."""
        self.forward_flops += self.flops.forward(lengths) - self.flops.forward(shared)

    def add_update(self, lengths: Sequence[int], shared: Sequence[int] = ()) -> None:
        """Count a forward and backward pass over sequences of these lengths, without their `shared` first tokens."""
        self.update_flops += self.flops.forward(lengths) + self.flops.backward(lengths)
        self.update_flops -= self.flops.forward(shared) + self.flops.backward(shared)
        self.tokens, self.shared_tokens = self.tokens + sum(lengths), self.shared_tokens + sum(shared)


def select_remote_clocks(roles: Iterable[RoleFlops]) -> dict[int, list[str]]:
    """Return the ranks other than 0 whose clocks `compute_throughput` reads, with those phases.

    Ascending by rank, and identical on all ranks.
    """
    phases_by_rank: dict[int, list[str]] = {}
    for role in roles:
        if role.first_rank:
            phases_by_rank.setdefault(role.first_rank, []).append(f"time/{role.phase}")
    return dict(sorted(phases_by_rank.items()))


def compute_throughput(
    roles: Iterable[RoleFlops],
    times: Mapping[str, float],
    world: int,
    peak: float | None,
    remote_times: Mapping[int, Mapping[str, float]] = MappingProxyType({}),
) -> dict[str, float]:
    """Return the throughput metrics of a step and reset the counters in `roles`.

    `perf/tflops_per_gpu` counts everything that models computed on Megatron, over the whole step and all ranks: how
    much of the machine training had. `perf/<role>_tflops_per_gpu` counts a role's updates (its forward passes if it is
    not trained) over their own time and ranks: how well training used the machine. With `peak`, `perf/mfu` and
    `perf/<role>_mfu` are the same as a fraction of it. Computation in engines is not counted.
    `perf/<role>_shared_tokens` is the share of tokens that updates did not compute, as another sequence has them, too.

    Args:
        times: seconds by `time/<phase>` of this rank's clock.
        world: number of ranks.
        peak: peak FLOP/s of a GPU; None if unknown.
        remote_times: the same of other ranks' clocks, for roles whose `first_rank` they are.
    """
    rates: dict[str, float] = {}
    shares: dict[str, float] = {}
    total_flops = 0.0
    for role in roles:
        total_flops += role.forward_flops + role.update_flops
        role_flops = role.update_flops if role.is_trained else role.forward_flops
        seconds = remote_times.get(role.first_rank, times).get(f"time/{role.phase}", 0.0)
        if role_flops and seconds > 0:
            rates[f"{role.name}_"] = role_flops / seconds / role.num_ranks
        if role.shared_tokens:
            shares[f"perf/{role.name}_shared_tokens"] = role.shared_tokens / role.tokens
        role.forward_flops = role.update_flops = 0.0
        role.tokens = role.shared_tokens = 0
    if total_flops and times.get("time/step", 0.0) > 0:
        rates[""] = total_flops / times["time/step"] / world
    metrics = shares | {f"perf/{prefix}tflops_per_gpu": rate / 1e12 for prefix, rate in rates.items()}
    if peak:
        metrics |= {f"perf/{prefix}mfu": rate / peak for prefix, rate in rates.items()}
    return metrics


class GpuMonitor:
    """Samples this rank's GPU every `SAMPLE_INTERVAL_S` seconds in a background thread.

    Args:
        read_usage: returns recent utilization in [0, 1] and bytes of memory in use by any process, or None if
            unavailable, which stops the sampling.
    """

    def __init__(self, read_usage: Callable[[], tuple[float, int] | None]) -> None:
        self._read_usage = read_usage
        self._samples: list[tuple[float, int]] = []
        self._closing = threading.Event()
        self._lock = threading.Lock()
        threading.Thread(target=self._watch, name="gpu", daemon=True).start()

    def metrics(self) -> dict[str, float]:
        """Return mean utilization and peak memory, including that of other processes, since the last call."""
        with self._lock:
            samples, self._samples = self._samples, []
        if not samples:
            return {}
        utilization, memory = zip(*samples, strict=True)
        return {"perf/gpu_utilization": statistics.fmean(utilization), "perf/gpu_memory_gib": max(memory) / 2**30}

    def close(self) -> None:
        self._closing.set()

    def _watch(self) -> None:
        while (usage := self._read_usage()) is not None:
            with self._lock:
                self._samples.append(usage)
            if self._closing.wait(SAMPLE_INTERVAL_S):
                return
