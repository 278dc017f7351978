"""Rehearsed steps have the peaks of memory that torch's allocator measured on an H200."""

from __future__ import annotations

import json

from measured_steps import read_steps
from rank_jobs import RankJobs


def test_peaks_equal_those_of_an_h200(run_ranks: RankJobs) -> None:
    """The table in megarl/models/README.md, whose measured values have three digits."""
    (text,), _ = run_ranks.run(1, "tests/rehearse/rehearsed_peaks.py", fresh=True, record=False)
    peaks = json.loads(text.rpartition("RESULT ")[2])
    for step, (peak, _) in zip(read_steps(), peaks, strict=True):
        result = peak / 1e9
        assert abs(result / step.measured - 1) < 0.002, (step, result)
        assert f"{result:.2f}" == step.rehearsed and f"{result / step.measured:.3f}" == step.rehearsed_ratio, step
    # In the allocator's record of the sixth step, 3.7 GB were of the two tensors that a fused SwiGLU does not save.
    unfused, fused = peaks[5]
    assert f"{(unfused - fused) / 1e9:.1f}" == "3.7"
