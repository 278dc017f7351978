from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from megarl.observe.eval_metrics import bootstrap_interval

pytestmark = pytest.mark.alone


def test_a_seed_decides_it() -> None:
    values = list(np.random.default_rng(0).random(50))
    assert bootstrap_interval(values, seed=3) == bootstrap_interval(values, seed=3)
    assert bootstrap_interval(values, seed=3) != bootstrap_interval(values, seed=4)
    low, high = bootstrap_interval(values, seed=3)
    assert low < float(np.mean(values)) < high


def test_against_every_sample_that_can_be_drawn() -> None:
    """All 4^4 of four values are few enough: their quantiles are what the drawn ones tend to."""
    values = [0.0, 0.1, 0.5, 1.7]
    means = [float(np.mean(drawn)) for drawn in product(values, repeat=4)]
    exact = np.quantile(means, [0.1, 0.9])
    assert bootstrap_interval(values, seed=1, resamples=200_000, level=0.8) == pytest.approx(exact, abs=0.03)


def test_as_wide_as_theory_says() -> None:
    """Of 400 coins: 1.96 standard errors to either side."""
    values = [0.0, 1.0] * 200
    low, high = bootstrap_interval(values, seed=0, resamples=4000)
    assert low == pytest.approx(0.5 - 1.96 * 0.025, abs=0.005) and high == pytest.approx(0.549, abs=0.005)


def test_one_value_and_equal_ones() -> None:
    assert bootstrap_interval([0.25]) == (0.25, 0.25)
    assert bootstrap_interval([1.0] * 30) == (1.0, 1.0)


@pytest.mark.parametrize("values", [[], [1.0, float("nan")], [float("inf")]])
def test_what_has_no_mean(values: list[float]) -> None:
    with pytest.raises(ValueError, match="finite"):
        bootstrap_interval(values)


def test_more_prompts_than_are_drawn_at_once() -> None:
    low, high = bootstrap_interval(np.tile([0.0, 1.0], 30_000).tolist(), resamples=200)
    assert 0.49 < low < 0.5 < high < 0.51
