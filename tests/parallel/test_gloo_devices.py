"""Groups that share gloo's devices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megarl.parallel.gloo_devices import NUM_DEVICES


def test_many_groups_communicate_by_few_threads(run_ranks: Callable[..., list[dict[str, Any]]]) -> None:
    """At once, and each group has the time-out that it was created with."""
    for result in run_ranks(2, "tests/parallel/ranks_gloo_devices.py"):
        assert result["sums"] == [[2.0 * i + 1] for i in range(12)]
        assert result["timeouts"] == [60, 7]
        assert result["threads"] == NUM_DEVICES
