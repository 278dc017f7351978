"""Weight syncs of adapters between real ranks in random layouts, compared bitwise with adapters merged into whole
weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

SEEDS = ("0", "1", "3", "5", "7", "10", "14", "40", "50", "25", "61", "1001")
"""As in `test_executor.py`; the last one has gated delta nets."""
PART_CASES = ("part:1", "part:250", "part:65")
"""In FP8: the down projections of queries alone have adapters, and the first layers of fused shared experts alone."""
SPLIT_CASES = ("0/0,1/2,3", "14/0,1/2,3", "13/0,1,2/1,2,3", "10/0,1/2")  # the last one fuses shared experts


def test_engines_merge_the_same_bits_in_all_layouts(run_ranks: Callable[..., list[dict[str, Any]]]) -> None:
    results = run_ranks(4, "tests/reshard/ranks_adapters.py", *SEEDS, *SPLIT_CASES, *PART_CASES)
    cases = [(case, rank, result[case]) for rank, result in enumerate(results) for case in result]
    for case, rank, result in cases:
        assert result["equal"] == [True] * 3 and result["wrong"] == result["differing"] == [], (case, rank)
        assert (result["changed"] > 0) == result["has_engine"], (case, rank)
    assert {result["wire"] for _, _, result in cases} == {"bf16", "fp32", "fp8", "int4"}
    assert {result["fused"] for _, _, result in cases} == {result["drafts"] for _, _, result in cases} == {False, True}
    assert any(0 < result["sent"][0] < result["sent"][1] for _, _, result in cases), "changes of adapters alone"
    for part in PART_CASES:
        assert any(result["requantised"] for case, _, result in cases if case == part), part
