"""The multiple-choice reward, by the letter that an answer states."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.rewards.choice import choice, extract_letter

sys.path.insert(0, str(Path(__file__).parent))
from answer_rollouts import make_rollout  # noqa: E402

pytestmark = pytest.mark.alone


@pytest.mark.parametrize(
    ("answer", "letter"),
    [
        ("B", "B"),
        ("(B)", "B"),
        ("[B].", "B"),
        ("B.", "B"),
        ("**B**", "B"),
        ("B) Paris", "B"),
        ("B. Paris", "B"),
        (r"\boxed{B}", "B"),
        (r"\boxed{(b)}", "B"),
        (r"\boxed{\text{B}}", "B"),
        (r"\boxed{\textbf{(B)}}", "B"),
        (r"\boxed{B. Paris}", "B"),
        (r"$\boxed{\mathrm{B}}$.", "B"),
        ("The answer is B", "B"),
        ("The answer is (B).", "B"),
        ("the answer is b.", "B"),
        ("Answer: B", "B"),
        ("answer:b", "B"),
        ("**Answer:** B", "B"),
        ("**Answer: (B)**", "B"),
        ("Answer: $B$", "B"),
        (r"The answer is $\boxed{B}$", "B"),
        (r"The answer is \text{B}.", "B"),
        ("The correct choice is option B because of it", "B"),
        ("Option B is right", "B"),
        ("The best option would be (b) here", "B"),
        ("The answer should be 'B'", "B"),
        ("So it is B.", "B"),
        ("A is wrong, so B", "B"),
        ("(A) is wrong, (B) is right", "B"),
        ("The answer is A. No, wait: the answer is B.", "B"),
        (r"\boxed{A}, no: \boxed{B}", "B"),
        (r"\boxed{A} was wrong; the answer is B", "B"),
        (r"The answer is A? No: \boxed{B}", "B"),
        ("I looked at A and C.\nB\n", "B"),
        ("Both (C) and (D) fail.\nThe answer is therefore: B", "B"),
        # None:
        ("", None),
        ("A dog is an animal", None),
        ("The answer is a dog", None),
        ("the answer is b-side", None),
        ("Plan B worked well", None),
        ("The answer is 42", None),
        ("The answer is F", None),
        ("The answer is BC", None),
        ("The answer is Because", None),
        (r"\boxed{42}", None),
        (r"\boxed{AB}", None),
        ("vitamin C is good for you", None),
        ("(AB)", None),
        ("f(A)=3 of it", None),
        ("A) one\nB) two\nC) three", None),
        ("I don't know", None),
    ],
)
def test_extracts_the_stated_letter(answer, letter):
    assert extract_letter(answer) == letter
    for ground_truth in "ABCDE":
        assert choice(make_rollout(answer, ground_truth)) == float(ground_truth == letter)


@pytest.mark.parametrize("ground_truth", ["B", "b", "(B)", "[b]", "B.", " B ", r"\text{B}", "B. Paris", "$B$"])
def test_accepts_forms_of_ground_truths(ground_truth):
    assert (
        choice(make_rollout("Answer: B", ground_truth)) == 1.0
        and choice(make_rollout("Answer: C", ground_truth)) == 0.0
    )


@pytest.mark.parametrize("ground_truth", ["", None, "F", "Paris", 1, "AB", ["B"]])
def test_refuses_ground_truths_that_are_no_letter(ground_truth):
    with pytest.raises(ValueError, match="is not a letter from A to E"):
        choice(make_rollout("B", ground_truth))


FORMS = ["Answer: {}", "the answer is ({})", r"\boxed{{{}}}", "({})", "**{}**", "I think\n{}", "Option {} it is"]


@given(st.lists(st.tuples(st.sampled_from(FORMS[:3]), st.sampled_from("ABCDE")), min_size=1, max_size=5))
def test_reads_the_last_marked_letter(stated):
    text = " and then. ".join(form.format(letter) for form, letter in stated)
    assert extract_letter(text) == stated[-1][1]


@given(st.sampled_from(FORMS), st.sampled_from("ABCDE"), st.text("xyz ,\n", max_size=30))
def test_ignores_preceding_text(form, letter, before):
    assert extract_letter(f"{before}\n{form.format(letter)}") == letter
