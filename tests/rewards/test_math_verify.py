"""The math-verify rewards: equality, answer extraction, and limits on parsing and evaluation."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import math_verify as library
import pytest
import sympy
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.rewards.math_verify import (
    MAX_BITS,
    MAX_CHARS,
    is_different,
    is_safe_to_evaluate,
    is_safe_to_parse,
    math_verify,
    math_verify_strict,
)
from megarl.rewards.stated_answer import extract_boxed

sys.path.insert(0, str(Path(__file__).parent))
from answer_rollouts import make_rollout  # noqa: E402

pytestmark = pytest.mark.alone

EQUAL = [
    (r"\frac12", r"\frac{1}{2}"),
    ("0.5", "1/2"),
    ("0.5", 0.5),
    (r"\dfrac{2}{4}", "0.5"),
    (r"50\%", "0.5"),
    (r"3\frac{1}{2}", "3.5"),
    ("1,080", "1080"),
    ("1{,}080", 1080),
    (r"5\sqrt{2}", r"\sqrt{50}"),
    (r"\frac{\sqrt3}{3}", r"\frac{1}{\sqrt{3}}"),
    ("x+1", "1+x"),
    ("(x+1)^2", "x^2+2x+1"),
    ("x=5", "5"),
    ("5", "x=5"),
    ("y=2x+3", "y=3+2x"),
    (r"\{2,1\}", r"\{1,2\}"),
    ("1,2", "2,1"),
    (r"5 \text{ or } 6", "6,5"),
    ("(1,2)", "(1, 2)"),
    (r"\left(1,2\right)", "(1,2)"),
    ("[1,2)", "[1,2)"),
    (r"(-\infty, 3]", r"(-\infty,3]"),
    (r"x \le 3", r"x \leq 3"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{bmatrix}1\\2\end{bmatrix}"),
    (r"\text{Monday}", "Monday"),
    ("C", r"\text{(C)}"),
    (r"12\text{ cm}", "12"),
    (r"90^\circ", "90"),
    (r"\$5", "5"),
    ("10!", "3628800"),
    (r"\binom{5}{2}", "10"),
    ("2^{10}", "1024"),
    ("3+4i", "4i+3"),
    (r"1\pm\sqrt{2}", r"1\pm\sqrt{2}"),
    ("-3", "$-3$"),
    ("7", r"thus \boxed{7} it is"),
]
DIFFERENT = [
    ("43", 42),
    ("-42", 42),
    ("4 2", 42),
    ("", 42),
    ("x", 42),
    ("0.333", r"\frac13"),
    ("x-1", "x+1"),
    ("(2,1)", "(1,2)"),
    ("(1,2]", "[1,2)"),
    ("1", "1,2"),
    ("1,2,3", "1,2"),
    (r"\sqrt{2}", r"-\sqrt{2}"),
    ("x<3", "x>3"),
    (r"\text{Monday}", r"\text{Tuesday}"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}2\\1\end{pmatrix}"),
    ("42 or 43", 42),
]


@pytest.mark.parametrize(("answer", "ground_truth"), EQUAL)
def test_rewards_equal_expressions(answer, ground_truth):
    for function in (math_verify, math_verify_strict):
        assert function(make_rollout(f"so it is $\\boxed{{{answer}}}$.", ground_truth)) == 1.0


@pytest.mark.parametrize(("answer", "ground_truth"), DIFFERENT)
def test_gives_nothing_for_different_expressions(answer, ground_truth):
    for function in (math_verify, math_verify_strict):
        assert function(make_rollout(f"so it is $\\boxed{{{answer}}}$.", ground_truth)) == 0.0


@pytest.mark.parametrize(
    ("answer", "correct", "strict"),
    [
        ("The answer is 42.", 1.0, 0.0),
        ("so $x = 42$", 1.0, 0.0),
        ("40, 41 and then 42", 1.0, 0.0),
        ("I choose it! So the answer is 42!", 1.0, 0.0),
        ("the answer is $\\frac{84}{2}$.", 1.0, 0.0),
        (r"\boxed 42", 1.0, 1.0),
        (r"\fbox{42}", 1.0, 1.0),
        (r"\boxed{41}, no: \boxed{42}", 1.0, 1.0),
        (r"\boxed{42}, no: \boxed{41}", 0.0, 0.0),
        (r"\boxed{\boxed{42}}", 1.0, 1.0),
        (r"42 is it not, \boxed{41} is", 0.0, 0.0),
        (r"it is \boxed{42", 0.0, 0.0),
        ("I do not know", 0.0, 0.0),
        ("", 0.0, 0.0),
        ("42" + " and so on" * 40, 0.0, 0.0),  # too far from the end
    ],
)
def test_finds_the_result_in_the_answer(answer, correct, strict):
    assert math_verify(make_rollout(answer, "42")) == correct
    assert math_verify_strict(make_rollout(answer, "42")) == strict


@pytest.mark.parametrize("ground_truth", ["", None, "  "])
def test_refuses_empty_ground_truths(ground_truth):
    with pytest.raises(ValueError, match="is not mathematics that can be parsed"):
        math_verify(make_rollout(r"\boxed{1}", ground_truth))


@settings(max_examples=40)
@given(st.integers(-(10**6), 10**6), st.integers(1, 10**4), st.integers(1, 50))
def test_compares_fractions_by_value(numerator, denominator, times):
    ground_truth = f"{numerator}/{denominator}"
    assert (
        math_verify_strict(
            make_rollout(f"\\boxed{{\\frac{{{numerator * times}}}{{{denominator * times}}}}}", ground_truth)
        )
        == 1.0
    )
    assert (
        math_verify_strict(
            make_rollout(f"\\boxed{{\\frac{{{numerator * times + 1}}}{{{denominator * times}}}}}", ground_truth)
        )
        == 0.0
    )


def test_limits_the_characters_that_are_parsed(monkeypatch):
    calls = []

    def parse(text, **options):
        calls.append(len(text))
        return []

    math_verify(make_rollout("", "42"))  # the ground truth is read once
    monkeypatch.setattr(library, "parse", parse)
    for answer in ("1+" * 10**6, "\\boxed{" + "1+" * 10**6 + "1}", "\\boxed{" + "1" * MAX_CHARS + "}", "$" * 10**6):
        assert math_verify(make_rollout(answer, "42")) == 0.0
    assert calls and max(calls) <= MAX_CHARS + len("\\boxed{}")


@pytest.mark.parametrize(
    "text",
    ["1+" * 150 + "1", "(" * 7 + "1" + ")" * 7, r"\sum_i i", r"\int x", r"\lim_{x\to 0}x", r"\binom{10000}{2}"]
    + [r"\begin{pmatrix}1\end{pmatrix}^{2}", r"\frac{d}{dx}x", r"\det A", r"\iint x", r"{5 \choose 2}"]
    + [r"\binom{\binom{9}{4}}{2}", r"\operatorname{rank} A", r"\begin{vmatrix}1\end{vmatrix}"],
)
def test_does_not_parse_expensive_expressions(text):
    assert not is_safe_to_parse(text)
    assert math_verify(make_rollout(f"\\boxed{{{text}}}", "1")) == 0.0
    assert math_verify(make_rollout(f"\\boxed{{{text}}}", text)) == 1.0 or len(text) > MAX_CHARS or "(" * 7 in text


@pytest.mark.parametrize(
    "text",
    ["x \\in (0,\\infty)", "x \\ne 3", "100!", "n!", r"\binom{n}{2}", "((((((1))))))", "I choose 5!", "by binomials"],
)
def test_parses_safe_expressions(text):
    assert is_safe_to_parse(text)


x, y = sympy.symbols("x y")


def power(base, exponent):
    return sympy.Pow(base, exponent, evaluate=False)


@pytest.mark.parametrize(
    ("expression", "is_safe"),
    [
        (sympy.Integer(2) ** 1000, True),
        (power(sympy.Integer(2), sympy.Integer(2**19)), True),  # 2 has 2 bits: a million bits in all
        (power(sympy.Integer(2), sympy.Integer(2**19 + 1)), False),
        (power(sympy.Integer(9), power(sympy.Integer(9), sympy.Integer(9))), False),
        (power(sympy.Rational(1, 9), power(sympy.Integer(9), sympy.Integer(9))), False),
        (sympy.factorial(1000, evaluate=False), True),
        (sympy.factorial(10**6, evaluate=False), False),
        (sympy.factorial(sympy.factorial(9, evaluate=False), evaluate=False), False),
        (power(x, sympy.Integer(2019)), True),
        (power(x + y, sympy.Integer(999)), True),  # 1000 terms
        (power(x + y, sympy.Integer(1000)), False),
        (power(x + y + 1, sympy.Integer(43)), True),  # C(45, 2) = 990
        (power(x + y + 1, sympy.Integer(44)), False),  # C(46, 2) = 1035
        (power(power(x + y, sympy.Integer(30)) + 1, sympy.Integer(30)), False),
        (power(x + y, sympy.Rational(1999, 2)), False),
        (power(x + y, x), True),
        (sympy.exp(sympy.Integer(100)), True),
        (sympy.exp(sympy.exp(sympy.exp(sympy.Integer(9)))), False),
        (power(sympy.Integer(2), x), True),
        (sympy.Matrix([[x, 1], [2, y]]), True),
        (sympy.Matrix([[power(sympy.Integer(9), sympy.Integer(10**8))]]), False),
        (sympy.Tuple(x, sympy.Float("0.5")), True),
        ("its letters", True),
    ],
)
def test_bounds_evaluation(expression, is_safe):
    assert is_safe_to_evaluate(expression) is is_safe


def test_largest_allowed_power_has_at_most_max_bits():
    assert (3 ** (2**19)).bit_length() <= MAX_BITS and is_safe_to_evaluate(
        power(sympy.Integer(3), sympy.Integer(2**19))
    )


@pytest.mark.parametrize(
    ("left", "right", "expected"),
    [
        (x + 1, 1 + x, False),
        (x + 1, x + 2, True),
        (sympy.sin(x) ** 2 + sympy.cos(x) ** 2, sympy.Integer(1), False),
        (sympy.sqrt(50), 5 * sympy.sqrt(2), False),
        (sympy.Rational(1, 3), sympy.Float("0.333"), True),
        (sympy.Integer(42), x, False),  # it may be a word
        (x * y, sympy.Symbol("xy"), False),
        (sympy.Integer(42), sympy.sin(x), True),
        (sympy.I, -sympy.I, True),
        (sympy.zoo, sympy.Integer(1), False),
        (sympy.Eq(x, 5, evaluate=False), sympy.Integer(6), False),
        (sympy.FiniteSet(1), sympy.FiniteSet(2), False),
        (sympy.FiniteSet(1), sympy.Integer(1), False),
        (sympy.FiniteSet(1, 2), sympy.exp(x), True),
        (sympy.Interval(1, 2), sympy.Integer(1), True),
        (sympy.Tuple(1, 2), sympy.Eq(x, 5, evaluate=False), False),
        (sympy.Integer(1), "2", False),
    ],
)
def test_detects_differences_without_simplifying(left, right, expected):
    assert is_different(left, right) is expected and is_different(right, left) is expected


SLOW = [
    r"\tan(\sin(\frac{12345}{10^{a}+\frac{1}{12345}}-17))",
    r"|2+\cos(i\cdot \pi)-0.5\cdot 12345+e^{12345}|",
    r"\sin(10^{17-x+\log(2)})",
]


@pytest.mark.parametrize("text", SLOW)
@pytest.mark.parametrize("ground_truth", ["42", r"\frac{1}{2}", "x+1", "x^2+2x+1"])
def test_does_not_simplify_slow_expressions(monkeypatch, text, ground_truth):
    monkeypatch.setattr(library, "verify", lambda *args, **options: pytest.fail("asked to simplify"))
    assert math_verify(make_rollout(f"\\boxed{{{text}}}", ground_truth)) == 0.0


def score_fraction(number):
    return math_verify(make_rollout(f"\\boxed{{\\frac{{{2 * number}}}{{2}}}}", str(number)))


def test_runs_in_threads_and_processes_without_signals():
    before = signal.getsignal(signal.SIGALRM)
    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(score_fraction, range(12))) == [1.0] * 12
    assert threading.active_count() >= 1 and signal.getsignal(signal.SIGALRM) is before
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as processes:
        assert list(processes.map(score_fraction, range(3))) == [1.0] * 3


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (r"\boxed{5}", "5"),
        (r"\boxed { 5 }", "5"),
        (r"\boxed{\{1\}}", r"\{1\}"),
        (r"\boxed{\left\{ x }", r"\left\{ x"),
        (r"\boxed{{1}{2}}", "{1}{2}"),
        (r"\boxed5$", "5"),
        (r"\boxed", None),
        (r"\boxed{5", None),
        ("boxed{5}", None),
        (r"\fbox{1} \boxed{2}", "2"),
        (r"\boxed{1} \fbox{2}", "2"),
        (r"\boxed{}", ""),
    ],
)
def test_extracts_boxed_text(text, content):
    assert extract_boxed(text) == content


def test_rewards_gsm8k_answers():
    """Includes every twentieth ground truth of the data set if MEGARL_GSM8K names its folder."""
    folder = os.environ.get("MEGARL_GSM8K")
    ground_truths = ["72", "1,080", "0", "-5", "109,200,000"]
    if folder:
        lines = (Path(folder) / "test.jsonl").read_text(encoding="utf-8").splitlines()[::20]
        ground_truths += [json.loads(line)["answer"].partition("####")[2].strip() for line in lines]
    for ground_truth in ground_truths:
        plain = ground_truth.replace(",", "")
        assert math_verify(make_rollout(f"... #### {ground_truth}\n\\boxed{{{ground_truth}}}", plain)) == 1.0, (
            ground_truth
        )
        assert math_verify(make_rollout(f"The final answer is {ground_truth}.", plain)) == 1.0, ground_truth
        assert math_verify(make_rollout(f"\\boxed{{{int(plain) + 1}}}", plain)) == 0.0, ground_truth
