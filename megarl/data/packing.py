"""Plan the assignment of sequences to data-parallel ranks and micro-batches. Pure: numbers in, lists out.

Every rank computes the same plan from the same lengths: sequences become micro-batches of about equal cost by
Karmarkar-Karp or by greedy assignment with exchanges, optionally keeping most sequences on the rank that has them.
With dynamic context parallelism, a long sequence is computed by several ranks together, and short ones by one each."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from itertools import combinations, pairwise
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

COUNT_STEPS = 64  # resolution of the search for the number of micro-batches
WIDTH_SETS = 4  # sets of context parallel sizes that are planned, beside the largest alone
MAX_SLOWDOWN = 1.015  # allowed slowdown of a plan that keeps sequences at home, see `owner_rank`


SINGLE_WIDTH: Mapping[int, float] = MappingProxyType({1: 0.0})


class MicroBatchPlan(list[list[list[int]]]):
    """`plan[row][micro-batch] -> sequence indices`.

    A row is a data parallel replica or, with dynamic context parallelism, each context parallel rank of each replica.
    """

    widths: tuple[int, ...]
    """[micro-batches] how many rows compute a micro-batch together: with width 2 rows 0 and 1, 2 and 3, and so on,
    which list the same sequences. All 1 without dynamic context parallelism."""

    def __init__(self, rows: Iterable[list[list[int]]], widths: Iterable[int] = ()) -> None:
        super().__init__(rows)
        self.widths = tuple(widths) or (1,) * len(self[0])

    def micro_batches(self) -> Iterator[tuple[int, list[int]]]:
        """Iterate over all micro-batches, each once: the first row that computes it, and its sequences."""
        for row, micros in enumerate(self):
            for width, micro in zip(self.widths, micros, strict=True):
                if row % width == 0:
                    yield row, micro


def plan_micro_batches(
    lengths: npt.ArrayLike,
    dp: int,
    token_budget: int,
    quadratic: float = 0.0,
    multiple: int = 1,
    group: npt.ArrayLike | None = None,
    owner_rank: npt.ArrayLike | None = None,
    minimum: int = 1,
    common: tuple[npt.ArrayLike, npt.ArrayLike] | None = None,
    is_lockstep: bool = True,
    widths: Mapping[int, float] = SINGLE_WIDTH,
) -> MicroBatchPlan:
    """Distribute sequences over `dp` ranks and into micro-batches of at most `token_budget` tokens.

    lengths: [sequences] integers of at least 1: a list, an array or a host tensor. quadratic: a sequence of n tokens
    costs n + quadratic * n^2, see `models.flops.quadratic_cost`. Costs are balanced between micro-batches, above all
    between those that ranks compute at the same time, and between ranks. group: [sequences] numbers; sequences
    of one group stay together. The statements about sequences below then hold for groups. owner_rank: [sequences] the
    rank of the `dp` that already has it, below 0 for none. Sequences move only as balance requires. The plan has as
    many micro-batches as one without homes, and neither the busiest rank nor the sequence of slowest micro-batches
    takes more than MAX_SLOWDOWN times as long; otherwise the plan without homes is returned.

    common: [sequences] an order of the sequences, and [sequences] how many first tokens each has in common with the one
    before it in the order. A micro-batch computes such tokens once. Sequences then stay together, as far as the budget
    allows, if that is faster; tokens and costs are those that remain.

    is_lockstep: whether ranks wait for each other in every micro-batch, as those of an expert parallel group do in each
    layer. Otherwise only the costs of ranks are balanced: a long sequence takes the time of shorter ones of its rank.
    Homes may then change the number of micro-batches, and the busiest rank takes about HOLDER_TOLERANCE times the mean.

    widths: with dynamic context parallelism, how many ranks may compute a micro-batch together, each with the budget,
    ascending; each divides the next, and the last divides `dp`. Values are the communication of each, relative to the
    costs. The width is the same on all ranks at a time. A sequence takes the smallest at which it fits, or a larger one
    where ranks would wait otherwise: the plan takes no longer than one in which all micro-batches have the largest.

    Returns `plan[rank][micro_batch] -> sequence indices`, ascending within a micro-batch. All ranks get the same number
    of micro-batches, at least `minimum` and a multiple of `multiple`, because collectives of expert and pipeline
    parallelism need all ranks; a rank with less work gets empty ones. A sequence longer than the budget is a
    micro-batch of its own. The most expensive micro-batches come first, the widest before all others.

    Recent plans are cached, because the models of a step ask for the same one; the caller gets its own copy.
    """
    if dp < 1 or token_budget < 1:
        raise ValueError(f"dp and token_budget must be at least 1, not {dp} and {token_budget}")
    if min(widths) < 1 or any(wider % width for width, wider in pairwise((*widths, dp))):
        raise ValueError(f"each of widths={widths} must divide the next, and the last the {dp} ranks")
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
    order, shared = (None, None) if common is None else (_as_int64(common[0], "order"), _as_int64(common[1], "shared"))
    if shared is not None and not shared.any():
        order = shared = None
    arrays = (None if values is None else values.tobytes() for values in (numbers, homes, order, shared))
    is_lockstep = is_lockstep and dp > 1
    settings = float(quadratic), multiple, minimum, is_lockstep, tuple(widths.items())
    plan, chosen_widths = _cached_plan(sizes.tobytes(), dp, token_budget, *settings, *arrays)
    return MicroBatchPlan(([list(micro) for micro in rank] for rank in plan), chosen_widths)


def _as_int64(values: npt.ArrayLike, name: str) -> np.ndarray:
    array = np.asarray(values)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise ValueError(f"`{name}` must be a row of whole numbers, not {array.dtype} of shape {list(array.shape)}")
    return array.astype(np.int64)


@lru_cache(maxsize=8)  # a step's batch and its mini-batches, and those of a second layout
def _cached_plan(
    sizes: bytes,
    dp: int,
    budget: int,
    quadratic: float,
    multiple: int,
    minimum: int,
    is_lockstep: bool,
    width_costs: tuple[tuple[int, float], ...],
    group: bytes | None,
    owner_rank: bytes | None,
    order: bytes | None,
    shared: bytes | None,
) -> tuple[tuple[tuple[tuple[int, ...], ...], ...], tuple[int, ...]]:
    """Implement `plan_micro_batches` on the bytes of int64 arrays, which are hashable."""
    lengths = np.frombuffer(sizes, dtype=np.int64)
    homes = None if owner_rank is None else np.frombuffer(owner_rank, dtype=np.int64)
    unit = np.arange(len(lengths))  # index of each sequence's group, ordered by the first sequence
    if group is not None:
        unit = _number_by_first(np.frombuffer(group, dtype=np.int64))
    divisions = [(unit, lengths)]
    if order is not None and shared is not None:
        sequences, in_common = (np.frombuffer(values, dtype=np.int64) for values in (order, shared))
        limits = [(parts, budget) for parts in (SHARED_PARTS if group is None else SHARED_PARTS[:1])]
        widest, _ = width_costs[-1]
        limits += [(SHARED_PARTS[0], budget * widest)] if widest > 1 and group is None else []
        divisions = [
            _share(sequences, in_common, lengths, parts, limit, None if group is None else unit)
            for parts, limit in limits
        ] + (divisions if group is None else [])
    plan_units: Callable[..., _Plan] = _plan_waves if is_lockstep else _plan_ranks
    if len(width_costs) > 1 or width_costs[0][0] > 1:
        factors = {width: (1 + cost) / width for width, cost in width_costs}
        plan_units = partial(_plan_widths, plan_units, factors)
    plans = []
    for unit, tokens in divisions:
        unit_costs, unit_tokens = _sum_units(unit, tokens, lengths, quadratic)
        holder = None if homes is None else _home_ranks(unit, lengths, homes, dp)
        plan = plan_units(unit_costs, unit_tokens, holder, dp, budget, multiple, minimum)
        plans.append((plan.cost, plan.owner[unit], plan.table, plan.widths))
    _, owner, table, chosen_widths = min(plans, key=lambda item: item[0])
    members = _members(owner, int(table.max()) + 1)
    rows = tuple(tuple(tuple(members[part].tolist()) for part in rank) for rank in table.tolist())
    return rows, chosen_widths or (1,) * table.shape[1]


class _Plan(NamedTuple):
    owner: np.ndarray  # [units] int64, the micro-batch of each unit
    table: np.ndarray  # [dp, micro-batches of a rank] int64, all micro-batches
    cost: float  # of the plan, in tokens: of its busiest rank, or of its slowest micro-batches, too
    widths: tuple[int, ...] = ()  # [micro-batches of a rank], see `MicroBatchPlan`; the table repeats wider parts


SHARED_PARTS = 1, 2, 4
"""Into how many parts sequences with common tokens are divided: more balance better, and compute more."""


def _number_by_first(values: np.ndarray) -> np.ndarray:
    """Number equal values by the first of them."""
    _, firsts, number = np.unique(values, return_index=True, return_inverse=True)
    result: np.ndarray = np.argsort(np.argsort(firsts))[number]
    return result


def _share(
    order: np.ndarray, shared: np.ndarray, lengths: np.ndarray, parts: int, budget: int, group: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray]:
    """Return the unit of each sequence, and its tokens that no sequence before it in the unit has.

    Units are of sequences that follow each other in the order and have tokens in common, or they are groups. A run of
    such sequences is divided into `parts` of about as many tokens, or into more, of at most `budget` tokens each.
    """
    unit, tokens, number = np.empty_like(lengths), lengths.copy(), -1
    is_first = shared[order] == 0
    is_first[:1] = True
    if group is not None:
        is_first[1:] |= group[order[1:]] != group[order[:-1]]
    for run in np.split(order, np.flatnonzero(is_first)[1:]):
        computed = lengths[run] - shared[run]
        common = int(shared[run[1]]) if len(run) > 1 else 0
        rest = int(lengths[run[0]]) - common + int(computed[1:].sum())
        limit = min(budget, common + math.ceil(rest / parts))  # each part computes the common tokens
        total = 0
        for place, (sequence, count) in enumerate(zip(run.tolist(), computed.tolist(), strict=True)):
            if place and (group is not None or total + count <= limit):
                tokens[sequence], total = count, total + count
            else:
                number, total = number + 1, int(lengths[sequence])
            unit[sequence] = number
    return (_number_by_first(unit) if group is None else group), tokens


def _plan_waves(
    costs: np.ndarray, tokens: np.ndarray, holder: np.ndarray | None, dp: int, budget: int, multiple: int, minimum: int
) -> _Plan:
    """Plan for ranks that wait for each other after each micro-batch.

    costs: [units] float64. tokens: [units] int64, those that are computed. holder: [units], the rank that has most of
    each unit, below 0 for none; None if units have no homes.
    """

    def fits(owner: np.ndarray) -> bool:
        part_tokens = np.bincount(owner, weights=tokens, minlength=dp * count)
        return not np.any((part_tokens > budget) & (np.bincount(owner, minlength=dp * count) > 1))

    count = max(1, -(-minimum // multiple), -(-min_micro_batches(tokens, budget) // (dp * multiple))) * multiple
    while not fits(owner := partition(costs, dp * count)):
        # Terminates at the latest when each has a micro-batch of its own.
        count += max(1, count // (COUNT_STEPS * multiple)) * multiple

    part_costs, firsts = _summarize_parts(owner, dp * count, costs)
    waves, loads = [], np.zeros(dp)
    for wave in np.lexsort((firsts, -part_costs)).reshape(-1, dp):  # the most expensive first, to the least loaded rank
        by_load = np.argsort(loads, kind="stable")
        loads[by_load] += part_costs[wave]
        waves.append(wave[np.argsort(by_load)])
    table = np.stack(waves, axis=1)  # [dp, micro-batches]
    if holder is not None:
        for candidate in filter(fits, partition_near_home(costs, tokens, budget, holder, dp, count)):
            kept_costs, firsts = _summarize_parts(candidate, dp * count, costs)
            order = np.lexsort((firsts, -kept_costs, np.arange(dp * count) // count)).reshape(dp, count)
            if np.all(_plan_times(kept_costs, order) <= MAX_SLOWDOWN * _plan_times(part_costs, table)):
                owner, table, part_costs = candidate, order, kept_costs
                break
    return _Plan(owner, table, float(_plan_times(part_costs, table).sum()))


def _plan_ranks(
    costs: np.ndarray, tokens: np.ndarray, holder: np.ndarray | None, dp: int, budget: int, multiple: int, minimum: int
) -> _Plan:
    """Plan for ranks that wait for each other at the end alone. Arguments as in `_plan_waves`."""
    if holder is None:
        rank = partition(costs, dp)
    else:
        falling, rank = np.argsort(-costs, kind="stable"), np.empty(len(costs), dtype=np.int64)
        rank[falling] = _balance_holders(costs[falling], holder[falling], np.ones(dp, dtype=np.int64))
    members = _members(rank, dp)
    least = max(minimum, *(min_micro_batches(tokens[items], budget) for items in members))
    count = -(-max(1, least) // multiple) * multiple
    owner, number = np.empty(len(costs), dtype=np.int64), 0
    while number < dp:  # the first rank whose parts would be too large adds a micro-batch to all
        items = members[number]
        part = _pack(costs[items], tokens[items], budget, count)
        if part is None:
            count, number = count + max(1, count // (COUNT_STEPS * multiple)) * multiple, 0
        else:
            owner[items], number = number * count + part, number + 1
    part_costs, firsts = _summarize_parts(owner, dp * count, costs)
    table = np.lexsort((firsts, -part_costs, np.arange(dp * count) // count)).reshape(dp, count)
    return _Plan(owner, table, float(_plan_times(part_costs, table)[0]))


def _plan_widths(
    plan_units: Callable[..., _Plan],
    factors: Mapping[int, float],
    costs: np.ndarray,
    tokens: np.ndarray,
    holder: np.ndarray | None,
    dp: int,
    budget: int,
    multiple: int,
    minimum: int,
) -> _Plan:
    """Plan micro-batches of several widths. Other arguments as in `_plan_waves`.

    A set of widths gives a plan: units of the same width are planned by `plan_units`, the widest first. The cheapest
    plan is returned, of that of the largest width alone, which is one of static context parallelism, and of those of
    the WIDTH_SETS sets with the lowest bounds of their costs.

    plan_units: `_plan_waves` or `_plan_ranks`. factors: by width, of a unit's cost on a single rank.
    """
    *narrow, widest = factors
    sets: list[tuple[float, np.ndarray, np.ndarray]] = []
    for number in range(len(narrow) + 1):
        for chosen in combinations(narrow, number):
            sizes = np.array([*chosen, widest])
            needed = sizes[np.minimum(np.searchsorted(sizes * budget, tokens), number)]
            bound = float(sum(factors[width] * width * costs[needed == width].sum() for width in factors))
            sets.append((bound, sizes, needed))
    plans = []
    for _, sizes, needed in [sets[0], *sorted(sets[1:], key=lambda item: item[0])[:WIDTH_SETS]]:
        arguments = costs, tokens, holder, dp, budget, multiple, minimum
        owner, table, _, widths = _plan_sizes(plan_units, needed, sizes.tolist(), *arguments)
        part_costs = np.bincount(owner, weights=costs, minlength=int(table.max()) + 1)
        seconds = part_costs[table] * [factors[width] for width in widths]
        cost = _finish_time(seconds, widths, is_lockstep=plan_units is _plan_waves)
        plans.append(_Plan(owner, table, cost, widths))
    return min(plans, key=lambda plan: plan.cost)


def _finish_time(costs: np.ndarray, widths: Sequence[int], is_lockstep: bool) -> float:
    """Return when the last rank finishes. costs: [dp, micro-batches] of each, whose ranks start it together."""
    finish = np.zeros(len(costs))
    for number, width in enumerate(widths):
        start = finish.max() if is_lockstep else np.repeat(finish.reshape(-1, width).max(axis=1), width)
        finish = start + costs[:, number]
    return float(finish.max())


def _plan_sizes(
    plan_units: Callable[..., _Plan],
    needed: np.ndarray,
    sizes: list[int],
    costs: np.ndarray,
    tokens: np.ndarray,
    holder: np.ndarray | None,
    dp: int,
    budget: int,
    multiple: int,
    minimum: int,
) -> _Plan:
    """Plan micro-batches of the widths `sizes`, ascending. needed: [units] the width of each. The plan has no cost."""
    owner = np.full(len(costs), -1, dtype=np.int64)
    tables, widths, num_parts = list[np.ndarray](), list[int](), 0
    for width in reversed(sizes):
        is_last = width == sizes[0]
        units = np.flatnonzero((owner < 0) & (needed == width))
        least = -(-max(minimum, len(widths), 1) // multiple) * multiple  # micro-batches of the whole plan
        missing = least - len(widths) if is_last else 0
        if not len(units) and not missing:
            continue
        homes = None if holder is None else holder[units] // width
        settings = costs[units], tokens[units], homes, dp // width, budget * width
        plan = plan_units(*settings, 1, max(1, missing))
        while is_last and (rest := -(len(widths) + plan.table.shape[1]) % multiple):
            plan = plan_units(*settings, 1, plan.table.shape[1] + rest)
        table = plan.table
        owner[units] = num_parts + plan.owner
        if not is_last:
            part_costs, part_tokens = (
                np.bincount(plan.owner, weights=values[units], minlength=table.size) for values in (costs, tokens)
            )
            limits = np.empty(table.size)  # the cost of the slowest part at the same time
            limits[table] = part_costs[table].max(axis=0)
            spare = np.flatnonzero(owner < 0)
            filled = _fill(costs[spare], tokens[spare], limits - part_costs, budget * width - part_tokens)
            owner[spare[filled >= 0]] = num_parts + filled[filled >= 0]
        tables.append(np.repeat(num_parts + table, width, axis=0))
        widths += [width] * table.shape[1]
        num_parts += table.size
    return _Plan(owner, np.concatenate(tables, axis=1), 0.0, tuple(widths))


def _fill(costs: np.ndarray, tokens: np.ndarray, spare_cost: np.ndarray, spare_tokens: np.ndarray) -> np.ndarray:
    """Return the part that each unit, the most expensive first, is added to, [units] int64; -1 where none has room.

    costs, tokens: [units]. spare_cost, spare_tokens: [parts] what each may be added.
    """
    part = np.full(len(costs), -1, dtype=np.int64)
    spare_cost, spare_tokens = spare_cost.copy(), spare_tokens.copy()
    for unit in np.argsort(-costs, kind="stable"):
        room = np.where(spare_tokens >= tokens[unit], spare_cost, -1.0)
        best = int(room.argmax())
        if room[best] >= costs[unit]:
            part[unit] = best
            spare_cost[best] -= costs[unit]
            spare_tokens[best] -= tokens[unit]
    return part


def _pack(costs: np.ndarray, tokens: np.ndarray, budget: int, count: int) -> np.ndarray | None:
    """Return a part for each item, of equal costs or else of equal tokens, each within the budget; None if neither is.

    An item of more tokens is a part of its own.
    """
    for weights in (costs, tokens.astype(np.float64)):
        part = partition(weights, count)
        part_tokens = np.bincount(part, weights=tokens, minlength=count)
        if not np.any((part_tokens > budget) & (np.bincount(part, minlength=count) > 1)):
            return part
    return None


def _sum_units(
    unit: np.ndarray, tokens: np.ndarray, lengths: np.ndarray, quadratic: float
) -> tuple[np.ndarray, np.ndarray]:
    """Return the cost of each unit, [units] float64, and its tokens, [units] int64.

    unit: [sequences]. tokens: [sequences] the last ones of each, which are computed.
    """
    costs = tokens + quadratic * tokens * (2 * lengths - tokens)
    units = int(unit.max(initial=-1)) + 1
    unit_tokens = np.bincount(unit, weights=tokens, minlength=units).astype(np.int64)
    return np.bincount(unit, weights=costs, minlength=units), unit_tokens


def _plan_times(costs: np.ndarray, table: np.ndarray) -> np.ndarray:
    """Return the cost of a plan if ranks synchronize only at its end, and if they do so after each micro-batch."""
    return np.array([costs[table].sum(axis=1).max(), costs[table].max(axis=0).sum()])


def _home_ranks(unit: np.ndarray, tokens: np.ndarray, owner_rank: np.ndarray, dp: int) -> np.ndarray:
    """Return the rank that has most tokens of each unit, [units]; -1 if none has any."""
    has_home = owner_rank >= 0
    cell = unit[has_home] * dp + owner_rank[has_home]
    tokens_by_rank = np.bincount(cell, weights=tokens[has_home], minlength=(int(unit.max()) + 1) * dp).reshape(-1, dp)
    return np.where(tokens_by_rank.any(axis=1), tokens_by_rank.argmax(axis=1), -1)


def _summarize_parts(owner: np.ndarray, bins: int, costs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the cost of each part and its first item, -1 if it is empty."""
    parts = _members(owner, bins)
    return np.array([costs[part].sum() for part in parts]), np.array([part[0] if len(part) else -1 for part in parts])


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


