"""Micro-batches: padding, next tokens, alignment of outputs, context parallelism, routing and device copies."""

from __future__ import annotations

from typing import Any


def test_padding_targets_and_alignment_by_hand(units: dict[str, Any]) -> None:
    """Sequences [1 2 3] and [5 6], padded to 8. Output t belongs to token t + 1: 10 to the 2, 20 to the 3."""
    micro = units["micro_batch"]
    assert micro["tokens"] == [[1, 2, 3, 5, 6, 0, 0, 0]]
    assert micro["positions"] == [[0, 1, 2, 0, 1, 0, 1, 2]]
    assert micro["next_tokens"] == [[2, 3, 0, 6, 0, 0, 0, 0]]
    assert micro["next_two_tokens"] == [[2, 3, 0, 6, 0, 0, 0, 0], [3, 0, 0, 0, 0, 0, 0, 0]]
    assert micro["cu_seqlens"] == [0, 3, 5, 8]
    assert micro["aligned"] == [0, 10, 20, 0, 50]
    assert micro["aligned by two"] == [0, 0, 10, 0, 0]
    assert micro["routing"] == [[0, 1], [2, 3], [4, 5], [8, 9], [10, 11], [-1, -1], [-1, -1], [-1, -1]]


def test_context_parallel_shards_by_hand(units: dict[str, Any]) -> None:
    """[1 2 3 .] and [5 6 . .]: rank 0 has the first and last quarter of each, rank 1 those between; then 12 tokens of
    padding, because each rank is to have a multiple of 10 tokens."""
    parts = units["micro_batch"]["cp"]
    assert parts["tokens"] == [[[1, 0, 5, 0, 0, 0, 0, 0, 0, 0]], [[2, 3, 6, 0, 0, 0, 0, 0, 0, 0]]]
    assert parts["positions"] == [[[0, 3, 0, 3, 0, 1, 2, 9, 10, 11]], [[1, 2, 1, 2, 3, 4, 5, 6, 7, 8]]]
    assert parts["next_tokens"] == [[[2, 0, 6, 0, 0, 0, 0, 0, 0, 0]], [[3, 0, 0, 0, 0, 0, 0, 0, 0, 0]]]
    assert parts["cu_seqlens"] == [0, 4, 8, 20]
    assert parts["aligned"] == [0, 10, 11, 0, 14]


def test_common_tokens_are_packed_once_by_hand(units: dict[str, Any]) -> None:
    """[1 .. 12] and [1 .. 10, 31, 32]: of the second sequence only the last common token, which predicts the 31, and
    what follows; with a multi-token prediction layer also the token before. Output t is 10 t."""
    micro = units["shared_micro_batch"]
    assert micro["tokens"] == [[*range(1, 13), 10, 31, 32, 0]]
    assert micro["positions"] == [[*range(12), 9, 10, 11, 0]]
    assert micro["next_tokens"] == [[*range(2, 13), 0, 31, 32, 0, 0]]
    assert micro["next_two_tokens"] == [[*range(2, 13), 0, 10, 31, 32, 0], [*range(3, 13), 0, 0, 31, 32, 0, 0]]
    assert micro["cu_seqlens"] == [0, 12, 15, 16]
    assert micro["aligned"] == [0, *range(0, 110, 10), 0, *range(0, 90, 10), 120, 130]
    assert micro["keys"][0] == [[*range(12)], [*range(9), 12, 13, 14], [15]]
    assert micro["whole"] == [[*range(1, 13), *range(1, 11), 31, 32]]


def test_common_tokens_over_context_parallel_ranks(units: dict[str, Any]) -> None:
    """The quarters 1 and 4 of each sequence on rank 0, and 2 and 3 on rank 1: of 12 tokens, and of 10 31 32 and one of
    padding, before which a quarter sees the nine common tokens."""
    micro = units["shared_micro_batch"]
    assert micro["cp tokens"] == [[[1, 2, 3, 10, 11, 12, 10, 0]], [[4, 5, 6, 7, 8, 9, 31, 32]]]
    common = [*range(9)]
    assert micro["keys"][1] == [[0, 1, 2], [*range(12)], [*common, 12], [*common, 12, 13, 14, 15]]
    assert micro["keys"][2] == [[*range(6)], common, [*common, 12, 13], [*common, 12, 13, 14]]


def test_empty_micro_batch_is_all_padding(units: dict[str, Any]) -> None:
    tokens, cu_seqlens, aligned = units["micro_batch"]["empty"]
    assert tokens == [[0, 0, 0, 0]]
    assert cu_seqlens == [0, 4]
    assert aligned == []


def test_routing_is_sharded_by_rank_and_layer(units: dict[str, Any]) -> None:
    """Token t uses the experts 3 t, 3 t + 1 and 3 t + 2 in three layers; tokens 0 1 2 and 4 5 are selected."""
    shares = units["micro_batch"]["routing shards"]
    assert shares["tp"] == [[[0, 2], [3, 5], [6, 8], [12, 14]], [[15, 17], [-1, -1], [-1, -1], [-1, -1]]]
    assert shares["cp"] == [[[1], [-1], [13], [-1]], [[4], [7], [16], [-1]]]
    assert shares["none"] is None
    assert shares["no layers"] == [[]] * 5


def test_copies_columns_to_device_on_demand(units: dict[str, Any]) -> None:
    device_copies = units["micro_batch"]["device_copies"]
    assert device_copies["initial"] == []
    assert device_copies["middle"] == ["routing"]
    assert device_copies["loss"] == ["routing", "sequence_positions", "unpadded_indices"]
    assert device_copies["columns"] == ["tokens", "loss_mask", "advantages", "loss_weights"]


def test_sampling_mask_aligns_with_next_tokens(units: dict[str, Any]) -> None:
    """Sequences [1 2 3] and [5 6]: candidates are 7 or 8 for the 2, 9 for the 3, and three for the 6."""
    result = units["masked_micro_batch"]
    assert result["complete"] == [[7, 8], [9], [], [4, 5, 6], [], [], [], []]
    assert result["context"] == [[[7, 8], [], [4, 5, 6], []], [[9], [], [], []]]
    assert result["empty"] == [0, 0, 0, 0]
    assert result["none"]
