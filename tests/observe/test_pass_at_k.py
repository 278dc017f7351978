"""`pass_at_k` against hand-computed values and against enumeration."""

from __future__ import annotations

from itertools import combinations

import pytest

from megarl.observe.eval_metrics import pass_at_k

pytestmark = pytest.mark.alone


@pytest.mark.parametrize(
    "samples, correct, k, expected",
    [
        (1, 0, 1, 0.0),
        (1, 1, 1, 1.0),
        (4, 1, 1, 1 / 4),
        (4, 1, 2, 1 / 2),  # 3 of the 6 pairs contain the correct one
        (5, 2, 2, 1 - 3 / 10),
        (5, 2, 4, 1.0),  # only 3 are wrong
        (8, 8, 8, 1.0),
        (8, 0, 8, 0.0),
        (10, 3, 5, 1 - 21 / 252),
    ],
)
def test_matches_hand_computed_values(samples: int, correct: int, k: int, expected: float) -> None:
    assert pass_at_k(samples, correct, k) == pytest.approx(expected, abs=1e-15)


@pytest.mark.parametrize("samples", range(1, 9))
def test_matches_enumeration_of_all_subsets(samples: int) -> None:
    for correct in range(samples + 1):
        outcomes = [True] * correct + [False] * (samples - correct)
        for k in range(1, samples + 1):
            choices = [any(chosen) for chosen in combinations(outcomes, k)]
            assert pass_at_k(samples, correct, k) == pytest.approx(sum(choices) / len(choices), abs=1e-12)


def test_large_sample_counts_do_not_overflow() -> None:
    assert 0.0 < pass_at_k(100_000, 1, 50_000) == pytest.approx(0.5)
    assert pass_at_k(100_000, 50_000, 1000) == pytest.approx(1.0)


@pytest.mark.parametrize("samples, correct, k", [(4, 5, 1), (4, -1, 1), (4, 1, 5), (4, 1, 0), (0, 0, 1)])
def test_rejects_impossible_counts(samples: int, correct: int, k: int) -> None:
    with pytest.raises(ValueError):
        pass_at_k(samples, correct, k)