MAX_KARMARKAR_KARP = 512  # up to this many items use differencing, whose time grows as items times parts
ROUNDS = 32  # of exchanges between parts
BALANCE_TOLERANCE = 1.001  # largest part over mean cost, below which no more items are exchanged
MAX_OFFERS = 8  # items of a part that are considered in a round


def partition(costs: np.ndarray, bins: int) -> np.ndarray:
    """Return the part of each item ([items] int64) so that `bins` parts cost about the same.

    costs: [items] float64, all above zero.
    """
    if len(costs) <= MAX_KARMARKAR_KARP:
        return karmarkar_karp(costs, bins)
    return exchange_items(costs, greedy(costs, bins), bins)


def karmarkar_karp(costs: np.ndarray, bins: int) -> np.ndarray:
    """Partition by the differencing method (Karmarkar and Karp 1982).

    At first each item is a partition with its cost in one bin. The two partitions with the largest spread are combined,
    the fullest bin of one with the emptiest of the other, until one is left. Arguments and result as in `partition`.
    """
    owner = np.zeros(len(costs), dtype=np.int64)
    if not len(costs):
        return owner
    sums = list(np.pad(costs[:, None], ((0, 0), (0, bins - 1))))  # bins of each partition, in descending order
    merges: list[tuple[int, int, np.ndarray]] = []  # two partitions, and which bin of the first each bin came from
    heap = [(-float(cost), number) for number, cost in enumerate(costs)]
    heapq.heapify(heap)
    while len(heap) > 1:
        (_, a), (_, b) = heapq.heappop(heap), heapq.heappop(heap)
        combined = sums[a] + sums[b][::-1]
        order = np.argsort(-combined, kind="stable")
        merges.append((a, b, order))
        sums.append(combined[order])
        heapq.heappush(heap, (float(sums[-1][-1] - sums[-1][0]), len(sums) - 1))
    # Backtrack from the last partition: where each bin of its two constituents ended up.
    bin_map: dict[int, np.ndarray] = {len(sums) - 1: np.arange(bins)}
    for number in range(len(sums) - 1, len(costs) - 1, -1):
        a, b, order = merges[number - len(costs)]
        origin = np.empty(bins, dtype=np.int64)
        origin[order] = bin_map.pop(number)
        bin_map[a], bin_map[b] = origin, origin[::-1]
    for item in range(len(costs)):
        owner[item] = bin_map[item][0]
    return owner


