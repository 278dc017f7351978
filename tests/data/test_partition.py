"""Partitioning of items into parts of equal cost."""

import numpy as np
import pytest

from megarl.data.packing import MAX_KARMARKAR_KARP, exchange_items, greedy, karmarkar_karp, partition

pytestmark = pytest.mark.alone


def loads(costs, owner, bins):
    return np.bincount(owner, weights=costs, minlength=bins)


def test_karmarkar_karp_by_hand():
    # Karmarkar and Karp's example: greedy splits 8 7 6 5 4 into 17 and 13, differencing into 16 and 14.
    owner = karmarkar_karp(np.array([8.0, 7.0, 6.0, 5.0, 4.0]), 2)
    parts = [np.flatnonzero(owner == part).tolist() for part in range(2)]
    assert sorted(parts) == [[0, 2], [1, 3, 4]]


def test_greedy_by_hand():
    assert greedy(np.array([4.0, 8.0, 7.0, 5.0, 6.0]), 2).tolist() == [0, 0, 1, 0, 1]  # 17 to 13


def test_exchange_items_by_hand():
    # 17 and 13: exchanging 8 for 6 closes the gap of 4.
    owner = exchange_items(np.array([8.0, 5.0, 4.0, 7.0, 6.0]), np.array([0, 0, 0, 1, 1]), 2)
    assert loads(np.array([8.0, 5.0, 4.0, 7.0, 6.0]), owner, 2).tolist() == [15, 15]
    # 9 and 1: only moving the 4 helps.
    assert exchange_items(np.array([5.0, 4.0, 1.0]), np.array([0, 0, 1]), 2).tolist() == [0, 1, 1]
    # An optimal split stays.
    assert exchange_items(np.array([5.0, 1.0]), np.array([0, 1]), 2).tolist() == [0, 1]
    assert exchange_items(np.array([5.0, 1.0]), np.array([0, 0]), 1).tolist() == [0, 0]


def test_partition_is_better_than_greedy():
    rng = np.random.default_rng(1)
    gains = []
    for _ in range(40):
        costs, bins = rng.lognormal(0.0, 0.8, rng.integers(30, 200)), int(rng.integers(2, 12))
        owner = partition(costs, bins)
        assert owner.shape == costs.shape and owner.min() >= 0 and owner.max() < bins
        gains.append(loads(costs, greedy(costs, bins), bins).max() / loads(costs, owner, bins).max())
    assert np.mean(gains) > 1.0 and min(gains) > 0.97


@pytest.mark.parametrize("seed", range(12))
def test_exchanges_are_about_as_even_as_karmarkar_karp(seed):
    """Covers more items than Karmarkar-Karp handles, and few items per part, where balance is hard."""
    rng = np.random.default_rng(seed)
    costs = rng.uniform(2.0, 8.0, 900) if seed % 2 else rng.lognormal(0.0, 1.0, 900)
    bins = int(rng.integers(2, 450))
    first, owner = greedy(costs, bins), partition(costs, bins)
    assert len(costs) > MAX_KARMARKAR_KARP and np.array_equal(owner, partition(costs.copy(), bins))
    assert owner.shape == costs.shape and owner.min() >= 0 and owner.max() < bins
    max_load = loads(costs, owner, bins).max()
    assert max_load <= loads(costs, first, bins).max() * (1 + 1e-9)
    assert max_load <= 1.005 * loads(costs, karmarkar_karp(costs, bins), bins).max()


def test_items_are_alone_with_enough_parts():
    for number in (5, MAX_KARMARKAR_KARP + 5):
        for bins in (number, 2 * number):
            owner = partition(np.random.default_rng(2).uniform(1.0, 9.0, number), bins)
            assert len(set(owner.tolist())) == number
    assert partition(np.array([]), 3).tolist() == []
