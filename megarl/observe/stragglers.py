"""Which rank the others wait for, step after step: from how long each has worked in the phases that all share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

SLOW = 3.0
"""So many times as long as the others' median a rank must work in a phase to be named."""
LEAST_S = 0.2
"""And so many seconds longer."""
IN_A_ROW = 2
"""Steps in which it must do so, one after another: once may be a page from disk."""


def slowest(worked: Sequence[Mapping[str, float]]) -> tuple[int, str, float, float] | None:
    """The rank that has worked longest in comparison with the others, in which phase, for how many seconds, and the
    median of the others there; None where no phase has two ranks. worked: seconds by phase, of each rank."""
    found: tuple[float, tuple[int, str, float, float]] | None = None
    for phase in sorted({name for one in worked for name in one}):
        ranks = [rank for rank, one in enumerate(worked) if phase in one]
        if len(ranks) < 2:
            continue
        slow = max(ranks, key=lambda rank: worked[rank][phase])
        usual = median(worked[rank][phase] for rank in ranks if rank != slow)
        lost = worked[slow][phase] - usual
        if found is None or lost > found[0]:
            found = lost, (slow, phase, worked[slow][phase], usual)
    return found[1] if found else None


class Stragglers:
    """Names a rank that is slow for some steps, once, and says when it no longer is. nodes: of each rank, by name."""

    def __init__(self, nodes: Sequence[str]) -> None:
        self._nodes = nodes
        self._row: list[int] = []
        self._named = -1

    def look(self, step: int, worked: Sequence[Mapping[str, float]]) -> tuple[dict[str, float], str]:
        """The figures of a step, and a line where there is something to say; the same on all ranks."""
        found = slowest(worked)
        if found is None:
            return {}, ""
        rank, phase, seconds, usual = found
        ratio = seconds / max(usual, 1e-3)
        slow = ratio >= SLOW and seconds - usual >= LEAST_S
        self._row = [*self._row, rank][-IN_A_ROW:] if slow else []
        figures = {"perf/slowest_rank": float(rank), "perf/slowest_ratio": ratio}
        line = ""
        if len(self._row) == IN_A_ROW and set(self._row) == {rank} and rank != self._named:
            self._named = rank
            line = (
                f"step {step}: rank {rank} on node {self._nodes[rank]} is slow, and the others wait for it: "
                f"{seconds:.1f} s of work in {phase}, {ratio:.1f} times as much as the others' {usual:.1f} s"
            )
        elif not slow and self._named >= 0:
            line = f"step {step}: rank {self._named} on node {self._nodes[self._named]} is as fast as the others again"
            self._named = -1
        return figures, line
