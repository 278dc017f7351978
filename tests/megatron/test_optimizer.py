"""Learning rate schedules; `test_model.py` compares the step itself with torch's AdamW."""

from __future__ import annotations

from math import cos, pi
from typing import Any

import pytest


def test_lr_schedules_with_warmup(units: dict[str, Any]) -> None:
    """Update k of five is at point k of a schedule that ends at 6, so neither the first nor the last rate is zero."""
    result = units["schedule"]
    warm_up = [0.5, 1.0]
    assert result["constant"] == pytest.approx(warm_up + [1.0, 1.0, 1.0])
    assert result["linear"] == pytest.approx(warm_up + [0.75, 0.5, 0.25])
    assert result["cosine"] == pytest.approx(warm_up + [0.5 + 0.5 * cos(pi * k / 4) for k in (1, 2, 3)])


def test_longer_schedule_resumes_at_the_same_update(units: dict[str, Any]) -> None:
    """After five updates, switch to ten with four of warm-up, a peak of 2 and an end of 0.5.

    Updates 6 and 7 are at two and three sevenths of the decay."""
    result = units["schedule"]
    assert result["constant, longer"] == pytest.approx([2.0, 2.0])
    assert result["linear, longer"] == pytest.approx([0.5 + 1.5 * 5 / 7, 0.5 + 1.5 * 4 / 7])
    assert result["cosine, longer"] == pytest.approx([0.5 + 0.75 * (1 + cos(pi * k / 7)) for k in (2, 3)])
