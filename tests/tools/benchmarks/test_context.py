"""`bench.py context`: modelled steps with static and dynamic context parallelism."""

from __future__ import annotations

import pytest
from benchmarks import context

from megarl.models.flops import active_params, quadratic_cost
from megarl.models.registry import load_hf_config
from megarl.models.step_time import GPUSpec, context_costs

pytestmark = pytest.mark.alone


def test_modelled_seconds_match_hand_computed_values() -> None:
    """Two sequences of 1,000 and 3,001 tokens, one after another on two ranks: 3,004 tokens with padding."""
    hf, machine = load_hf_config(context.COSTS), GPUSpec()
    plan = context.plan_static([1000, 3001], 2, 2, 1600, quadratic_cost(hf))
    assert plan == [[[1], [0]]] * 2 and plan.widths == (2, 2)
    seconds = context.model_seconds(hf, [1000, 3001], plan, tp=1)
    tokens = 1000 + 3004 + quadratic_cost(hf) * (1000**2 + 3004**2)
    assert seconds["computing"] == pytest.approx(tokens / 2 * 6 * active_params(hf) / machine.flops)
    keys_and_values = 2 * 4 * 128 * 2  # bytes of a token and layer, of which a rank has half
    sent = 3 * 48 * 4004 / 2 * keys_and_values
    assert seconds["context"] == pytest.approx(machine.transfer_seconds(sent, crosses_nodes=False))
    assert seconds["launches"] == pytest.approx(2 * 48 * 2.5e-3)
    costs = dict(context_costs(hf, (1, 2), 1, 8))
    linear = 4004 / 2 * 6 * active_params(hf) / machine.flops
    assert costs == {1: 0.0, 2: pytest.approx(seconds["context"] / linear)}


def test_communication_between_nodes_costs_more() -> None:
    hf = load_hf_config(context.COSTS)
    near, far = (dict(context_costs(hf, (1, 2, 4, 8), tp, 8)) for tp in (1, 4))
    assert near[2] == far[2] and near[4] < far[4] and near[8] < far[8] and 0.0 < near[8] < 0.2
