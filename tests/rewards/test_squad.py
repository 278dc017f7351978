"""Exact match and F1 of short answers, with values computed by hand."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.rewards.squad import exact_match, f1, normalize

sys.path.insert(0, str(Path(__file__).parent))
from answer_rollouts import make_rollout  # noqa: E402

pytestmark = pytest.mark.alone


@pytest.mark.parametrize(
    ("text", "normalized"),
    [
        ("The  Eiffel-Tower!", "eiffeltower"),
        ("a cat, an owl and the dog", "cat owl and dog"),
        ("U.S.A.", "usa"),
        ("theatre", "theatre"),
        ("\tA\n", ""),
        ("1,000", "1000"),
        ("Café", "café"),
    ],
)
def test_normalizes_case_articles_and_punctuation(text, normalized):
    assert normalize(text) == normalized == normalize(normalized)


@pytest.mark.parametrize(
    ("answer", "ground_truth", "exact", "words"),
    [
        ("Paris", "paris", 1.0, 1.0),
        ("The Paris.", "Paris", 1.0, 1.0),
        ("<think>Rome?</think><answer> Paris </answer>", "Paris", 1.0, 1.0),
        ("<answer>Rome</answer><answer>Paris</answer>", "Paris", 1.0, 1.0),
        ("Paris, France", "Paris", 0.0, 2 * 1 / 3),
        ("It is in Paris", "Paris France", 0.0, 2 * 1 / 6),
        ("cat cat dog", "cat dog dog", 0.0, 2 * 2 / 6),
        ("dog cat", "cat dog", 0.0, 1.0),
        ("Rome", "Paris", 0.0, 0.0),
        ("", "Paris", 0.0, 0.0),
        ("the", "a", 1.0, 1.0),
        ("Paris", ["Rome", "Paris"], 1.0, 1.0),
        ("big Paris", ["Paris", "big red Paris"], 0.0, 4 / 5),
        ("Paris", {"target": ["Paris", "Lutetia"]}, 1.0, 1.0),
        ("Paris", {"text": ("Lutetia",), "answer_start": [3]}, 0.0, 0.0),
        ("Paris", np.array(["Rome", "Paris"], dtype=object), 1.0, 1.0),
        ("Paris", {"target": np.array(["Paris"])}, 1.0, 1.0),
        ("1987", 1987, 1.0, 1.0),
    ],
)
def test_exact_match_and_f1_values(answer, ground_truth, exact, words):
    assert exact_match(make_rollout(answer, ground_truth)) == exact
    assert f1(make_rollout(answer, ground_truth)) == pytest.approx(words, abs=1e-12)


@pytest.mark.parametrize("ground_truth", [None, [], {}, {"answers": ["x"]}, True, [None], {"target": []}, b"x"])
def test_refuses_invalid_ground_truths(ground_truth):
    for function in (exact_match, f1):
        with pytest.raises(ValueError, match="is neither a text nor a list of them"):
            function(make_rollout("x", ground_truth))


WORDS = st.lists(st.sampled_from(["cat", "dog", "owl", "the"]), max_size=6).map(" ".join)


@given(WORDS, WORDS)
def test_f1_is_symmetric_and_1_for_equal_texts(left, right):
    assert (
        f1(make_rollout(left, right)) == f1(make_rollout(right, left)) and 0.0 <= f1(make_rollout(left, right)) <= 1.0
    )
    assert f1(make_rollout(left, left)) == exact_match(make_rollout(left, left)) == 1.0
    assert f1(make_rollout(left, right)) >= exact_match(make_rollout(left, right))
