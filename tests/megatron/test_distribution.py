"""Rows go where a plan needs them and nowhere else: bytes are those of the tokens that are not at home, and of the
columns that a loss has named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

SCRIPT = "tests/megatron/ranks_rows.py"
NAMED = ["tokens", "loss_mask", "old_logprobs", "advantages", "loss_weights"]  # of 4, 1, 4, 4 and 4 bytes
ALL = 4 + 1 + 8 * 4


def sent(result: dict[str, Any]) -> None:
    assert result["tokens sent"] == 4 * result["crossing"]
    assert result["named"] == NAMED and result["named sent"] == 17 * result["crossing of an update"]
    assert result["all sent"] == ALL * result["crossing of an update"]


def test_sequences_stay_with_the_replica_that_has_them(run_ranks: Callable[..., list[dict[str, Any]]]) -> None:
    for result in run_ranks(4, SCRIPT, "everywhere"):
        assert result["wrong"] == []
        sent(result)
        assert result["numbers sent"] == 4 * result["crossing"]
        assert result["crossing"] < 0.12 * result["tokens"] and result["without homes"] > 0.65 * result["tokens"]
        assert result["crossing of an update"] < 0.2 * result["tokens"] / 2  # of every other sequence


def test_what_a_replica_of_several_ranks_has_its_ranks_read(run_ranks: Callable[..., list[dict[str, Any]]]) -> None:
    """The homes are the two ranks of the first replica: half of the sequences have to go, and all are read by two."""
    for result in run_ranks(4, SCRIPT, "replicas"):
        assert result["wrong"] == []
        sent(result)
        assert result["crossing"] == result["tokens"]  # once, however many read them
        # The first rank of a replica reports: nothing is sent of what stays with the rank that is both.
        assert 0.7 * 4 * result["tokens"] < result["numbers sent"] < 0.8 * 4 * result["tokens"]


def test_a_model_without_homes_is_planned_as_ever(run_ranks: Callable[..., list[dict[str, Any]]]) -> None:
    for result in run_ranks(4, SCRIPT, "apart"):
        assert result["wrong"] == [] and result["as without homes"]
        sent(result)
        assert result["crossing"] == result["tokens"] and result["numbers sent"] == 4 * result["tokens"]


def test_a_loss_reads_what_it_has_named_and_what_is_always_there(units: dict[str, Any]) -> None:
    said = units["unnamed_columns"]
    assert said["columns"] == ["tokens", "loss_mask", "advantages", "loss_weights"]
    assert said["selected"] == ["tokens", "loss_mask", "advantages", "loss_weights"]
    assert said["everything"] == ["tokens", "loss_mask", "rollout_logprobs", "advantages", "returns", "loss_weights"]
    assert said["trained"][0] == said["trained"][1]  # a loss that names its columns and one that does not: bitwise
    assert said["while training"].startswith("the loss raised TypeError: ")
    assert said["while training"].endswith(
        'it is marked @reads("advantages"), and other columns of the batch are None: name every column that it reads'
    )
