"""Modelled seconds of a step of RL by hand, and compared with published runs."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

import pytest
from small_configs import QWEN2

from megarl.config import from_dict
from megarl.models.flops import active_expert_params, active_params
from megarl.models.memory import engine_bytes
from megarl.models.rl_step_time import Conversations, EngineTime, RLSpec, decay_rate, forward_seconds, rl_step_seconds
from megarl.models.step_time import GPUSpec, StepTime

sys.path.append(str(Path(__file__).parent))

from published_rl import (  # noqa: E402
    CHECKS,
    DECODING,
    LATER_RUNS,
    REFITS,
    RUNS,
    TRAINING,
    PublishedStep,
    load,
    refit_seconds,
)

pytestmark = pytest.mark.alone

TUNING = (Path(__file__).resolve().parents[2] / "docs/tuning.md").read_text()
DENSE: dict[str, Any] = QWEN2 | {"vocab_size": 128}
MOE = DENSE | {"architectures": ["Qwen3MoeForCausalLM"], "head_dim": 16, "num_experts": 8, "num_experts_per_tok": 2}
MOE |= {"moe_intermediate_size": 48, "norm_topk_prob": True}
MACHINE = GPUSpec(1e6, memory_bandwidth=1e4, nvlink_bandwidth=1e5, network_bandwidth=1e4)
FREE = RLSpec(1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, inf)
EQUAL = Conversations(8, 300, 300, 100)  # each has 200 tokens to generate


def engine(hf: dict[str, Any] = DENSE, tp: int = 1, spec: RLSpec = FREE, **options: Any) -> EngineTime:
    return EngineTime(hf, tp, 8, MACHINE, spec, **options)


def step(
    conversations: Conversations = EQUAL, spec: RLSpec = FREE, passes: int = 0, **sections: Any
) -> dict[str, float]:
    return rl_step_seconds(DENSE, from_dict(sections), conversations, passes, MACHINE, spec)


def test_length_distribution() -> None:
    assert 1 / decay_rate(100, 1e6) == pytest.approx(100)
    assert decay_rate(100, 100) == pytest.approx(0, abs=1e-9)
    rate = decay_rate(300, 400)
    assert (1 - math.exp(-rate * 400)) / rate == pytest.approx(300)
    lengths = Conversations(5000, 900, 4096, 100).response_lengths(5000)
    assert sum(lengths) / len(lengths) == pytest.approx(800, rel=0.01)
    assert max(lengths) == 3996
    with pytest.raises(ValueError, match="not between 0 and the longest"):
        decay_rate(500, 400)


def test_an_engine_of_few_responses_has_the_longest_of_the_step() -> None:
    conversations = Conversations(2048, 200, 10_000, 100)
    assert max(conversations.response_lengths(16)) == pytest.approx(100 * math.log(4096))
    assert max(Conversations(16, 200, 10_000, 100).response_lengths(16)) == pytest.approx(100 * math.log(32))


def test_token_reads_weights_and_cache() -> None:
    # Two key-value heads of 16 in four layers, bf16.
    weights, cache = 2 * active_params(DENSE), 2 * 2 * 16 * 4 * 2
    assert engine().token_seconds(3, 50) == pytest.approx((weights + 3 * 50 * cache) / 1e4)
    assert engine(tp=2).token_seconds(3, 50) == pytest.approx(
        (weights / 2 + 3 * 50 * cache / 2 + 4 * 64 * 3 / 2) / 1e4, 0.1
    )


def test_token_reads_the_experts_that_the_batch_chooses() -> None:
    all_experts = 4 * active_expert_params(MOE)
    dense = active_params(MOE) - active_expert_params(MOE)
    for batch, share in ((1, 1 / 4), (2, 1 - (3 / 4) ** 2)):
        assert engine(MOE).token_seconds(batch, 0) == pytest.approx(2 * (dense + share * all_experts) / 1e4)


def test_quantised_weights_are_smaller() -> None:
    fp8 = load("deepseek_v3") | {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    assert engine(load("deepseek_v3")).weight_size == 2
    assert engine(fp8).weight_size == pytest.approx(1.0, abs=0.01)


def test_arithmetic_bounds_large_batches() -> None:
    batch = 10_000
    assert engine().token_seconds(batch, 0) == pytest.approx(2 * active_params(DENSE) * batch / 1e6)


def test_launches_overhead_and_hops() -> None:
    read = engine().token_seconds(2, 0)
    spec = replace(FREE, layer_seconds=0.5, moe_layer_seconds=2.0, token_overhead=0.25)
    assert engine(spec=spec).token_seconds(2, 0) == pytest.approx(read + 4 * 0.5 + 2 * 0.25)
    assert engine(MOE, spec=spec).token_seconds(2, 0) == pytest.approx(engine(MOE).token_seconds(2, 0) + 4 * 2 + 0.5)
    eager = engine(spec=spec, is_eager=True).token_seconds(2, 0)
    assert eager == pytest.approx(read + 4 * MACHINE.layer_overhead / 3 + 2 * 0.25)


def test_all_reduce_of_hidden_states() -> None:
    spec = replace(FREE, hop_seconds=1.0, network_hop_seconds=10.0)
    assert engine(spec=spec).reduce_seconds(5) == 0
    nbytes = 2 * 5 * 64 * 2  # sent and received
    assert engine(tp=2, spec=spec).reduce_seconds(5) == pytest.approx(1 + nbytes / 2 / 1e5)
    # Four nodes of eight: each rank sends three quarters of its eighth over the network.
    expected = 1 + nbytes * 7 / 8 / 1e5 + 2 * 10 + nbytes / 8 * 3 / 4 / 1e4
    assert engine(tp=32, spec=spec).reduce_seconds(5) == pytest.approx(expected)


def test_responses_wait_for_slots() -> None:
    # All 200 tokens at once, at a mean context of 200; or four and four.
    prefill = engine().prefill_seconds(800)
    assert prefill == pytest.approx(2 * active_params(DENSE) * 800 / 1e6)
    assert engine().batch_seconds(EQUAL, 8, 8) == pytest.approx(prefill + 200 * engine().token_seconds(8, 200))
    assert engine().batch_seconds(EQUAL, 8, 4) == pytest.approx(prefill + 400 * engine().token_seconds(4, 200))
    uneven = Conversations(64, 300, 2000, 100)
    times = [engine().batch_seconds(uneven, 64, slots) for slots in (1, 4, 16, 64)]
    assert times == sorted(times, reverse=True)


def test_batch_shrinks_as_responses_end() -> None:
    conversations = Conversations(2, 200, 10_000, 100)
    short, long = sorted(conversations.response_lengths(2))
    both = short * engine().token_seconds(2, 100 + short / 2)
    last = (long - short) * engine().token_seconds(1, 100 + (short + long) / 2)
    assert engine().batch_seconds(conversations, 2, 2) == pytest.approx(engine().prefill_seconds(200) + both + last)


def test_overlapped_generation_takes_a_step_and_what_training_leaves() -> None:
    slow = replace(FREE, token_overhead=0.0, layer_seconds=100.0)  # a token takes 400 s, whatever the batch
    engines = EngineTime(DENSE, 1, 8, GPUSpec(inf, memory_bandwidth=inf), slow)
    response = 200 * 400.0

    def period(training: float, staleness: int = 1) -> float:
        return engines.period_seconds(EQUAL, 8, 1000, training, staleness)

    assert period(1e6) == 1e6
    assert period(10_000) == pytest.approx((response + 10_000) / 2)
    assert period(10_000, 3) == pytest.approx((response + 10_000) / 4)
    # With one slot, eight responses follow one another.
    assert engines.period_seconds(EQUAL, 8, 1, 10_000, 1) == pytest.approx(8 * response)


def test_phases_of_a_step() -> None:
    config = from_dict({"run": {"num_update": 2}})
    update = StepTime(DENSE, 1200, 300, MACHINE).seconds(config)
    whole = StepTime(DENSE, 2400, 300, MACHINE).seconds(config)
    phases = step(spec=replace(FREE, dense_slowdown=1.5, sync_bandwidth=100.0), passes=3, run={"num_update": 2})
    assert phases == {
        "generate": pytest.approx(engine().batch_seconds(EQUAL, 8, 8)),
        "log-probs": pytest.approx(3 * 1.5 * forward_seconds(whole)),
        "updates": pytest.approx(2 * 1.5 * sum(update.values())),
        "weight sync": pytest.approx(engine_bytes(DENSE, 1, 2) / 100),
    }


def test_epochs_repeat_the_updates() -> None:
    twice = step(run={"num_update": 2, "ppo_epochs": 2})["updates"]
    assert twice == pytest.approx(2 * step()["updates"])


def test_conversations_are_shared_by_the_engines_and_the_cache_bounds_them() -> None:
    split = step(parallel={"world_size": 4}, placement={"actor": "0-1", "rollout": "2-3"})["generate"]
    assert split == pytest.approx(engine().batch_seconds(EQUAL, 4, 4))
    for rollout in ({"concurrency": 2}, {"sglang": {"max_total_tokens": 700}}):
        assert step(rollout=rollout)["generate"] == pytest.approx(engine().batch_seconds(EQUAL, 8, 2))


def test_asynchronous_engines_expose_what_training_does_not_hide() -> None:
    job: dict[str, Any] = {"parallel": {"world_size": 2}, "placement": {"actor": "0", "rollout": "1"}}
    phases = step(passes=1, **job, rollout={"asynchronous": True})
    training = phases["log-probs"] + phases["updates"]
    assert phases["generate"] == pytest.approx(engine().period_seconds(EQUAL, 8, 128, training, 1) - training)
    assert phases["generate"] < step(passes=1, **job)["generate"]


@pytest.mark.parametrize("run", RUNS + LATER_RUNS, ids=[f"{run.name}, {run.source}" for run in RUNS + LATER_RUNS])
def test_predicts_published_steps(run: PublishedStep) -> None:
    """Predictions are within a factor of 1.5, and the table has them."""
    assert 1 / 1.5 <= run.ratio <= 1.5
    assert run.tuning_row in TUNING


def test_constants_come_from_other_measurements() -> None:
    def mean_ratio(name: str) -> float:
        ratios = [row.ratio for row in TRAINING if name in row.name]
        return math.exp(sum(map(math.log, ratios)) / len(ratios))

    assert mean_ratio("Llama") == pytest.approx(RLSpec().dense_slowdown, abs=0.05)
    assert mean_ratio("Qwen3") == pytest.approx(RLSpec().moe_slowdown, abs=0.05)
    for row in DECODING:
        assert 1 / 1.1 <= row.ratio <= 1.1
    for model, changes, seconds in REFITS:
        assert 1 / 1.3 <= refit_seconds(load(model, changes), True) / seconds <= 1.3
    for row in TRAINING + DECODING + CHECKS:
        assert row.tuning_row in TUNING


def test_two_constants_that_the_runs_leave_open_do_not_matter_much() -> None:
    """The latency of the network and the bandwidth of NeMo-RL's weight sync: leave-one-out, each run predicted by the
    pair that suits the other runs best."""
    hop = RLSpec().network_hop_seconds
    grid = [(hop, 25e9), (hop / 2, 25e9), (hop * 2, 25e9), (hop, 15e9), (hop, 50e9)]
    errors = []
    for latency, bandwidth in grid:
        spec = replace(RLSpec(), network_hop_seconds=latency)
        errors.append([math.log(sum(run.predict(spec, bandwidth).values()) / run.seconds) for run in RUNS])
    for index, run in enumerate(RUNS):
        best = min(errors, key=lambda row: sum(error**2 for other, error in enumerate(row) if other != index))
        assert abs(best[index]) < math.log(1.5), run.name
