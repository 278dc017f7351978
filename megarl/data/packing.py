"""Which sequence goes to which data-parallel rank and into which micro-batch. Pure: lists of ints in and out.

Plans are the same on every rank, because every rank computes them from the same lengths.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def plan_micro_batches(lengths: Sequence[int], dp: int, token_budget: int) -> list[list[list[int]]]:
    """Share out sequences over `dp` ranks, and each rank's share over micro-batches of at most `token_budget` tokens.

    Returns `plan[rank][micro_batch] -> sequence indices`, ascending within a micro-batch. Every rank gets the same
    number of micro-batches, at least one, because a collective of expert or pipeline parallelism needs all its ranks;
    a rank that has less to do gets empty ones. A sequence longer than the budget is a micro-batch of its own. On each
    rank the fullest micro-batch comes first, so that ranks that wait for each other have about as much to do.

    Greedy, longest first to the least loaded (Graham 1969): the fullest rank has at most 4/3 of the best possible.
    """
    if dp < 1 or token_budget < 1:
        raise ValueError(f"dp and token_budget must be at least 1, not {dp} and {token_budget}")
    for index, length in enumerate(lengths):
        if length < 1:
            raise ValueError(f"sequence {index} has {length} tokens; a sequence has at least one")
    shares = _balance(range(len(lengths)), lengths, dp)
    count = max(1, *(_fewest(share, lengths, token_budget) for share in shares))
    while True:
        plan = [_balance(share, lengths, count) for share in shares]
        if all(_fits(indices, lengths, token_budget) for rank in plan for indices in rank):
            break
        count += 1  # ends at the latest when each sequence has a micro-batch of its own
    for rank in plan:
        rank.sort(key=lambda indices: (-sum(lengths[index] for index in indices), indices))
    return plan


def _fewest(indices: list[int], lengths: Sequence[int], token_budget: int) -> int:
    """No plan has fewer micro-batches than this."""
    short = [lengths[index] for index in indices if lengths[index] <= token_budget]
    return len(indices) - len(short) + -(-sum(short) // token_budget)


def _fits(indices: list[int], lengths: Sequence[int], token_budget: int) -> bool:
    return len(indices) <= 1 or sum(lengths[index] for index in indices) <= token_budget


def _balance(indices: Sequence[int], lengths: Sequence[int], bins: int) -> list[list[int]]:
    """Split `indices` into `bins` lists of about equal total length; ties go to the lower index and the lower bin."""
    loads = [(0, place) for place in range(bins)]
    result: list[list[int]] = [[] for _ in range(bins)]
    for index in sorted(indices, key=lambda i: (-lengths[i], i)):
        load, place = heapq.heappop(loads)
        result[place].append(index)
        heapq.heappush(loads, (load + lengths[index], place))
    return [sorted(part) for part in result]
