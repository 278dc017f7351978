"""Waiting for a rank that works for longer than a collective may take, and for one that is gone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def test_patience_ends_with_its_block_and_a_dead_peer_is_noticed_at_once(
    run_ranks: Callable[..., list[dict[str, Any]]],
) -> None:
    first, second = run_ranks(2, "tests/parallel/ranks_timeouts.py", timeout=120.0)  # the last wait may be an hour
    assert first.pop("gone") == ["RuntimeError", "rank 1: ValueError: the first thing"]
    assert first == second == {"made": [60.0], "inside": [60.0], "after": [1.0, 1.0], "heard": [True, False, ""]}
