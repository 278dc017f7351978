"""Expert parallel load balancing (EPLB): which rank of an engine has which copies of which experts. Pure.

After the redundant experts of DeepSeek-V3 (arXiv:2412.19437, section 3.4): the most loaded experts of a layer get
copies, between which their tokens are divided evenly, and the copies are packed so that the ranks have equal loads. All
copies of a layer take part alike, as within one of the paper's nodes.

A placement is the logical expert in each physical slot; rank r has slots [r * n, (r + 1) * n), n = slots / ranks.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Placement = tuple[int, ...]


def initial_placement(num_experts: int, num_slots: int) -> Placement:
    """Return the placement with which engines start: experts in order, then the first ones again."""
    return tuple(slot % num_experts for slot in range(num_slots))


def count_copies(load: Sequence[int], num_slots: int) -> list[int]:
    """Return the copies of each expert, `num_slots` in all, that minimize the largest load of a copy.

    load: tokens of each expert. The next copy goes to the expert whose copies have most tokens. That is optimal: a
    bound B on the tokens of a copy needs ceil(load / B) copies of each expert, and no expert gets more before all have
    these. Raises ValueError if there are fewer slots than experts.
    """
    if num_slots < len(load):
        raise ValueError(f"{num_slots} slots are fewer than the {len(load)} experts")
    copies = [1] * len(load)
    queue = [(-float(tokens), expert) for expert, tokens in enumerate(load)]
    heapq.heapify(queue)
    for _ in range(num_slots - len(load)):
        expert = queue[0][1]
        copies[expert] += 1
        heapq.heapreplace(queue, (-load[expert] / copies[expert], expert))
    return copies


def place_experts(load: Sequence[int], num_slots: int, num_ranks: int) -> Placement:
    """Return the placement of a layer's experts, each on at least one rank, for the load `load` [experts] in tokens.

    Copies are packed by descending load, each onto the least loaded rank with a free slot, and then exchanged between
    the most loaded rank and others as long as that lowers the larger of their loads. Deterministic. Raises ValueError
    if `num_ranks` does not divide `num_slots`.
    """
    if num_slots % num_ranks:
        raise ValueError(f"{num_slots} slots do not divide by {num_ranks} ranks")
    copies = count_copies(load, num_slots)
    weights = np.asarray(load, np.float64) / copies
    experts = np.zeros((num_ranks, num_slots // num_ranks), np.int64)
    filled, totals = np.zeros(num_ranks, np.int64), np.zeros(num_ranks)
    for expert in np.argsort(-weights, kind="stable"):
        for _ in range(copies[expert]):
            rank = int(np.where(filled < experts.shape[1], totals, np.inf).argmin())
            experts[rank, filled[rank]] = expert
            filled[rank] += 1
            totals[rank] += weights[expert]
    while _exchange(experts, weights):
        pass
    return tuple(np.sort(experts, axis=1).flatten().tolist())


def _exchange(experts: NDArray[np.int64], weights: NDArray[np.float64]) -> bool:
    """Exchange the two copies, one on the most loaded rank, that lower the larger load of their ranks most. Returns
    False if none do.

    experts: [ranks, slots of a rank], changed in place. weights: tokens of a copy of each expert.
    """
    totals = weights[experts].sum(axis=1)
    most = int(totals.argmax())
    moved = weights[experts[most]][:, None, None] - weights[experts]  # [slots of the rank, ranks, slots]
    larger = np.maximum(totals[most] - moved, totals[:, None] + moved)
    larger[:, most] = np.inf
    slot, other, other_slot = np.unravel_index(int(larger.argmin()), larger.shape)
    if larger[slot, other, other_slot] >= totals[most] * (1 - 1e-9):  # rounding must not go around in circles
        return False
    taken, given = experts[most, slot], experts[other, other_slot]
    experts[most, slot], experts[other, other_slot] = given, taken
    return True


def rank_loads(load: Sequence[int], placement: Placement, num_ranks: int) -> NDArray[np.float64]:
    """Return the load of each rank, [ranks]: an expert's tokens are divided evenly between its copies."""
    slots = np.asarray(placement)
    copies = np.bincount(slots, minlength=len(load))
    return (np.asarray(load, np.float64) / np.maximum(copies, 1))[slots].reshape(num_ranks, -1).sum(axis=1)


def imbalance(load: Sequence[int], placement: Placement, num_ranks: int) -> float:
    """Return the largest load of a rank over the mean: 1 is balanced, `num_ranks` the worst."""
    loads = rank_loads(load, placement, num_ranks)
    return float(loads.max() / loads.mean()) if loads.any() else 1.0
