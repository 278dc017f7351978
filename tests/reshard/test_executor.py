"""Real ranks that push: random layouts, everything byte for byte, verification, a flipped bit, a rank that dies."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

SEEDS = (*(str(seed) for seed in range(20)), "40", "43", "50", "58")
"""The last ones are FP8: blocks on several ranks, of dense weights and of experts; experts; DeepSeek."""
SCRIPT = "tests/reshard/ranks_executor.py"


@pytest.fixture(scope="module")
def results(run_ranks: Callable[..., list[dict[str, Any]]]) -> list[dict[str, Any]]:
    return run_ranks(4, SCRIPT, *SEEDS)


@pytest.mark.parametrize("seed", SEEDS)
def test_every_engine_gets_exactly_its_shards(seed: str, results: list[dict[str, Any]]) -> None:
    for rank, result in enumerate(results):
        assert result[seed]["equal"] == [True] * 4, f"seed {seed}, rank {rank}"
        assert result[seed]["wrong"] == []


def test_the_first_push_and_every_third_are_verified_in_full_and_the_others_in_part(
    results: list[dict[str, Any]],
) -> None:
    counted = [result[seed]["verified"] for result in results for seed in SEEDS]
    for first, second, third, fourth in counted:
        assert first[0] == first[1] > 0
        assert fourth[0] == fourth[1]
        assert second[0] + third[0] < 2 * second[1]
    assert sum(second[0] for _, second, _, _ in counted) > 0


def test_several_rounds_were_needed(results: list[dict[str, Any]]) -> None:
    assert max(results[0][seed]["rounds"] for seed in SEEDS) > 10


def test_all_ranks_call_their_engines_alike_and_for_draft_models_only_where_they_get_something(
    results: list[dict[str, Any]],
) -> None:
    """The calls are collective over an engine's ranks."""
    for seed in SEEDS:
        assert len({tuple(result[seed]["drafts"]) for result in results}) == 1
    shares = [sum(drafts) / len(drafts) for drafts in (results[0][seed]["drafts"] for seed in SEEDS)]
    assert min(shares) == 0 < max(shares) <= 0.5


def test_fp8_was_sent_with_and_without_blocks_on_several_ranks(results: list[dict[str, Any]]) -> None:
    straddling = [results[0][seed]["straddling"] for seed in SEEDS if results[0][seed]["wire"] == "fp8"]
    assert len(straddling) >= 8
    assert min(straddling) == 0 and sum(number > 0 for number in straddling) >= 2


def test_a_flipped_bit_is_found(
    run_ranks: Callable[..., list[dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLIP", "1")
    results = run_ranks(4, SCRIPT, "58")
    assert results[0]["58"]["wrong"]  # and perhaps where it is forwarded to


def test_a_rank_that_dies_ends_the_push_with_the_ranks_names(
    run_ranks: Callable[..., list[dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DIE", "1")
    results = run_ranks(4, SCRIPT, "58")
    died = [result["died"] for result in results if "died" in result]
    # Others follow it, so not every rank names the first; one that it left before it began knows only its peers.
    assert any(re.search(r"ranks \d and (one of [^:]*\b)?1\b", message) for message in died), died
