"""Every reward function parses the forms in which policies state a final answer."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from megarl.rewards.arithmetic import arithmetic
from megarl.rewards.choice import choice
from megarl.rewards.code.grading import extract_code
from megarl.rewards.gsm8k import gsm8k, gsm8k_strict
from megarl.rewards.math_dapo import math_dapo
from megarl.rewards.math_verify import math_verify, math_verify_strict
from megarl.rewards.squad import exact_match

sys.path.insert(0, str(Path(__file__).parent))
from answer_rollouts import make_rollout  # noqa: E402

pytestmark = pytest.mark.alone

RESULTS = ["@", "**@**", "$@$", r"\(@\)", r"\[@\]", "$$@$$", r"\boxed{@}", r"$\boxed{@}$.", "@."]
"""Ways to write a result; `@` stands for the result."""
PLACES = {
    "Answer: @": {math_dapo, math_verify, gsm8k, choice},
    "Answer:\n@": {math_dapo, math_verify, gsm8k, choice},
    "**Answer:**\n\n@": {math_dapo, math_verify, gsm8k, choice},
    "**Answer**: @": {math_dapo, math_verify, gsm8k, choice},
    "The final answer is @": {math_verify, gsm8k, choice},
    "<think>Is it 5? The answer is A.</think><answer>@</answer>": {math_verify, gsm8k, gsm8k_strict, choice},
    "<think>\\boxed{5}</think>\n<answer>\n@\n</answer>": {math_verify, gsm8k, gsm8k_strict, choice},
    "#### @": {math_verify, gsm8k, gsm8k_strict},
    "####\n@": {math_verify, gsm8k, gsm8k_strict},
}
"""Where the result stands, and which functions find it there."""
CASES = [
    pytest.param(placement.replace("@", result), function, id=f"{placement.replace('@', result)}-{function.__name__}")
    for placement, functions in PLACES.items()
    for result in RESULTS
    for function in sorted(functions, key=lambda function: str(function.__name__))
]


@pytest.mark.parametrize(("form", "function"), CASES)
def test_reward_functions_parse_each_answer_form(form, function):
    wrong_reward = -1.0 if function is math_dapo else 0.0
    correct, incorrect = ("B", "D") if function is choice else ("42", "43")
    assert function(make_rollout(form.replace("@", correct), correct)) == 1.0
    assert function(make_rollout(form.replace("@", correct), incorrect)) == wrong_reward


MATH = [
    # (boxed answer, ground truth, reward)
    ("18.90", r"\$18.90", 1.0),
    (r"\$18.90", r"\$18.90", 1.0),
    ("18.9", r"\$18.90", 1.0),
    ("18.09", r"\$18.90", 0.0),
    (r"\$18.90", "18.90", 1.0),
    ("36", r"\$36", 1.0),
    ("1000", r"\$1,\!000", 1.0),
    (r"\$1,000", r"\$1,\!000", 1.0),
    ("32348", r"\$32,\!348", 1.0),
    (".35", r"\$.35", 1.0),
    ("1000", r"$\$1000$", 1.0),
    ("Evelyn", r"\text{Evelyn}", 1.0),
    (r"\text{Lenvey}", r"\text{Evelyn}", 0.0),
    ("[-2,7]", r"x \in [-2,7]", 1.0),
    ("(-2,7)", r"x \in [-2,7]", 0.0),
    ("42.", "42", 1.0),
    ("**42**", "42", 1.0),
    (r"42\,000", "42000", 1.0),
    (r"42\ 000", "42000", 1.0),
    ("42 000", "42000", 1.0),
    ("42 00", "4200", 0.0),
    ("stop", "post", 0.0),
    ("post", "post", 1.0),
    ("Post", "post", 1.0),
    (r"\text{post}", "post", 1.0),
    ("stop", r"\text{post}", 0.0),
    ("seat", "east", 0.0),
    ("zyx", "xyz", 1.0),
    ("ba", "ab", 1.0),
    ("cab", "abc", 1.0),
    ("3=5", "5", 0.0),
    ("2+2=5", "5", 0.0),
    ("x=3=5", "5", 0.0),
    ("3=x=5", "5", 0.0),
    ("2+3=5", "5", 1.0),
    ("x=5", "5", 1.0),
    ("x=2+3=5", "5", 1.0),
    (r"\frac{10}{2}=5", "5", 1.0),
    (r"\frac13=0.33", "0.33", 1.0),
    (r"50\%=0.5", "0.5", 1.0),
]


@pytest.mark.parametrize(("answer", "ground_truth", "reward"), MATH)
def test_math_verify_compares_boxed_answers(answer, ground_truth, reward):
    for function in (math_verify, math_verify_strict):
        assert function(make_rollout(f"so it is $\\boxed{{{answer}}}$.", ground_truth)) == reward


@pytest.mark.parametrize(
    "answer",
    [
        r"It costs \$18.90.",
        r"The answer is $\$18.90$.",
        "So $18.90.",
        r"The answer is \(18.90\).",
        "####18.9",
        "`18.90`",
    ],
)
def test_math_verify_reads_unboxed_currency(answer):
    assert math_verify(make_rollout(answer, r"\$18.90")) == 1.0
    assert math_verify(make_rollout(answer, r"\$18.91")) == 0.0


GSM8K = [
    # (answer, stated number)
    ("#### 42 000", "42000"),
    (r"\boxed{42\,000}", "42000"),
    (r"\boxed{42{,}000}", "42000"),
    (r"\boxed{\text{42}}", "42"),
    (r"\boxed{42\text{ m2}}", "42"),
    (r"\boxed{\mathrm{-42}}", "-42"),
    (r"\fbox{42}", "42"),
    (r"\boxed 42", "42"),
    ("#### - 42", "-42"),
    ("#### 40+2=42", "42"),
    ("#### 42 = 6 * 7", "42"),
    ("<answer>42</answer> of 100", "42"),
    ("<answer>40</answer> \\boxed{42}", "42"),
    ("#### 3=42", None),
    (r"\boxed{3=42}", None),
    (r"\boxed{40} <answer>none</answer>", None),
]


@pytest.mark.parametrize(("answer", "number"), GSM8K)
def test_gsm8k_extracts_the_stated_number(answer, number):
    for ground_truth in ("42", "-42", "42000", "40", "3"):
        for function in (gsm8k, gsm8k_strict):
            assert function(make_rollout(answer, ground_truth)) == float(ground_truth == number)


CHOICES = [
    ("Therefore B is correct.", "B"),
    ("B is the correct answer", "B"),
    ("A is incorrect and B is correct.", "B"),
    ("Option A is incorrect, so B is correct.", "B"),
    ("Answer: B\n\nOption A is wrong because it is", "B"),
    ("Answer: B. Note that A is true as well.", "B"),
    ("The answer is not A, it is B.", "B"),
    ("**B) Paris**", "B"),
    ("<answer> B. Paris </answer>", "B"),
    ("<answer>b</answer>", "B"),
    (r"The answer is \(\text{B}\).", "B"),
    ("b.", "B"),
    ("B is incorrect.", None),
    ("Therefore B is not correct.", None),
    ("Neither A nor B is correct.", None),
    ("I wonder whether B is correct", None),
    ("The answer is not A.", None),
    (r"Let \(A\) be the area of it", None),
    ("A correct answer needs thought", None),
    ("<think>The answer is B</think><answer>Paris</answer>", None),
]


@pytest.mark.parametrize(("answer", "letter"), CHOICES)
def test_choice_extracts_the_stated_letter(answer, letter):
    for ground_truth in "ABCDE":
        assert choice(make_rollout(answer, ground_truth)) == float(ground_truth == letter)


def test_other_functions_parse_common_forms():
    """Exact match ignores punctuation, arithmetic reads the last number, and code comes from fences or tags."""
    for answer in ("**Paris**", "<answer>**Paris**.</answer>", "$Paris$", r"\(Paris\)"):
        assert exact_match(make_rollout(answer, "Paris")) == 1.0
    for answer in ("It is **72**.", r"It is \(72\).", "It is $72$.", "It is\n72."):
        assert arithmetic(make_rollout(answer, "72")) == 1.0
    assert extract_code("<think>x</think><answer>\nx = 1\n</answer>") == "x = 1"
    assert extract_code("<answer>```python\nx = 1\n```</answer>").strip() == "x = 1"
