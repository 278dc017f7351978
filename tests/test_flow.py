"""The loop itself, without the workers of a run."""

from __future__ import annotations

from typing import Any


def test_steps_in_which_no_prompts_answers_differ_are_an_alarm(units: dict[str, Any]) -> None:
    (line,) = units["repeating"]
    assert line.startswith("step 3: for 3 steps all answers to each prompt have had the same reward")
