"""Roles that are trained: the rates of their updates, and numbers that are not finite."""

from __future__ import annotations

from math import cos, pi
from typing import Any

import pytest


def test_the_schedule_is_over_the_updates_of_the_role(units: dict[str, Any]) -> None:
    """Five, two of them warm-up: a cosine on a line that ends at 6, whatever else there is to a run."""
    expected = [0.5, 1.0] + [0.5 + 0.5 * cos(pi * k / 4) for k in (1, 2, 3)]
    assert units["training"]["rates"] == pytest.approx(expected)


def test_skipped_updates_in_a_row_are_reported_with_the_reason(units: dict[str, Any]) -> None:
    before, metrics, (first, said), after, again, still = units["training"]["in_vain"]
    assert before is None and metrics["guards/actor_consecutive_skips"] == 2 and metrics["actor/skipped"] == 1
    assert first == 3  # the step of the first of them
    assert said.startswith("2 consecutive updates of the actor were skipped since step 3, because its gradient is")
    for part in (
        "norm ",
        "loss ",
        "largest |reward| 0",
        "largest |advantage| ",
        "run.max_skipped_updates=1",
        "or lower actor_",
    ):
        assert part in said
    assert "\n" not in said
    # Once the model went back the count begins anew.
    assert after is None and "guards/actor_consecutive_skips" not in again and still is None


def test_what_a_loss_is_given_is_finite_where_it_counts(units: dict[str, Any]) -> None:
    inputs = units["training"]["inputs"]
    said = inputs["sequence_reward"]
    assert said.startswith("step 4: not finite: sequence_reward in the batch of the actor, nan in 1 of 2 places; check")
    for name in ("advantages", "returns", "rollout_logprobs"):
        assert f"not finite: {name} in the batch of the actor, inf in " in inputs[name]
    assert units["training"]["harmless"] == 0.0


def test_what_a_model_says_and_what_an_update_makes_of_it_is_finite(units: dict[str, Any]) -> None:
    assert "step 4: not finite: log-probs of the actor, nan in " in units["training"]["outputs"]
    assert "an update of the actor produced weights that are not finite (on rank 0;" in units["training"]["lost"]
