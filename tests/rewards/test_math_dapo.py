"""DAPO's reward of +1 or -1 for what follows the last `Answer:`."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.rewards.math_dapo import math_dapo

sys.path.insert(0, str(Path(__file__).parent))
from answer_rollouts import make_rollout  # noqa: E402

pytestmark = pytest.mark.alone


@pytest.mark.parametrize(
    ("answer", "ground_truth", "reward"),
    [
        ("so\nAnswer: 34", "34", 1.0),
        ("Answer: 34", 34, 1.0),
        ("answer : 34", "34", 1.0),
        ("ANSWER:34.", "34", 1.0),
        ("Answer: $34$", "34", 1.0),
        ("Answer: $$34$$", "34", 1.0),
        ("**Answer:** 34", "34", 1.0),
        ("**Answer: 34**", "34", 1.0),
        (r"Answer: \boxed{34}", "34", 1.0),
        (r"Answer: $\boxed{34}$.", "34", 1.0),
        ("Answer: x = 34", "34", 1.0),
        ("Answer: $n=2m=34$", "34", 1.0),
        ("Answer: 1,080", "1080", 1.0),
        ("Answer: 1{,}080", "1080", 1.0),
        (r"Answer: \$34", "34", 1.0),
        ("Answer: 34 dollars", "34", 1.0),
        (r"Answer: 34\text{ cm}^2", "34", 1.0),
        (r"Answer: 34^\circ", "34", 1.0),
        ("Answer: 34.0", "34", 1.0),
        ("Answer: -34", "-34", 1.0),
        (r"Answer: \dfrac{1}{2}", r"\frac{1}{2}", 1.0),
        (r"Answer: \text{blue}", "blue", 1.0),
        ("Answer: 33\nAnswer: 34", "34", 1.0),
        ("Answer: 34\nAnswer: 33", "34", -1.0),
        ("Answer: 34 or 35", "34", -1.0),
        ("Answer: 340", "34", -1.0),
        ("Answer: -34", "34", -1.0),
        ("Answer:\n34", "34", 1.0),
        ("Answer:\n\nThe number is 34", "34", -1.0),
        ("Answer: 3 4", "34", -1.0),
        ("Answer: 3 = 34", "34", -1.0),
        ("Answer: 33 + 1 = 34", "34", 1.0),
        ("The answer is 34", "34", -1.0),
        (r"\boxed{34}", "34", -1.0),
        ("34", "34", -1.0),
        ("", "34", -1.0),
        ("Answer:", "34", -1.0),
        ("Answer: 34" + " and so on" * 30, "34", -1.0),  # more than 300 characters before the end
        (r"Answer: \boxed{34", "34", -1.0),
    ],
)
def test_reads_the_last_answer(answer, ground_truth, reward):
    assert math_dapo(make_rollout(answer, ground_truth)) == reward


@pytest.mark.parametrize("ground_truth", ["", None, " ", "$$"])
def test_refuses_empty_ground_truths(ground_truth):
    with pytest.raises(ValueError, match="the ground truth is empty"):
        math_dapo(make_rollout("Answer: 1", ground_truth))


@given(
    st.integers(-(10**9), 10**9),
    st.integers(-(10**9), 10**9),
    st.sampled_from(["{}", "${}$", "\\boxed{{{}}}", "x = {}"]),
)
def test_rewards_only_the_same_number(number, ground_truth, form):
    answer = f"thus\n\nAnswer: {form.format(number)}"
    assert math_dapo(make_rollout(answer, str(ground_truth))) == (1.0 if number == ground_truth else -1.0)
    assert math_dapo(make_rollout(answer, number)) == 1.0
