"""Rewards that are the same within each prompt are said of algorithms that compare them, and of no others."""

from __future__ import annotations

from typing import Any

import pytest

from megarl.config import from_dict
from megarl.controllers.controller import load_requirements
from megarl.observe.metrics import ZeroSpreadWarning

pytestmark = pytest.mark.alone


def lines(shares: list[float | None], **config: Any) -> dict[int, str]:
    """What is said, by step. shares: of prompts whose samples all have the same reward; None where none has any."""
    spread = ZeroSpreadWarning(load_requirements(from_dict({"algorithm": "grpo", **config})))
    steps = [
        {} if share is None else {"rollout/zero_spread_frac": share, "rollout/reward_mean": 0.25} for share in shares
    ]
    said = {step: spread.check(step, metrics) for step, metrics in enumerate(steps, 1)}
    return {step: line for step, line in said.items() if line}


def test_three_steps_in_a_row_are_said_once_with_the_remedy() -> None:
    (result,) = lines([1.0] * 6).items()
    assert result[0] == 3
    for words in ("step 3: for 3 steps", "mean 0.25", "nothing is learned", "easier prompts", "algorithm=dapo"):
        assert words in result[1]


def test_a_step_in_which_samples_differ_begins_the_count_anew() -> None:
    assert list(lines([1.0, 1.0, 0.9, 1.0, 1.0])) == []
    assert list(lines([1.0, 1.0, 1.0, 0.9, 1.0, 1.0, 1.0, 1.0])) == [3, 7]


def test_a_step_without_rewards_says_nothing() -> None:
    assert list(lines([1.0, None, 1.0, 1.0])) == [4]


@pytest.mark.parametrize("algorithm", ["grpo", "dr_grpo", "rloo", "opo", "reinforce_pp_baseline", "gspo", "dapo"])
def test_of_those_that_compare_samples(algorithm: str) -> None:
    (line,) = lines([1.0] * 3, algorithm=algorithm).values()
    assert ("algorithm=dapo" in line) == (algorithm != "dapo")


@pytest.mark.parametrize("algorithm", ["ppo", "vapo", "pf_ppo", "reinforce_pp", "remax", "distill", "generate", "sft"])
def test_not_of_those_that_learn_from_something_else(algorithm: str) -> None:
    assert not lines([1.0] * 5, algorithm=algorithm)
