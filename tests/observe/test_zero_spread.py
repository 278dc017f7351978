"""`ZeroSpreadWarning`: equal rewards within each group, for algorithms that compare samples."""

from __future__ import annotations

from typing import Any

import pytest

from megarl.config import from_dict
from megarl.controllers.controller import load_requirements
from megarl.observe.metrics import ZeroSpreadWarning

pytestmark = pytest.mark.alone


def warnings_by_step(fractions: list[float | None], **config: Any) -> dict[int, str]:
    """Return the warnings by step. fractions: groups with zero reward spread, by step; None without rewards."""
    spread = ZeroSpreadWarning(load_requirements(from_dict({"algorithm": "grpo", **config})))
    steps = [
        {} if fraction is None else {"rollout/zero_spread_frac": fraction, "rollout/reward_mean": 0.25}
        for fraction in fractions
    ]
    messages = {step: spread.check(step, metrics) for step, metrics in enumerate(steps, 1)}
    return {step: line for step, line in messages.items() if line}


def test_warns_once_after_three_consecutive_steps() -> None:
    (result,) = warnings_by_step([1.0] * 6).items()
    assert result[0] == 3
    for words in ("step 3: for 3 steps", "mean 0.25", "nothing is learned", "easier prompts", "algorithm=dapo"):
        assert words in result[1]


def test_nonzero_spread_resets_the_count() -> None:
    assert list(warnings_by_step([1.0, 1.0, 0.9, 1.0, 1.0])) == []
    assert list(warnings_by_step([1.0, 1.0, 1.0, 0.9, 1.0, 1.0, 1.0, 1.0])) == [3, 7]


def test_steps_without_rewards_do_not_count() -> None:
    assert list(warnings_by_step([1.0, None, 1.0, 1.0])) == [4]


@pytest.mark.parametrize("algorithm", ["grpo", "dr_grpo", "rloo", "opo", "reinforce_pp_baseline", "gspo", "dapo"])
def test_warns_for_algorithms_that_compare_samples(algorithm: str) -> None:
    (line,) = warnings_by_step([1.0] * 3, algorithm=algorithm).values()
    assert ("algorithm=dapo" in line) == (algorithm != "dapo")


@pytest.mark.parametrize("algorithm", ["ppo", "vapo", "pf_ppo", "reinforce_pp", "remax", "distill", "generate", "sft"])
def test_other_algorithms_do_not_warn(algorithm: str) -> None:
    assert not warnings_by_step([1.0] * 5, algorithm=algorithm)
