"""What a rehearsal's report says of the played ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from megarl.rehearse.rehearsal import KindReport, idle_shares

pytestmark = pytest.mark.alone


def kind(flops: int, micro_batches: int = 6) -> KindReport:
    size = SimpleNamespace(total_micro_batches=micro_batches)
    played = cast(Any, SimpleNamespace(flops=flops, size=size))
    return KindReport((0,), (played,), {})


def test_ranks_wait_for_the_pipeline_and_for_the_busiest() -> None:
    """Of 8 turns of a pipeline of 3 stages, 6 have work for a stage; with two parts, 12 of 14."""
    assert idle_shares([kind(100), kind(60), kind(0)], 3) == pytest.approx([0.25, 0.55, None])
    assert idle_shares([kind(100), kind(60)], 3, 2) == pytest.approx([1 / 7, 1 - 0.6 * 6 / 7])
    assert idle_shares([kind(5)], 1) == [0.0]
