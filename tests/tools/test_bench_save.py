"""`bench_save`: overhead of checkpoints per step."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

import bench_save  # noqa: E402

pytestmark = pytest.mark.nightly


def test_overheads_match_hand_computed_values() -> None:
    """Four steps of two seconds per stretch, with 0.1 s between stretches without a save."""
    seconds = {
        "no save": [(8.1, 0.1), (9.0, 0.5), (8.1, 0.1)],
        "asynchronous": [(8.5, 0.2)],
        "waited for": [(10.1, 2.1)],
    }
    result = bench_save.figures(seconds)
    assert result["no save"] == {"step, s": pytest.approx(2.0)}
    assert list(result["asynchronous"].values()) == pytest.approx([0.1, 0.05, 0.4, 0.4 / 8.1])
    assert list(result["waited for"].values()) == pytest.approx([2.0, 1.0, 2.0, 2.0 / 8.1])
