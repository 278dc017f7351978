"""Bootstrap intervals of means."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from megarl.observe.eval_metrics import bootstrap_interval

pytestmark = pytest.mark.alone


def test_interval_is_reproducible_by_seed() -> None:
    values = list(np.random.default_rng(0).random(50))
    assert bootstrap_interval(values, seed=3) == bootstrap_interval(values, seed=3)
    assert bootstrap_interval(values, seed=3) != bootstrap_interval(values, seed=4)
    low, high = bootstrap_interval(values, seed=3)
    assert low < float(np.mean(values)) < high


def test_matches_the_exact_resampling_quantiles() -> None:
    """Enumerate all 4^4 resamples of four values; the sampled quantiles converge to theirs."""
    values = [0.0, 0.1, 0.5, 1.7]
    sample_means = [float(np.mean(drawn)) for drawn in product(values, repeat=4)]
    exact = np.quantile(sample_means, [0.1, 0.9])
    assert bootstrap_interval(values, seed=1, resamples=200_000, level=0.8) == pytest.approx(exact, abs=0.03)


def test_width_is_196_standard_errors() -> None:
    """400 coin flips: 1.96 standard errors to either side."""
    values = [0.0, 1.0] * 200
    low, high = bootstrap_interval(values, seed=0, resamples=4000)
    assert low == pytest.approx(0.5 - 1.96 * 0.025, abs=0.005) and high == pytest.approx(0.549, abs=0.005)


def test_single_or_equal_values_give_a_point() -> None:
    assert bootstrap_interval([0.25]) == (0.25, 0.25)
    assert bootstrap_interval([1.0] * 30) == (1.0, 1.0)


@pytest.mark.parametrize("values", [[], [1.0, float("nan")], [float("inf")]])
def test_rejects_empty_and_nonfinite_values(values: list[float]) -> None:
    with pytest.raises(ValueError, match="finite"):
        bootstrap_interval(values)


def test_more_values_than_one_resampling_chunk() -> None:
    low, high = bootstrap_interval(np.tile([0.0, 1.0], 30_000).tolist(), resamples=200)
    assert 0.49 < low < 0.5 < high < 0.51
