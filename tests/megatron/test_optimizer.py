"""The step itself is compared with torch's AdamW in `test_model.py`."""

from __future__ import annotations

from math import cos, pi
from typing import Any

import pytest


def test_schedules_over_five_updates_with_two_of_warm_up(units: dict[str, Any]) -> None:
    """Update k has point k of a line that ends at 6: neither the first nor the last rate is zero."""
    found = units["schedule"]
    warm_up = [0.5, 1.0]
    assert found["constant"] == pytest.approx(warm_up + [1.0, 1.0, 1.0])
    assert found["linear"] == pytest.approx(warm_up + [0.75, 0.5, 0.25])
    assert found["cosine"] == pytest.approx(warm_up + [0.5 + 0.5 * cos(pi * k / 4) for k in (1, 2, 3)])
