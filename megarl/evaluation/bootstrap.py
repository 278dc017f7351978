"""How sure a mean is: by drawing the same number of values again and again out of those that there are.

The percentile interval of Efron (1979), Bootstrap Methods: Another Look at the Jackknife. What is drawn are prompts
with all of their answers, not answers: those of a prompt depend on each other.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

RESAMPLES = 2000
LEVEL = 0.95
_AT_ONCE = 1 << 22
"""Numbers that are drawn at a time."""


def interval(
    values: Sequence[float], seed: int = 0, resamples: int = RESAMPLES, level: float = LEVEL
) -> tuple[float, float]:
    """(low, high) of the mean of `values`, one for each prompt. The same seed gives the same interval.

    Of a single value it is that value, which says nothing. Raises ValueError for none, and for values that are not
    finite.
    """
    given = np.asarray(values, dtype=np.float64)
    if not len(given) or not np.isfinite(given).all():
        raise ValueError("an interval needs values, and finite ones")
    draw, means = np.random.default_rng(seed), np.empty(resamples)
    rows = max(_AT_ONCE // len(given), 1)
    for begin in range(0, resamples, rows):
        end = min(begin + rows, resamples)
        means[begin:end] = given[draw.integers(len(given), size=(end - begin, len(given)))].mean(axis=1)
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)
