"""How fast the models of a run compute, in operations of their own shapes, and how busy the GPU is."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from megarl.models.flops import Flops

SAMPLE_INTERVAL_S = 2.0
"""Between two looks at the GPU."""


@dataclass
class RoleFlops:
    """What the model of the role `name` has computed in the step so far, of all its ranks together, in operations of
    `models.flops`. phase: the one in which it is updated, or, where it is not trained, asked. ranks: how many have it.
    first: the first of these; its clock knows how long the role took, wherever that is read."""

    name: str
    flops: Flops
    phase: str = ""
    num_ranks: int = 1
    first_rank: int = 0
    is_trained: bool = True
    forward_flops: float = 0.0
    update_flops: float = 0.0

    def add_forward(self, lengths: Iterable[int]) -> None:
        """It was asked what it says of sequences of so many tokens."""
        self.forward_flops += self.flops.forward(lengths)

    def add_update(self, lengths: Iterable[int]) -> None:
        """It was updated by these."""
        known = list(lengths)
        self.update_flops += self.flops.forward(known) + self.flops.backward(known)


def select_remote_clocks(works: Iterable[RoleFlops]) -> dict[int, list[str]]:
    """Other ranks than 0 whose clocks `speed` reads, ascending, and what it reads of them; the same on all ranks."""
    found: dict[int, list[str]] = {}
    for work in works:
        if work.first_rank:
            found.setdefault(work.first_rank, []).append(f"time/{work.phase}")
    return dict(sorted(found.items()))


PhaseTimes = Mapping[str, float]
"""Of a clock: seconds of a step by `time/<phase>`."""


def compute_throughput(
    works: Iterable[RoleFlops],
    times: PhaseTimes,
    world: int,
    peak: float | None,
    elsewhere: Mapping[int, PhaseTimes] = MappingProxyType({}),
) -> dict[str, float]:
    """Of a step, whose figures begin anew: `perf/tflops_per_gpu` of all that models have computed on Megatron over the
    whole step and all ranks, and `perf/<role>_tflops_per_gpu` of the role's updates over their time and its ranks, of a
    role that is not trained of what it was asked; with `peak`, what a GPU can do in a second, the same as shares of it,
    `perf/mfu` and `perf/<role>_mfu`.

    times: of the clock here. elsewhere: of the clocks of other ranks, by rank, which hold for the roles that begin on
    them. What engines compute is in none of them, so that the first two say how much of the machine training had, and
    the others how well it used it.
    """
    rates: dict[str, float] = {}
    whole = 0.0
    for work in works:
        whole += work.forward_flops + work.update_flops
        done = work.update_flops if work.is_trained else work.forward_flops
        seconds = elsewhere.get(work.first_rank, times).get(f"time/{work.phase}", 0.0)
        if done and seconds > 0:
            rates[f"{work.name}_"] = done / seconds / work.num_ranks
        work.forward_flops = work.update_flops = 0.0
    if whole and times.get("time/step", 0.0) > 0:
        rates[""] = whole / times["time/step"] / world
    figures = {f"perf/{who}tflops_per_gpu": rate / 1e12 for who, rate in rates.items()}
    if peak:
        figures |= {f"perf/{who}mfu": rate / peak for who, rate in rates.items()}
    return figures


class GpuMonitor:
    """Looks at this rank's GPU every two seconds. look: the share of time it was at work lately, and bytes of its
    memory that are taken, by whatever process; None where that cannot be known, and then it is not asked again."""

    def __init__(self, look: Callable[[], tuple[float, int] | None]) -> None:
        self._read_usage = look
        self._samples: list[tuple[float, int]] = []
        self._closing = threading.Event()
        self._lock = threading.Lock()
        if self._sample():
            threading.Thread(target=self._watch, name="gpu", daemon=True).start()

    def metrics(self) -> dict[str, float]:
        """Since the last call: `perf/gpu_utilization`, the mean share of time in which it was at work, and
        `perf/gpu_memory_gib`, the most memory taken on it, the engine's and others' included."""
        with self._lock:
            seen, self._samples = self._samples, []
        if not seen:
            return {}
        return {
            "perf/gpu_utilization": sum(busy for busy, _ in seen) / len(seen),
            "perf/gpu_memory_gib": max(taken for _, taken in seen) / 2**30,
        }

    def close(self) -> None:
        self._closing.set()

    def _watch(self) -> None:
        while not self._closing.wait(SAMPLE_INTERVAL_S) and self._sample():
            pass

    def _sample(self) -> bool:
        found = self._read_usage()
        if found is not None:
            with self._lock:
                self._samples.append(found)
        return found is not None
