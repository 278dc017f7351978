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


def test_a_rank_has_its_part_of_the_record_of_routing(units: dict[str, Any]) -> None:
    """Token t went through the experts 3 t, 3 t + 1 and 3 t + 2 in three layers; the tokens 0 1 2 and 4 5 are taken."""
    shares = units["micro_batch"]["shares of routing"]
    assert shares["tp"] == [[[0, 2], [3, 5], [6, 8], [12, 14]], [[15, 17], [-1, -1], [-1, -1], [-1, -1]]]
    assert shares["cp"] == [[[1], [-1], [13], [-1]], [[4], [7], [16], [-1]]]
    assert shares["none"] is None
    assert shares["no layers"] == [[]] * 5


def test_what_nobody_asks_for_stays_on_the_host(units: dict[str, Any]) -> None:
    arrived = units["micro_batch"]["arrived"]
    assert arrived["made"] == []
    assert arrived["middle"] == ["routing"]
    assert arrived["loss"] == ["routing", "sequence_positions", "unpadded_indices"]
    assert arrived["columns"] == ["tokens", "loss_mask", "advantages", "loss_weights"]


def test_what_the_next_token_could_have_been(units: dict[str, Any]) -> None:
    """[1 2 3] and [5 6]: 2 could have been 7 or 8, 3 nothing but 9, 6 one of three; over two ranks as above."""
    result = units["cut_micro_batch"]
    assert result["whole"] == [[7, 8], [9], [], [4, 5, 6], [], [], [], []]
    assert result["context"] == [[[7, 8], [], [4, 5, 6], []], [[9], [], [], []]]
    assert result["empty"] == [0, 0, 0, 0]
    assert result["none"]
