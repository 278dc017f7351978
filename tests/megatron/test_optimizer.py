"""The step itself is compared with torch's AdamW in `test_model.py`."""

from __future__ import annotations

from math import cos, pi
from typing import Any

import pytest


def test_schedules_over_five_updates_with_two_of_warm_up(units: dict[str, Any]) -> None:
    """Update k has point k of a line that ends at 6: neither the first nor the last rate is zero."""
    result = units["schedule"]
    warm_up = [0.5, 1.0]
    assert result["constant"] == pytest.approx(warm_up + [1.0, 1.0, 1.0])
    assert result["linear"] == pytest.approx(warm_up + [0.75, 0.5, 0.25])
    assert result["cosine"] == pytest.approx(warm_up + [0.5 + 0.5 * cos(pi * k / 4) for k in (1, 2, 3)])


def test_a_longer_schedule_goes_on_where_the_shorter_one_was(units: dict[str, Any]) -> None:
    """After five updates of the above, ten in all, four of them warm-up, with a peak of 2 and an end of 0.5: updates 6
    and 7 are two and three of the seven parts of the decay behind the warm-up."""
    result = units["schedule"]
    assert result["constant, longer"] == pytest.approx([2.0, 2.0])
    assert result["linear, longer"] == pytest.approx([0.5 + 1.5 * 5 / 7, 0.5 + 1.5 * 4 / 7])
    assert result["cosine, longer"] == pytest.approx([0.5 + 0.75 * (1 + cos(pi * k / 7)) for k in (2, 3)])
