"""Weight syncs between real ranks: random layouts, compared bitwise, verification, a flipped bit, a dead rank."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import ranks_executor
import torch
from late_transport import sync_as_threads

from megarl.reshard.plan.layout import EngineLayout, TrainLayout
from megarl.reshard.plan.planner import ReshardPlan
from megarl.reshard.run import executor as executor_module
from megarl.reshard.run.executor import Executor

SEEDS = (*(str(seed) for seed in range(20)), "40", "43", "50", "58", "25", "61", "106")
"""40 to 58 are FP8: blocks split over ranks, of dense weights and of experts; experts; DeepSeek. The last ones, and 16,
are INT4: ETP 4 against TP 2; an engine of EP 2; DeepSeek with EP on both sides."""
SPLIT_CASES = (
    *(f"{seed}/0,1/2,3" for seed in (0, 1, 14, 50, 64)),
    *(f"{seed}/0,2/1,3" for seed in (2, 40, 64, 68)),
    *(f"{seed}/0,1,2/1,2,3" for seed in (0, 13, 30, 58)),
    *("64/3,1/0,2", "1/3,1/1,3", "50/2,3/1,2", "10/0,1/2", "13/2,3/1", "9/1/0,2,3", "22/3/0,1"),
)
"""Seed, trainer ranks, engine ranks: disjoint, overlapping, permuted, more or fewer, some ranks with neither."""
DELTA_CASES = tuple(f"delta:{case}" for case in ("0", "2", "6", "14", "40", "61", *SPLIT_CASES[::4]))
SCRIPT = "tests/reshard/ranks_executor.py"


@pytest.fixture(scope="module")
def results(run_ranks: Callable[..., list[dict[str, Any]]]) -> list[dict[str, Any]]:
    return run_ranks(4, SCRIPT, *SEEDS)


@pytest.fixture(scope="module")
def split_results(run_ranks: Callable[..., list[dict[str, Any]]]) -> list[dict[str, Any]]:
    return run_ranks(4, SCRIPT, *SPLIT_CASES)


@pytest.mark.parametrize("seed", SEEDS)
def test_engines_receive_exactly_their_shards(seed: str, results: list[dict[str, Any]]) -> None:
    for rank, result in enumerate(results):
        assert result[seed]["equal"] == [True] * 4, f"seed {seed}, rank {rank}"
        assert result[seed]["wrong"] == []


def test_engines_on_separate_ranks_receive_their_shards(split_results: list[dict[str, Any]]) -> None:
    for case in SPLIT_CASES:
        train_ranks, engine_ranks = ([int(rank) for rank in side.split(",")] for side in case.split("/")[1:])
        for rank, result in enumerate(split_results):
            assert (case in result) == (rank in (*train_ranks, *engine_ranks)), f"{case}, rank {rank}"
            if case not in result:
                continue
            case_result = result[case]
            assert case_result["equal"] == [True] * 4 and case_result["wrong"] == [], f"{case}, rank {rank}"
            # Ranks that only train write nothing; ranks that only generate send nothing.
            assert (case_result["verified"][0][1] > 0) == bool(case_result["drafts"]) == (rank in engine_ranks), (
                f"{case}, rank {rank}"
            )
            assert case_result["trains"] == (rank in train_ranks), f"{case}, rank {rank}"
    wires = {case_result["wire"] for result in split_results for case_result in result.values()}
    assert wires == {"bf16", "fp32", "fp8"}
    assert any(
        case_result["straddling"]
        for result in split_results
        for case_result in result.values()
        if case_result["wire"] == "fp8"
    )


def test_deltas_leave_the_same_bits_and_send_less(run_ranks: Callable[..., list[dict[str, Any]]]) -> None:
    """The second and third sync send changes; the first has no base, and for the fourth the base was dropped."""
    num_smaller = 0
    for rank, result in enumerate(run_ranks(4, SCRIPT, *DELTA_CASES)):
        for case, case_result in result.items():
            assert case_result["equal"] == [True] * 4 and case_result["wrong"] == [], f"{case}, rank {rank}"
            (first, whole), *changed, (last, whole_last) = case_result["sent"]
            assert (first, last) == (whole, whole_last), f"{case}, rank {rank}"
            assert all(sent <= whole for sent, whole in changed), f"{case}, rank {rank}"
            num_smaller += sum(sent < whole / 2 for sent, whole in changed)
    assert num_smaller > 20


def test_first_and_every_third_sync_are_fully_verified(
    results: list[dict[str, Any]],
) -> None:
    verified = [result[seed]["verified"] for result in results for seed in SEEDS]
    for first, second, third, fourth in verified:
        assert first[0] == first[1] > 0
        assert fourth[0] == fourth[1]
        assert second[0] + third[0] < 2 * second[1]
    assert sum(second[0] for _, second, _, _ in verified) > 0


def test_syncs_take_several_rounds(results: list[dict[str, Any]]) -> None:
    assert max(results[0][seed]["rounds"] for seed in SEEDS) > 10


def test_all_ranks_make_the_same_engine_calls(
    results: list[dict[str, Any]],
) -> None:
    """Calls are collective over an engine's ranks; draft models are called only when they receive weights."""
    for seed in SEEDS:
        assert len({tuple(result[seed]["drafts"]) for result in results}) == 1
    shares = [sum(drafts) / len(drafts) for drafts in (results[0][seed]["drafts"] for seed in SEEDS)]
    assert min(shares) == 0 < max(shares) <= 0.5


