"""Real ranks that push: random layouts, everything byte for byte, verification, a flipped bit, a rank that dies."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import ranks_executor
import torch
from late_wire import push_as_threads

from megarl.reshard.plan.layout import EngineLayout, TrainLayout
from megarl.reshard.plan.planner import ReshardPlan
from megarl.reshard.run import executor as executor_module
from megarl.reshard.run.executor import Executor

SEEDS = (*(str(seed) for seed in range(20)), "40", "43", "50", "58")
"""The last ones are FP8: blocks on several ranks, of dense weights and of experts; experts; DeepSeek."""
APART = (
    *(f"{seed}/0,1/2,3" for seed in (0, 1, 14, 50, 64)),
    *(f"{seed}/0,2/1,3" for seed in (2, 40, 64, 68)),
    *(f"{seed}/0,1,2/1,2,3" for seed in (0, 13, 30, 58)),
    *("64/3,1/0,2", "1/3,1/1,3", "50/2,3/1,2", "10/0,1/2", "13/2,3/1", "9/1/0,2,3", "22/3/0,1"),
)
"""Seeds, ranks that train, ranks of engines; apart, overlapping, in other orders, more or fewer, some with neither."""
SCRIPT = "tests/reshard/ranks_executor.py"


@pytest.fixture(scope="module")
def results(run_ranks: Callable[..., list[dict[str, Any]]]) -> list[dict[str, Any]]:
    return run_ranks(4, SCRIPT, *SEEDS)


@pytest.fixture(scope="module")
def apart(run_ranks: Callable[..., list[dict[str, Any]]]) -> list[dict[str, Any]]:
    return run_ranks(4, SCRIPT, *APART)


@pytest.mark.parametrize("seed", SEEDS)
def test_every_engine_gets_exactly_its_shards(seed: str, results: list[dict[str, Any]]) -> None:
    for rank, result in enumerate(results):
        assert result[seed]["equal"] == [True] * 4, f"seed {seed}, rank {rank}"
        assert result[seed]["wrong"] == []


def test_every_engine_gets_exactly_its_shards_from_other_ranks(apart: list[dict[str, Any]]) -> None:
    for case in APART:
        ours, theirs = ([int(rank) for rank in side.split(",")] for side in case.split("/")[1:])
        for rank, result in enumerate(apart):
            assert (case in result) == (rank in (*ours, *theirs)), f"{case}, rank {rank}"
            if case not in result:
                continue
            actual = result[case]
            assert actual["equal"] == [True] * 4 and actual["wrong"] == [], f"{case}, rank {rank}"
            # Who only trains hands nothing over; who only generates has nothing to send.
            assert (actual["verified"][0][1] > 0) == bool(actual["drafts"]) == (rank in theirs), f"{case}, rank {rank}"
            assert actual["trains"] == (rank in ours), f"{case}, rank {rank}"
    wires = {actual["wire"] for result in apart for actual in result.values()}
    assert wires == {"bf16", "fp32", "fp8"}
    assert any(actual["straddling"] for result in apart for actual in result.values() if actual["wire"] == "fp8")


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


@pytest.mark.alone
def test_what_is_handed_over_is_written_while_the_next_round_is_on_the_wire(monkeypatch: pytest.MonkeyPatch) -> None:
    """And a buffer that was handed over is written before anything comes into it again."""
    hf = {"architectures": ["Gemma2ForCausalLM"], "vocab_size": 128, "hidden_size": 16, "intermediate_size": 24}
    hf |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    hf |= {"query_pre_attn_scalar": 8, "sliding_window": 16, "rms_norm_eps": 1e-6, "hidden_act": "gelu_pytorch_tanh"}
    hf |= {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
    case = SimpleNamespace(hf=hf, train=TrainLayout(1, 1, 1, ((0, 1),)), engine=EngineLayout(1), wire="fp32")
    params = ranks_executor.table(case)
    full = ranks_executor.full_weights(params, torch.float32, 0)
    executor = Executor(
        ReshardPlan(hf, case.train, case.engine, 1, 17 << 10, "fp32"), 0, 3, partial(torch.empty, dtype=torch.uint8)
    )
    rounds, seen, value = len(executor.prepared_rounds), [], []
    wire = executor_module._transfer

    def transfer(*arguments: Any) -> Any:
        seen.append("wire")
        return wire(*arguments)

    def hand_over(buffer: torch.Tensor, order: dict[str, Any], draft: bool) -> None:
        seen.append("give")
        value.append((buffer, order["push"]))

    monkeypatch.setattr(executor_module, "_transfer", transfer)
    executor.sync(ranks_executor.shards(case, params, full, 0), hand_over, 1, lambda: seen.append("settle"))
    assert rounds > 4 and len(value) == rounds
    assert seen == ["wire", "settle", *["wire", "give", "settle"] * (rounds - 1), "give"]
    assert all(item[0] is not other[0] for item, other in zip(value, value[1:], strict=False))
    assert len({push for _, push in value}) == 1
    executor.sync(ranks_executor.shards(case, params, full, 0), hand_over, 2)
    assert value[-1][1] != value[0][1]


@pytest.mark.alone
@pytest.mark.parametrize("seed", [0, 1, 3, 5, 7, 11, 13, 40, 58])
def test_no_buffer_is_used_again_too_early(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for rank, actual in enumerate(push_as_threads(seed, 4, monkeypatch)):
        assert actual["equal"] == [True] * 4 and actual["wrong"] == [], f"seed {seed}, rank {rank}"
