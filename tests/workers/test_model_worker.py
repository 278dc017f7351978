"""Trained roles: learning rates of their updates, and non-finite values."""

from __future__ import annotations

from math import cos, pi
from typing import Any

import pytest


def test_lr_schedule_spans_the_roles_updates(units: dict[str, Any]) -> None:
    """Five updates, two of them warm-up, then a cosine."""
    expected = [0.5, 1.0] + [0.5 + 0.5 * cos(pi * k / 4) for k in (1, 2, 3)]
    assert units["training"]["rates"] == pytest.approx(expected)


def test_consecutive_skipped_updates_are_reported(units: dict[str, Any]) -> None:
    before, metrics, (first, message), after, second_metrics, final = units["training"]["skip_results"]
    assert before is None and metrics["guards/actor_consecutive_skips"] == 2 and metrics["actor/skipped"] == 1
    assert first == 3  # the step of the first skip
    assert message.startswith("2 consecutive updates of the actor were skipped since step 3, because its gradient is")
    for part in (
        "norm ",
        "loss ",
        "largest |reward| 0",
        "largest |advantage| ",
        "run.max_skipped_updates=1",
        "or lower actor_",
    ):
        assert part in message
    assert "\n" not in message
    # A rollback resets the count.
    assert after is None and "guards/actor_consecutive_skips" not in second_metrics and final is None


def test_nonfinite_loss_inputs_raise(units: dict[str, Any]) -> None:
    inputs = units["training"]["inputs"]
    message = inputs["sequence_reward"]
    assert message.startswith(
        "step 4: not finite: sequence_reward in the batch of the actor, nan in 1 of 2 places; check"
    )
    for name in ("advantages", "returns", "rollout_logprobs"):
        assert f"not finite: {name} in the batch of the actor, inf in " in inputs[name]
    assert units["training"]["unused_skipped"] == 0.0


def test_nonfinite_outputs_or_weights_raise(units: dict[str, Any]) -> None:
    assert "step 4: not finite: log-probs of the actor, nan in " in units["training"]["outputs"]
    assert "an update of the actor produced weights that are not finite (on rank 0;" in units["training"]["underflow"]
