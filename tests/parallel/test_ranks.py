"""Timeouts of process groups: longer ones within a block, and ranks that die."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def test_timeout_ends_with_its_block_and_dead_peer_fails_at_once(
    run_ranks: Callable[..., list[dict[str, Any]]],
) -> None:
    first, second = run_ranks(2, "tests/parallel/ranks_timeouts.py", timeout=120.0)  # the last wait may be an hour
    assert first.pop("after_death") == ["RuntimeError", "rank 1: ValueError: the first thing"]
    assert (
        first
        == second
        == {"created": [60.0], "inside": [60.0], "after": [1.0, 1.0], "flags_and_cause": [True, False, ""]}
    )
