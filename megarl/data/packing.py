"""Plan the assignment of sequences to data-parallel ranks and micro-batches. Pure: numbers in, lists out.

Every rank computes the same plan from the same lengths.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt

from megarl.data.partition import partition, partition_near_home

COUNT_STEPS = 64  # resolution of the search for the number of micro-batches
MAX_SLOWDOWN = 1.015  # allowed slowdown of a plan that keeps sequences at home, see `owner_rank`


def plan_micro_batches(
    lengths: npt.ArrayLike,
    dp: int,
    token_budget: int,
    quadratic: float = 0.0,
    multiple: int = 1,
    group: npt.ArrayLike | None = None,
    owner_rank: npt.ArrayLike | None = None,
) -> list[list[list[int]]]:
    """Distribute sequences over `dp` ranks and into micro-batches of at most `token_budget` tokens.

    lengths: [sequences] integers of at least 1: a list, an array or a host tensor. quadratic: a sequence of n tokens
    costs n + quadratic * n^2, see `models.flops.quadratic_cost`. Costs are balanced between micro-batches, above all
    between those that ranks compute at the same time, and between ranks. group: [sequences] numbers; sequences
    of one group stay together. The statements about sequences below then hold for groups. owner_rank: [sequences] the
    rank of the `dp` that already has it, below 0 for none. Sequences move only as balance requires. The plan has as
    many micro-batches as one without homes, and neither the busiest rank nor the sequence of slowest micro-batches
    takes more than MAX_SLOWDOWN times as long; otherwise the plan without homes is returned.

    Returns `plan[rank][micro_batch] -> sequence indices`, ascending within a micro-batch. All ranks get the same number
    of micro-batches, a multiple of `multiple`, because collectives of expert and pipeline parallelism need all ranks; a
    rank with less work gets empty ones. A sequence longer than the budget is a micro-batch of its own. The most
    expensive micro-batches come first.

    Recent plans are cached, because the models of a step ask for the same one; the caller gets its own copy.
    """
    if dp < 1 or token_budget < 1:
        raise ValueError(f"dp and token_budget must be at least 1, not {dp} and {token_budget}")
    sizes = _as_int64(lengths, "lengths")
    if (too_short := np.flatnonzero(sizes < 1)).size:
        raise ValueError(f"sequence {too_short[0]} has {sizes[too_short[0]]} tokens; a sequence has at least one")
    numbers = None if group is None else _as_int64(group, "group")
    if numbers is not None and len(numbers) != len(sizes):
        raise ValueError(f"`group` has {len(numbers)} numbers for {len(sizes)} sequences")
    homes = None if owner_rank is None else _as_int64(owner_rank, "owner_rank")
    if homes is not None and (len(homes) != len(sizes) or homes.max(initial=-1) >= dp):
        raise ValueError(f"`owner_rank` has {len(homes)} numbers below {dp} for {len(sizes)} sequences")
    if homes is not None and (dp == 1 or homes.max(initial=-1) < 0):
        homes = None
    group_bytes, home_bytes = (None if values is None else values.tobytes() for values in (numbers, homes))
    plan = _cached_plan(sizes.tobytes(), dp, token_budget, float(quadratic), multiple, group_bytes, home_bytes)
    return [[list(micro) for micro in rank] for rank in plan]


def _as_int64(values: npt.ArrayLike, name: str) -> np.ndarray:
    array = np.asarray(values)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise ValueError(f"`{name}` must be a row of whole numbers, not {array.dtype} of shape {list(array.shape)}")
    return array.astype(np.int64)


@lru_cache(maxsize=8)  # a step's batch and its mini-batches, and those of a second layout
def _cached_plan(
    sizes: bytes, dp: int, budget: int, quadratic: float, multiple: int, group: bytes | None, owner_rank: bytes | None
) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Implement `plan_micro_batches` on the bytes of int64 arrays, which are hashable."""
    tokens = np.frombuffer(sizes, dtype=np.int64)
    costs = tokens + quadratic * tokens**2
    unit = np.arange(len(tokens))  # index of each sequence's group, ordered by the first sequence
    if group is not None:
        _, firsts, number = np.unique(np.frombuffer(group, dtype=np.int64), return_index=True, return_inverse=True)
        unit = np.argsort(np.argsort(firsts))[number]
    units = int(unit.max(initial=-1)) + 1
    unit_costs = np.bincount(unit, weights=costs, minlength=units)
    unit_tokens = np.bincount(unit, weights=tokens, minlength=units).astype(np.int64)

    def fits(owner: np.ndarray) -> bool:
        part_tokens = np.bincount(owner, weights=unit_tokens, minlength=dp * count)
        return not np.any((part_tokens > budget) & (np.bincount(owner, minlength=dp * count) > 1))

    count = max(1, -(-min_micro_batches(unit_tokens, budget) // (dp * multiple))) * multiple
    while not fits(owner := partition(unit_costs, dp * count)):
        # Terminates at the latest when each has a micro-batch of its own.
        count += max(1, count // (COUNT_STEPS * multiple)) * multiple

    parts = _members(owner, dp * count)
    part_costs, firsts = _costs(unit_costs, parts), _first(parts)
    table = _deal_to_ranks(part_costs, firsts, dp)
    if owner_rank is not None:
        holder = _home_ranks(unit, tokens, np.frombuffer(owner_rank, dtype=np.int64), dp)
        for candidate in filter(fits, partition_near_home(unit_costs, unit_tokens, budget, holder, dp, count)):
            kept_parts = _members(candidate, dp * count)
            kept_costs, firsts = _costs(unit_costs, kept_parts), _first(kept_parts)
            order = np.lexsort((firsts, -kept_costs, np.arange(dp * count) // count)).reshape(dp, count)
            if np.all(_plan_times(kept_costs, order) <= MAX_SLOWDOWN * _plan_times(part_costs, table)):
                owner, table = candidate, order
                break
    sequences = _members(owner[unit], dp * count)
    return tuple(tuple(tuple(sequences[part].tolist()) for part in rank) for rank in table.tolist())


def _deal_to_ranks(costs: np.ndarray, first: np.ndarray, dp: int) -> np.ndarray:
    """Return [dp, times]: the most expensive micro-batches first, each time to the least loaded rank."""
    table, loads = [], np.zeros(dp)
    for wave in np.lexsort((first, -costs)).reshape(-1, dp):
        by_load = np.argsort(loads, kind="stable")
        loads[by_load] += costs[wave]
        table.append(wave[np.argsort(by_load)])
    return np.stack(table, axis=1)


def _plan_times(costs: np.ndarray, table: np.ndarray) -> np.ndarray:
    """Return the cost of a plan if ranks synchronize only at its end, and if they do so after each micro-batch."""
    return np.array([costs[table].sum(axis=1).max(), costs[table].max(axis=0).sum()])


def _home_ranks(unit: np.ndarray, tokens: np.ndarray, owner_rank: np.ndarray, dp: int) -> np.ndarray:
    """Return the rank that has most tokens of each unit, [units]; -1 if none has any."""
    has_home = owner_rank >= 0
    tokens_by_rank = np.bincount(
        unit[has_home] * dp + owner_rank[has_home], weights=tokens[has_home], minlength=(int(unit.max()) + 1) * dp
    )
    tokens_by_rank = tokens_by_rank.reshape(-1, dp)
    return np.where(tokens_by_rank.any(axis=1), tokens_by_rank.argmax(axis=1), -1)


def _costs(costs: np.ndarray, parts: list[np.ndarray]) -> np.ndarray:
    return np.array([costs[part].sum() for part in parts])


def _first(parts: list[np.ndarray]) -> np.ndarray:
    """Return the first item of each part, -1 if it is empty."""
    return np.array([part[0] if len(part) else -1 for part in parts])


def _members(owner: np.ndarray, bins: int) -> list[np.ndarray]:
    """Return the items of each part, ascending."""
    return np.split(np.argsort(owner, kind="stable"), np.cumsum(np.bincount(owner, minlength=bins))[:-1])


def min_micro_batches(sizes: np.ndarray, budget: int) -> int:
    """Return a lower bound on the number of micro-batches (L2 of Martello and Toth 1990).

    For any k up to half the budget: two items above half the budget never share a micro-batch, and an item above budget
    - k leaves no room for one of k. The other items from k on must fit next to the remaining ones above half, or need
    further micro-batches.
    """
    rising = np.sort(sizes)
    cumulative = np.concatenate([[0], np.cumsum(rising)])  # cumulative tokens of the smallest
    middle = int(np.searchsorted(rising, budget / 2, "right"))
    k = np.concatenate([[0], rising[:middle]])
    start = np.searchsorted(rising, k, "left")
    large = np.searchsorted(rising, budget - k, "right")  # from here on too large for k
    free_tokens = (large - middle) * budget - (cumulative[large] - cumulative[middle])
    excess = cumulative[middle] - cumulative[start] - free_tokens
    return int((len(rising) - middle + np.maximum(0, -(-excess // budget))).max())
