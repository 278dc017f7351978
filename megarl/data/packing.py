"""Which sequence goes to which data-parallel rank and into which micro-batch. Pure: numbers in, lists out.

Plans are the same on every rank, because every rank computes them from the same lengths.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt

from megarl.data.partition import partition, partition_near_home

COUNT_STEPS = 64  # the number of micro-batches is found to one in so many
MAX_SLOWDOWN = 1.015  # by so much a plan may take longer so that sequences stay where they are, see `homes`


def plan_micro_batches(
    lengths: npt.ArrayLike,
    dp: int,
    token_budget: int,
    quadratic: float = 0.0,
    multiple: int = 1,
    together: npt.ArrayLike | None = None,
    home: npt.ArrayLike | None = None,
) -> list[list[list[int]]]:
    """Share out sequences over `dp` ranks and into micro-batches of at most `token_budget` tokens.

    lengths: [sequences] whole numbers, at least 1: a list, an array or a tensor of the host.
    quadratic: a sequence of n tokens is taken to cost n + quadratic * n^2, see `models.flops.quadratic_cost`. Micro-
    batches cost about the same, those that ranks compute at the same time most of all, and so do whole ranks.
    together: a number for each sequence; those of the same number are not parted. Everything below that is said of a
    sequence is then said of all that have one number.
    home: for each sequence the rank of the `dp` that has it already, below 0 where none has. Most stay there, and those
    move that the balance needs. There are as many micro-batches as without homes, and neither the busiest rank nor the
    slowest micro-batches, one after another, take more than SLACK times as long; else the plan is that without homes.

    Returns `plan[rank][micro_batch] -> sequence indices`, ascending within a micro-batch. Every rank gets the same
    number of micro-batches, a multiple of `multiple`, because a collective of expert or pipeline parallelism needs all
    its ranks; a rank that has less to do gets empty ones. A sequence longer than the budget is a micro-batch of its
    own. The most expensive micro-batches come first.

    The last plans are remembered, because the models of a step ask for the same one: a plan is the caller's own copy.
    """
    if dp < 1 or token_budget < 1:
        raise ValueError(f"dp and token_budget must be at least 1, not {dp} and {token_budget}")
    sizes = _as_int64(lengths, "lengths")
    if (short := np.flatnonzero(sizes < 1)).size:
        raise ValueError(f"sequence {short[0]} has {sizes[short[0]]} tokens; a sequence has at least one")
    numbers = None if together is None else _as_int64(together, "together")
    if numbers is not None and len(numbers) != len(sizes):
        raise ValueError(f"`together` has {len(numbers)} numbers for {len(sizes)} sequences")
    homes = None if home is None else _as_int64(home, "home")
    if homes is not None and (len(homes) != len(sizes) or homes.max(initial=-1) >= dp):
        raise ValueError(f"`home` has {len(homes)} numbers below {dp} for {len(sizes)} sequences")
    if homes is not None and (dp == 1 or homes.max(initial=-1) < 0):
        homes = None
    marks, places = (None if found is None else found.tobytes() for found in (numbers, homes))
    plan = _cached_plan(sizes.tobytes(), dp, token_budget, float(quadratic), multiple, marks, places)
    return [[list(micro) for micro in rank] for rank in plan]


def _as_int64(values: npt.ArrayLike, name: str) -> np.ndarray:
    array = np.asarray(values)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise ValueError(f"`{name}` must be a row of whole numbers, not {array.dtype} of shape {list(array.shape)}")
    return array.astype(np.int64)


@lru_cache(maxsize=8)  # a step's whole batch and its mini-batches, and those of a second layout
def _cached_plan(
    sizes: bytes, dp: int, budget: int, quadratic: float, multiple: int, together: bytes | None, home: bytes | None
) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """`plan_micro_batches`, of the bytes of int64 arrays."""
    tokens = np.frombuffer(sizes, dtype=np.int64)
    costs = tokens + quadratic * tokens**2
    unit = np.arange(len(tokens))  # what is not parted, by its first sequence
    if together is not None:
        _, first, number = np.unique(np.frombuffer(together, dtype=np.int64), return_index=True, return_inverse=True)
        unit = np.argsort(np.argsort(first))[number]
    units = int(unit.max(initial=-1)) + 1
    unit_costs = np.bincount(unit, weights=costs, minlength=units)
    unit_tokens = np.bincount(unit, weights=tokens, minlength=units).astype(np.int64)

    def fits(owner: np.ndarray) -> bool:
        held = np.bincount(owner, weights=unit_tokens, minlength=dp * count)
        return not np.any((held > budget) & (np.bincount(owner, minlength=dp * count) > 1))

    count = max(1, -(-min_micro_batches(unit_tokens, budget) // (dp * multiple))) * multiple
    while not fits(owner := partition(unit_costs, dp * count)):
        # Ends at the latest when each has a micro-batch of its own.
        count += max(1, count // (COUNT_STEPS * multiple)) * multiple

    parts = _members(owner, dp * count)
    part_costs, first = _costs(unit_costs, parts), _first(parts)
    table = _deal_to_ranks(part_costs, first, dp)
    if home is not None:
        holder = _home_ranks(unit, tokens, np.frombuffer(home, dtype=np.int64), dp)
        for kept in filter(fits, partition_near_home(unit_costs, unit_tokens, budget, holder, dp, count)):
            kept_parts = _members(kept, dp * count)
            kept_costs, first = _costs(unit_costs, kept_parts), _first(kept_parts)
            order = np.lexsort((first, -kept_costs, np.arange(dp * count) // count)).reshape(dp, count)
            if np.all(_plan_times(kept_costs, order) <= MAX_SLOWDOWN * _plan_times(part_costs, table)):
                owner, table = kept, order
                break
    sequences = _members(owner[unit], dp * count)
    return tuple(tuple(tuple(sequences[part].tolist()) for part in rank) for rank in table.tolist())


def _deal_to_ranks(costs: np.ndarray, first: np.ndarray, dp: int) -> np.ndarray:
    """[dp, times]: micro-batches to ranks, the most expensive ones first, and of these the most expensive to the rank
    that has least to do."""
    table, loads = [], np.zeros(dp)
    for at_once in np.lexsort((first, -costs)).reshape(-1, dp):
        idlest = np.argsort(loads, kind="stable")
        loads[idlest] += costs[at_once]
        table.append(at_once[np.argsort(idlest)])
    return np.stack(table, axis=1)


def _plan_times(costs: np.ndarray, table: np.ndarray) -> np.ndarray:
    """What a plan costs where ranks wait for each other at its end, and where they do so after each micro-batch."""
    return np.array([costs[table].sum(axis=1).max(), costs[table].max(axis=0).sum()])


def _home_ranks(unit: np.ndarray, tokens: np.ndarray, home: np.ndarray, dp: int) -> np.ndarray:
    """[units]: the rank that has most of its tokens; -1 where none has any."""
    known = home >= 0
    held = np.bincount(unit[known] * dp + home[known], weights=tokens[known], minlength=(int(unit.max()) + 1) * dp)
    held = held.reshape(-1, dp)
    return np.where(held.any(axis=1), held.argmax(axis=1), -1)


def _costs(costs: np.ndarray, parts: list[np.ndarray]) -> np.ndarray:
    return np.array([costs[part].sum() for part in parts])


def _first(parts: list[np.ndarray]) -> np.ndarray:
    """The first item of each part, -1 where it has none."""
    return np.array([part[0] if len(part) else -1 for part in parts])


def _members(owner: np.ndarray, bins: int) -> list[np.ndarray]:
    """Numbers of the items of each part, ascending."""
    return np.split(np.argsort(owner, kind="stable"), np.cumsum(np.bincount(owner, minlength=bins))[:-1])


def min_micro_batches(sizes: np.ndarray, budget: int) -> int:
    """No plan has fewer micro-batches than this (the bound L2 of Martello and Toth 1990).

    For any k up to half the budget: what is above half the budget meets nothing else that is. What is above budget - k
    has no room for k. The rest of those from k on must fit beside the others above half, or have more micro-batches.
    """
    rising = np.sort(sizes)
    before = np.concatenate([[0], np.cumsum(rising)])  # tokens of so many of the smallest
    middle = int(np.searchsorted(rising, budget / 2, "right"))
    k = np.concatenate([[0], rising[:middle]])
    start = np.searchsorted(rising, k, "left")
    large = np.searchsorted(rising, budget - k, "right")  # from here on too large for k
    room = (large - middle) * budget - (before[large] - before[middle])
    more = before[middle] - before[start] - room
    return int((len(rising) - middle + np.maximum(0, -(-more // budget))).max())
