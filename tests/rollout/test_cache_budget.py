"""`CacheBudget`: how responses change it, which conversations fit, and when a prefix loses its place."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megarl.engine.engine_protocol import EngineLoad
from megarl.rollout.cache_budget import UNLIMITED, CacheBudget, PrefillCost

LOAD = EngineLoad(num_running=10, capacity=1000)
TOKENS = [100] * 10


def run_round(budget: CacheBudget, num_lost: int, tokens: list[int] = TOKENS, load: EngineLoad = LOAD) -> CacheBudget:
    """Return the budget after a round in which the last `num_lost` responses have lost their prefix."""
    size = max(8, budget.count_fitting(tokens))
    for number in range(size):
        assert budget.num_responses == number
        budget = budget.update(number >= size - num_lost, tokens, load)
    assert (budget.num_responses, budget.num_lost) == (0, 0)
    return budget


def test_is_unlimited_until_prefixes_are_lost() -> None:
    assert run_round(CacheBudget(), 0) == CacheBudget(UNLIMITED)
    assert CacheBudget().count_fitting([10**9] * 5) == 5
    # Half of the share of losses, from what was in use.
    assert run_round(CacheBudget(), 4).tokens == pytest.approx(1000 * (1 - 0.5 * 0.4))


def test_follows_losses_and_recovers() -> None:
    limited = CacheBudget(800.0)
    assert limited.count_fitting(TOKENS) == 8
    assert run_round(limited, 2).tokens == pytest.approx(800 * (1 - 0.5 * 2 / 8))
    assert run_round(limited, 0).tokens == pytest.approx(800 * 1.05)
    assert run_round(limited, 0, TOKENS[:8]).tokens == 800  # nobody waits for it
    assert run_round(limited, 0, load=replace(LOAD, num_waiting=1)).tokens == 800  # the engine has enough


def test_stays_above_half_of_the_cache() -> None:
    budget = CacheBudget(800.0)
    for _ in range(20):
        budget = run_round(budget, 8)
    assert budget.tokens == 500


def test_needs_the_capacity_of_the_cache() -> None:
    budget = CacheBudget()
    for _ in range(100):
        budget = budget.update(True, TOKENS, EngineLoad())
    assert budget.tokens == UNLIMITED


@pytest.mark.parametrize(("tokens", "count"), [([], 0), ([10**9], 1), ([10**9, 1], 1), ([400, 401, 1], 1)])
def test_the_oldest_conversation_always_fits(tokens: list[int], count: int) -> None:
    assert CacheBudget(800.0).count_fitting(tokens) == count


def test_patience_is_a_quarter_of_the_time_to_compute_the_cache_again() -> None:
    cost = PrefillCost()
    assert cost.patience_s(1000) == 0
    cost = cost.update(EngineLoad(prefilled=10_000, prefill_s=90.0))  # of which the start took most
    assert cost.patience_s(1000) == 0
    cost = cost.update(EngineLoad(prefilled=12_000, prefill_s=110.0))
    assert cost.patience_s(1000) == pytest.approx(2.5)
    cost = cost.update(EngineLoad(prefilled=12_100, prefill_s=120.0))  # a small step costs more per token
    cost = cost.update(EngineLoad(prefilled=14_000, prefill_s=150.0))
    assert cost.patience_s(1000) == pytest.approx(2.5)
    restarted = cost.update(EngineLoad(prefilled=100, prefill_s=1.0))
    assert restarted.update(EngineLoad(prefilled=2100, prefill_s=3.0)).token_s == pytest.approx(1e-3)