def test_fp8_cases_have_blocks_split_over_ranks(results: list[dict[str, Any]]) -> None:
    straddling_counts = [results[0][seed]["straddling"] for seed in SEEDS if results[0][seed]["wire"] == "fp8"]
    assert len(straddling_counts) >= 8
    assert min(straddling_counts) == 0 and sum(number > 0 for number in straddling_counts) >= 2


def test_int4_cases_are_of_both_families(results: list[dict[str, Any]]) -> None:
    assert [seed for seed in SEEDS if results[0][seed]["wire"] == "int4"] == ["16", "25", "61", "106"]


def test_flipped_bit_is_detected(
    run_ranks: Callable[..., list[dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLIP", "1")
    results = run_ranks(4, SCRIPT, "58")
    assert results[0]["58"]["wrong"]  # and perhaps on ranks it is forwarded to


def test_dead_rank_ends_the_sync_and_is_named(
    run_ranks: Callable[..., list[dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DIE", "1")
    results = run_ranks(4, SCRIPT, "58")
    died = [result["died"] for result in results if "died" in result]
    # Other ranks fail after it, so not every message names the first; some know only their peers.
    assert any(re.search(r"ranks \d and (one of [^:]*\b)?1\b", message) for message in died), died


@pytest.mark.alone
def test_writes_overlap_with_the_next_transfer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A buffer's order is also settled before the buffer receives again."""
    hf = {"architectures": ["Gemma2ForCausalLM"], "vocab_size": 128, "hidden_size": 16, "intermediate_size": 24}
    hf |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    hf |= {"query_pre_attn_scalar": 8, "sliding_window": 16, "rms_norm_eps": 1e-6, "hidden_act": "gelu_pytorch_tanh"}
    hf |= {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
    case = SimpleNamespace(hf=hf, train=TrainLayout(1, 1, 1, ((0, 1),)), engine=EngineLayout(1), wire="fp32")
    params = ranks_executor.list_params(case)
    full = ranks_executor.full_weights(params, torch.float32, 0)
    executor = Executor(
        ReshardPlan(hf, case.train, case.engine, 1, 17 << 10, "fp32"), 0, 3, partial(torch.empty, dtype=torch.uint8)
    )
    rounds, events, orders = len(executor.prepared_rounds), [], []
    wire = executor_module._transfer

    def transfer(*arguments: Any) -> Any:
        events.append("wire")
        return wire(*arguments)

    def send_to_engine(buffer: torch.Tensor, order: dict[str, Any], draft: bool) -> None:
        events.append("send")
        orders.append((buffer, order["sync_id"]))

    monkeypatch.setattr(executor_module, "_transfer", transfer)
    executor.sync(ranks_executor.shards(case, params, full, 0), send_to_engine, 1, lambda: events.append("settle"))
    assert rounds > 4 and len(orders) == rounds
    assert events == ["wire", "settle", *["wire", "send", "settle"] * (rounds - 1), "send"]
    assert all(item[0] is not other[0] for item, other in zip(orders, orders[1:], strict=False))
    assert len({sync_id for _, sync_id in orders}) == 1
    executor.sync(ranks_executor.shards(case, params, full, 0), send_to_engine, 2)
    assert orders[-1][1] != orders[0][1]


@pytest.mark.alone
@pytest.mark.parametrize(
    "seed", ["0", "1", "3", "5", "7", "11", "13", "40", "58", "1000", "1001", "1002", "1005", "delta:0", "delta:1001"]
)
def test_buffers_are_not_reused_too_early(seed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for rank, actual in enumerate(sync_as_threads(seed, 4, monkeypatch)):
        assert actual["equal"] == [True] * 4 and actual["wrong"] == [], f"seed {seed}, rank {rank}"
