"""Hostile answers neither break nor stall a reward function, nor earn more than a wrong answer."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megarl.rewards.choice import choice
from megarl.rewards.format_reward import format_reward, format_reward_opened
from megarl.rewards.gsm8k import gsm8k, gsm8k_strict
from megarl.rewards.math_dapo import math_dapo
from megarl.rewards.math_verify import math_verify, math_verify_strict
from megarl.rewards.squad import exact_match, f1

sys.path.insert(0, str(Path(__file__).parent))
from answer_rollouts import HOSTILE, make_rollout  # noqa: E402

pytestmark = pytest.mark.alone

FUNCTIONS = {
    choice: "B",
    exact_match: "Paris",
    f1: "Paris",
    format_reward: None,
    format_reward_opened: None,
    gsm8k: "42",
    gsm8k_strict: "42",
    math_dapo: "42",
    math_verify: "42",
    math_verify_strict: r"\frac{1}{3}",
}
CASES = [
    pytest.param(function, ground_truth, id=f"{number} {getattr(function, '__name__', 'partial')}")
    for number, (function, ground_truth) in enumerate(FUNCTIONS.items())
]


@pytest.mark.parametrize(("function", "ground_truth"), CASES)
@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_answers_earn_nothing(function, ground_truth, text):
    assert function(make_rollout(HOSTILE[text], ground_truth)) in (0.0, -1.0)


PIECES = (
    r"\boxed{ } { $ <answer> </answer> <think> </think> #### answer: (B) A 1 42 \frac ^ ! - . , \ \text{ % = x ** Paris"
)
PIECES = [*PIECES.split(), "\n", " ", "\x00", "the "]


@settings(max_examples=60)
@given(st.lists(st.sampled_from(PIECES), max_size=25).map("".join) | st.text(max_size=200))
@example("\\boxed")
@example("\\boxed{42}\\boxed{")
def test_any_answer_gets_a_reward_in_range(text):
    for function, ground_truth in FUNCTIONS.items():
        reward = function(make_rollout(text, ground_truth))
        assert type(reward) is float and (-1.0 if function is math_dapo else 0.0) <= reward <= 1.0
