"""Micro-batch plans with dynamic context parallelism."""

import numpy as np
import pytest

from megarl.data.packing import MicroBatchPlan, plan_micro_batches
from megarl.parallel.context_parallel import context_sizes

pytestmark = pytest.mark.alone


def width_costs(cp: int) -> dict[int, float]:
    return {size: 0.02 * (size - 1) for size in context_sizes(cp)}


def step_cost(plan: MicroBatchPlan, costs: np.ndarray) -> float:
    """Return the cost of the slowest micro-batches, with that of communication."""
    slowest = [max(costs[row[number]].sum() for row in plan) for number in range(len(plan.widths))]
    factors = [(1 + width_costs(width)[width]) / width for width in plan.widths]
    return float(np.dot(slowest, factors))


def test_plan_by_hand():
    # With a budget of 10, 31 tokens need four ranks and 18 two, beside which 9 + 8 fit on two. The others fit on one.
    plan = plan_micro_batches([6, 18, 9, 31, 8, 6, 6, 6], dp=4, token_budget=10, widths=width_costs(4))
    assert plan.widths == (4, 2, 1)
    assert plan == [[[3], [1], [0]], [[3], [1], [5]], [[3], [2, 4], [6]], [[3], [2, 4], [7]]]
    assert list(plan.micro_batches()) == [(0, [3]), (0, [1]), (0, [0]), (1, [5]), (2, [2, 4]), (2, [6]), (3, [7])]
    # Three sequences would leave a rank idle, so all ranks compute each.
    assert plan_micro_batches([8, 8, 8], dp=4, token_budget=10, widths=width_costs(4)).widths == (4,)


@pytest.mark.parametrize("seed", range(60))
def test_plan_is_complete_aligned_and_within_budget(seed):
    rng = np.random.default_rng(seed)
    cp, dp, number = int(rng.choice([2, 4, 6, 8])), int(rng.integers(1, 4)), int(rng.integers(0, 80))
    budget, multiple, minimum = int(rng.integers(20, 100)), int(rng.integers(1, 4)), int(rng.integers(1, 6))
    lengths = np.exp(rng.normal(3, 1.2, number)).astype(np.int64) + 1
    group = rng.integers(0, 30, number) if seed % 3 == 0 else np.arange(number)
    homes = rng.integers(-1, dp * cp, number) if seed % 2 else None
    plan = plan_micro_batches(
        *(lengths, dp * cp, budget, 0.01, multiple, group, homes, minimum),
        is_lockstep=seed % 4 < 2,
        widths=width_costs(cp),
    )
    assert {len(row) for row in plan} == {len(plan.widths)} and len(plan) == dp * cp
    assert len(plan.widths) % multiple == 0 and len(plan.widths) >= minimum
    assert sorted(i for _, micro in plan.micro_batches() for i in micro) == list(range(number))
    for row in range(dp * cp):
        for micro, width, first in zip(plan[row], plan.widths, plan[row - row % cp], strict=True):
            assert width in context_sizes(cp)
            assert width < cp or micro == first
            assert lengths[micro].sum() <= width * budget or len(set(group[micro])) == 1
            if len(micro) and width < cp:  # of several micro-batches, some could be narrower
                assert lengths[micro].sum() <= width * budget
    for number, width in enumerate(plan.widths):
        for row, micros in enumerate(plan):
            assert micros[number] == plan[row - row % width][number]
    together = [{int(group[i]) for i in micro} for _, micro in plan.micro_batches()]
    assert sum(map(len, together)) == len(set().union(*together))  # each group is in one micro-batch


@pytest.mark.parametrize("ranks, number, median", [(16, 256, 3000), (16, 256, 8000), (32, 512, 8000), (32, 64, 500)])
def test_plan_is_balanced_and_no_slower_than_with_static_sizes(ranks, number, median):
    """Log-normal lengths up to 131k tokens, CP 8, 16384 tokens per rank, on Qwen3-30B-A3B."""
    rng, cp, budget, quadratic = np.random.default_rng(5), 8, 16384, 1 / 30_000
    lengths = np.minimum(131_072, rng.lognormal(np.log(median), 1.0, number).astype(np.int64) + 64)
    costs = lengths + quadratic * lengths**2.0
    plan = plan_micro_batches(lengths, ranks, budget, quadratic, widths=width_costs(cp))
    whole = plan_micro_batches(lengths, ranks // cp, budget * cp, quadratic)
    static = MicroBatchPlan((row for row in whole for _ in range(cp)), (cp,) * len(whole[0]))
    assert len(set(plan.widths)) > 1 or lengths.max() <= budget
    assert list(plan.widths) == sorted(plan.widths, reverse=True)
    bound = max(costs.sum() / ranks, costs.max() / cp)
    assert step_cost(plan, costs) <= min(step_cost(static, costs), 1.15 * bound)


def test_uncommon_widths_raise():
    with pytest.raises(ValueError, match="must divide the next, and the last the 6 ranks"):
        plan_micro_batches([1], 6, 10, widths=width_costs(4))


def test_common_tokens_are_computed_once():
    """Four responses of 30 tokens to a prompt of 60 are 180 tokens, or 2 x 120 on two ranks."""
    order = np.arange(4)
    shared = np.where(order > 0, 60, 0)
    plan = plan_micro_batches([90] * 4, 2, 150, common=(order, shared), widths=width_costs(2))
    assert plan.widths == (2,) and plan == [[[0, 1, 2, 3]]] * 2
    # A group of 330 tokens needs three ranks, so four.
    pair = plan_micro_batches([90, 90, 150], 4, 150, group=[0, 0, 0], widths=width_costs(4))
    assert pair.widths == (4,) and pair == [[[0, 1, 2]]] * 4