def greedy(costs: np.ndarray, bins: int, initial_loads: np.ndarray | None = None) -> np.ndarray:
    """Assign the costliest item to the cheapest part, until none is left.

    initial_loads: [bins] initial costs of the parts. Other arguments and result as in `partition`.
    """
    order = np.argsort(-costs, kind="stable")
    heap = [(load, part) for part, load in enumerate([0.0] * bins if initial_loads is None else initial_loads.tolist())]
    heapq.heapify(heap)
    chosen = []
    for cost in costs[order].tolist():
        load, part = heap[0]
        chosen.append(part)
        heapq.heapreplace(heap, (load + cost, part))
    owner = np.empty(len(costs), dtype=np.int64)
    owner[order] = chosen
    return owner


def exchange_items(
    costs: np.ndarray,
    owner: np.ndarray,
    bins: int,
    tolerance: float | None = None,
    initial_loads: np.ndarray | None = None,
) -> np.ndarray:
    """Return `owner` after exchanges that balance the parts; no part gets costlier than the costliest was.

    In a round each part of the costlier half is paired with one of the cheaper half, another one each time, and the two
    exchange an item for an item, or for none, choosing the exchange that reduces the gap between them most.

    tolerance: only parts that cost more than this multiple of the mean seek an exchange; by default all do.
    initial_loads: as in `greedy`.
    """
    owner, half = owner.copy(), bins // 2
    rising = np.argsort(costs, kind="stable")
    for number in range(ROUNDS if half else 0):
        loads = np.bincount(owner, weights=costs, minlength=bins)
        loads = loads if initial_loads is None else loads + initial_loads
        max_load = (tolerance or BALANCE_TOLERANCE) * loads.sum() / bins
        if loads.max() <= max_load:
            break
        items = rising[np.argsort(owner[rising], kind="stable")]  # by part, in ascending cost
        counts = np.bincount(owner, minlength=bins)
        falling = np.argsort(-loads, kind="stable")
        # In the first round the costliest meets the cheapest. Later rounds rotate the pairing by the golden ratio,
        # which comes close to no earlier rotation.
        costly, cheap = falling[:half], np.roll(falling[::-1][:half], int(number * 0.6180339887 % 1 * half))
        if tolerance is not None:
            costly, cheap = costly[loads[costly] > max_load], cheap[loads[costly] > max_load]
        gaps = loads[costly] - loads[cheap]
        offered, prices = _sample_offers(costs, items, counts, costly)
        counter_offers, returns = _sample_offers(costs, items, counts, cheap)
        shifts = (prices[:, :, None] - returns[:, None, :]).reshape(len(costly), -1)
        if tolerance is None:
            current_gaps, remaining_gaps = gaps, np.abs(gaps[:, None] - 2 * shifts)
        else:  # any shift between the excess and half of the gap
            current_gaps = np.minimum(loads[costly] - max_load, gaps / 2)
            remaining_gaps = np.maximum(np.maximum(current_gaps[:, None] - shifts, shifts - gaps[:, None] / 2), 0.0)
        pairs, best = np.arange(len(costly)), remaining_gaps.argmin(axis=1)
        is_improvement = remaining_gaps[pairs, best] < current_gaps * (1 - 1e-9)  # ignore rounding
        if tolerance is None and not is_improvement.any():
            break
        moved_down = np.where(is_improvement, offered[pairs, best // counter_offers.shape[1]], -1)
        moved_up = np.where(is_improvement, counter_offers[pairs, best % counter_offers.shape[1]], -1)
        owner[moved_down[moved_down >= 0]] = cheap[moved_down >= 0]
        owner[moved_up[moved_up >= 0]] = costly[moved_up >= 0]
    return owner


def _sample_offers(
    costs: np.ndarray, items: np.ndarray, counts: np.ndarray, parts: np.ndarray
) -> tuple[np.ndarray, ...]:
    """Return the items that each of `parts` may give away, and their costs, both [parts, offers].

    Large parts offer an evenly spaced sample. -1 at cost 0 is no item: always first, and padding for parts with fewer
    items.
    """
    starts, part_counts = (np.cumsum(counts) - counts)[parts][:, None], counts[parts][:, None]
    column = np.arange(min(MAX_OFFERS, int(counts.max())))[None, :]
    step = np.maximum(part_counts / column.shape[1], 1.0)
    positions = (column * step).astype(np.int64)
    offers = np.where(positions < part_counts, items[np.minimum(starts + positions, len(items) - 1)], -1)
    offers = np.concatenate([np.full((len(parts), 1), -1), offers], axis=1)
    return offers, np.where(offers >= 0, costs[offers], 0.0)


TOLERANCES = (1.01, 1.005, 1.002, 1.001)
"""Allowed cost of a part over the mean, tried in turn. A tighter balance moves more items.

A token costs tens of microseconds of GPU time and some tens of bytes to move, so keeping items at home may cost one
percent, and not more.
"""
HOLDER_TOLERANCE = 1.004  # balance of holders before each holder's items are partitioned


def partition_near_home(
    costs: np.ndarray, sizes: np.ndarray, max_size: int, home: np.ndarray, holders: int, count: int
) -> Iterator[np.ndarray]:
    """Yield assignments of items to `holders * count` parts ([items] int64), moving ever more items away from home.

    Parts are numbered by holder: the first `count` belong to the first one. The caller takes the first assignment that
    satisfies it: parts that cost about the same and are not larger than `max_size`.

    costs: [items] float64, all above zero. sizes: [items] int64. home: [items], the holder that has it, below 0 for
    none.

    An item that costs more than the mean part is a part of its own; these are distributed so that each holder has as
    many of about the same cost, and the holders' costliest parts are alike. The other items stay with their holders
    except for what balancing the holders requires; each holder's items are partitioned, and parts that are still too
    costly exchange items with any other part.
    """
    falling = np.argsort(-costs, kind="stable")
    number = _count_large(costs[falling], holders * count)
    large_items, rest = falling[:number], falling[number:]
    owner = np.empty(len(costs), dtype=np.int64)
    holder = _assign_large(costs[large_items], home[large_items], holders, costs.sum() / holders)
    for holder_index in range(holders):
        local_items = large_items[holder == holder_index]
        owner[local_items] = holder_index * count + np.arange(len(local_items))
    free_parts = np.flatnonzero(~np.isin(np.arange(holders * count), owner[large_items]))  # the parts that are empty
    item_holders = _balance_holders(costs[rest], home[rest], np.bincount(free_parts // count, minlength=holders))
    part = np.empty(len(rest), dtype=np.int64)  # as an index into `free_parts`
    for holder_index in np.unique(item_holders):
        bins = np.flatnonzero(free_parts // count == holder_index)
        part[item_holders == holder_index] = bins[partition(costs[rest[item_holders == holder_index]], len(bins))]
    size_ratio = max_size * len(free_parts) / max(1, int(sizes[rest].sum()))
    for tolerance in TOLERANCES:
        part = exchange_items(costs[rest], part, len(free_parts), tolerance)
        owner[rest] = free_parts[part]
        yield owner.copy()
        # A part that is too large at average cost has many small items and can exchange some of them.
        owner[rest] = free_parts[exchange_items(sizes[rest], part, len(free_parts), size_ratio)]
        yield owner.copy()


def _count_large(falling: np.ndarray, parts: int) -> int:
    """Return how many items are large: each costs more, by the first tolerance, than the mean remaining part."""
    largest = falling[:parts]
    others = falling.sum() - np.cumsum(largest) + largest
    is_large = largest * (parts - np.arange(len(largest))) > TOLERANCES[0] * others
    return len(largest) if is_large.all() else int(is_large.argmin())


def _assign_large(falling: np.ndarray, home: np.ndarray, holders: int, mean_load: float) -> np.ndarray:
    """Return the holder of each large item: [items].

    Among items of similar cost, holders differ by at most one in number. An item stays at home unless its holder would
    exceed the mean, computed as if each holder had the larger number, by half a tolerance of `mean_load`.
    """
    holder, number, begin = np.full(len(falling), -1, dtype=np.int64), np.zeros(holders, dtype=np.int64), 0
    loads, spare = np.zeros(holders), (TOLERANCES[0] - 1) / 2 * mean_load
    while begin < len(falling):
        num_alike = int(np.count_nonzero(falling * TOLERANCES[0] >= falling[begin]))
        end = min(len(falling), max(num_alike, (begin // holders + 1) * holders))
        quota, extra = end // holders, end % holders  # `extra` holders have one more
        mean = (falling[:end].sum() + -end % holders * falling[end - 1]) / holders
        for item in [i for i in range(begin, end) if home[i] >= 0]:
            target, one_more = home[item], np.count_nonzero(number > quota) < extra
            if loads[target] + falling[item] <= mean + spare and number[target] < quota + one_more:
                holder[item] = target
                number[target] += 1
                loads[target] += falling[item]
        for item in np.flatnonzero(holder[begin:end] < 0) + begin:
            target = np.lexsort((loads, number))[0]
            holder[item] = target
            number[target] += 1
            loads[target] += falling[item]
        begin = end
    return holder


def _balance_holders(falling: np.ndarray, home: np.ndarray, part_counts: np.ndarray) -> np.ndarray:
    """Return the holder of each item: [items]. part_counts: [holders], number of parts that each fills."""
    if not len(falling):
        return np.empty(0, dtype=np.int64)
    open_holders = np.flatnonzero(part_counts)
    index_of_holder = np.full(len(part_counts) + 1, -1)  # in `open_holders`; the last is for items without a home
    index_of_holder[open_holders] = np.arange(len(open_holders))
    at, level = index_of_holder[home.clip(min=-1)], falling.sum() / part_counts.sum()
    # As if holders with fewer parts had the others filled.
    initial_loads = (part_counts.max() - part_counts[open_holders]) * level

    def current_loads() -> np.ndarray:
        return initial_loads + np.bincount(at[at >= 0], weights=falling[at >= 0], minlength=len(open_holders))

    excess = (current_loads() - part_counts.max() * level).tolist()
    for item, (cost, holder) in enumerate(zip(falling.tolist(), at.tolist(), strict=True)):
        if holder >= 0 and cost <= excess[holder]:
            excess[holder] -= cost
            at[item] = -1
    is_unassigned = at < 0
    at[is_unassigned] = greedy(falling[is_unassigned], len(open_holders), current_loads())
    return open_holders[exchange_items(falling, at, len(open_holders), HOLDER_TOLERANCE, initial_loads)]
