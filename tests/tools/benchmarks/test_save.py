"""`bench.py save`: overhead of checkpoints per step."""

from __future__ import annotations

import pytest
from benchmarks.save import compute_overheads

pytestmark = pytest.mark.alone


def test_overheads_match_hand_computed_values() -> None:
    """Four steps of two seconds per series, with 0.1 s between them without a save."""
    series = {
        "no save": [(8.1, 0.1, 9.0), (9.0, 0.5, 9.0), (8.1, 0.1, 9.0)],
        "asynchronous": [(8.5, 0.2, 9.0)],
        "in memory": [(8.9, 0.3, 9.0)],
        "waited for": [(10.1, 2.1, 9.0)],
    }
    result = compute_overheads(series)
    assert list(result["no save"].values()) == pytest.approx([2.0, 0.0, 0.0, 0.0, 0.0])
    assert list(result["asynchronous"].values()) == pytest.approx([2.0, 0.1, 0.05, 0.4, 0.4 / 8.1])
    assert list(result["in memory"].values()) == pytest.approx([2.0, 0.2, 0.1, 0.8, 0.8 / 8.1])
    assert list(result["waited for"].values()) == pytest.approx([2.0, 2.0, 1.0, 2.0, 2.0 / 8.1])
