from __future__ import annotations

from typing import Any


def test_padding_targets_and_alignment_by_hand(units: dict[str, Any]) -> None:
    """Sequences [1 2 3] and [5 6], padded to 8. What is emitted at t is about t + 1: 10 about the 2, 20 about the 3."""
    micro = units["micro_batch"]
    assert micro["tokens"] == [[1, 2, 3, 5, 6, 0, 0, 0]]
    assert micro["positions"] == [[0, 1, 2, 0, 1, 0, 1, 2]]
    assert micro["ahead"] == [[2, 3, 0, 6, 0, 0, 0, 0]]
    assert micro["two ahead"] == [[2, 3, 0, 6, 0, 0, 0, 0], [3, 0, 0, 0, 0, 0, 0, 0]]
    assert micro["cu_seqlens"] == [0, 3, 5, 8]
    assert micro["aligned"] == [0, 10, 20, 0, 50]
    assert micro["aligned by two"] == [0, 0, 10, 0, 0]
    assert micro["routing"] == [[0, 1], [2, 3], [4, 5], [8, 9], [10, 11], [-1, -1], [-1, -1], [-1, -1]]


def test_context_parallel_parts_by_hand(units: dict[str, Any]) -> None:
    """[1 2 3 .] and [5 6 . .]: rank 0 has the first and last quarter of each, rank 1 those between; then 12 tokens of
    padding, because each rank is to have a multiple of 10 tokens."""
    parts = units["micro_batch"]["cp"]
    assert parts["tokens"] == [[[1, 0, 5, 0, 0, 0, 0, 0, 0, 0]], [[2, 3, 6, 0, 0, 0, 0, 0, 0, 0]]]
    assert parts["positions"] == [[[0, 3, 0, 3, 0, 1, 2, 9, 10, 11]], [[1, 2, 1, 2, 3, 4, 5, 6, 7, 8]]]
    assert parts["ahead"] == [[[2, 0, 6, 0, 0, 0, 0, 0, 0, 0]], [[3, 0, 0, 0, 0, 0, 0, 0, 0, 0]]]
    assert parts["cu_seqlens"] == [0, 4, 8, 20]
    assert parts["aligned"] == [0, 10, 11, 0, 14]


def test_a_micro_batch_without_sequences_is_all_padding(units: dict[str, Any]) -> None:
    tokens, cu_seqlens, aligned = units["micro_batch"]["empty"]
    assert tokens == [[0, 0, 0, 0]]
    assert cu_seqlens == [0, 4]
    assert aligned == []
