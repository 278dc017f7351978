"""The training loop without workers."""

from __future__ import annotations

from typing import Any


def test_alarms_when_rewards_are_equal_within_every_group(units: dict[str, Any]) -> None:
    (line,) = units["zero_spread_alarms"]
    assert line.startswith("step 3: for 3 steps all answers to each prompt have had the same reward")
