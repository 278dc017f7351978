"""Batches are dispatched to the ranks whose plan needs them: the bytes sent are those of tokens away from home, and of
the columns that a loss declares."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

SCRIPT = "tests/megatron/ranks_rows.py"
DECLARED = ["tokens", "loss_mask", "old_logprobs", "advantages", "loss_weights"]  # 4, 1, 4, 4 and 4 bytes
BYTES_OF_ALL_COLUMNS = 4 + 1 + 8 * 4


def check_bytes_sent(result: dict[str, Any]) -> None:
    assert result["tokens sent"] == 4 * result["crossing"]
    assert result["named"] == DECLARED and result["named sent"] == 17 * result["crossing of an update"]
    assert result["all sent"] == BYTES_OF_ALL_COLUMNS * result["crossing of an update"]


def test_sequences_stay_on_their_home_replica(run_ranks: Callable[..., list[dict[str, Any]]]) -> None:
    for result in run_ranks(4, SCRIPT, "all_replicas"):
        assert result["wrong"] == []
        check_bytes_sent(result)
        assert result["results sent"] == 4 * result["crossing"]
        assert result["crossing"] < 0.12 * result["tokens"] and result["without homes"] > 0.65 * result["tokens"]
        assert result["crossing of an update"] < 0.2 * result["tokens"] / 2  # half of the sequences


def test_all_ranks_of_a_replica_read_its_sequences(run_ranks: Callable[..., list[dict[str, Any]]]) -> None:
    """Homes are the two ranks of the first replica: half of the sequences move, and two ranks read each."""
    for result in run_ranks(4, SCRIPT, "replicas"):
        assert result["wrong"] == []
        check_bytes_sent(result)
        assert result["crossing"] == result["tokens"]  # once, whatever the number of readers
        # The first rank of a replica reports, and sends no results of its own sequences.
        assert 0.7 * 4 * result["tokens"] < result["results sent"] < 0.8 * 4 * result["tokens"]


def test_model_on_other_ranks_ignores_homes(run_ranks: Callable[..., list[dict[str, Any]]]) -> None:
    for result in run_ranks(4, SCRIPT, "disjoint"):
        assert result["wrong"] == [] and result["as without homes"]
        check_bytes_sent(result)
        assert result["crossing"] == result["tokens"] and result["results sent"] == 4 * result["tokens"]


def test_loss_receives_declared_and_default_columns(units: dict[str, Any]) -> None:
    result = units["loss_columns"]
    assert result["columns"] == ["tokens", "loss_mask", "advantages", "loss_weights"]
    assert result["selected"] == ["tokens", "loss_mask", "advantages", "loss_weights"]
    assert result["everything"] == ["tokens", "loss_mask", "rollout_logprobs", "advantages", "returns", "loss_weights"]
    assert result["trained"][0] == result["trained"][1]  # bitwise the same with and without declared columns
    assert result["while training"].startswith("the loss raised TypeError: ")
    assert result["while training"].endswith(
        'it is marked @reads("advantages"), and other columns of the batch are None: name every column that it reads'
    )
