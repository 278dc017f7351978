"""Throughput in FLOPs of the model shapes, and MFU as a share of the GPU's peak."""

from __future__ import annotations

import dataclasses
import threading

import pytest

from megarl.models.flops import Flops
from megarl.observe import mfu
from megarl.observe.mfu import GpuMonitor, RoleFlops, compute_throughput, select_remote_clocks

pytestmark = pytest.mark.alone

FLOPS = Flops(
    forward_per_token=8e9, backward_per_token=16e9, head_forward=2e9, head_backward=4e9, attention_per_pair=0.0
)


def test_throughput_of_two_roles() -> None:
    actor, critic = (
        RoleFlops("actor", FLOPS, "actor_update", 3),
        RoleFlops("critic", FLOPS, "critic_update", 1, first_rank=3),
    )
    actor.add_forward([60, 40])
    actor.add_update([100])
    critic.add_update([100])
    # For a role on other ranks, the local time only covers sending to it.
    times = {"time/actor_update": 0.5, "time/critic_update": 0.001, "time/step": 2.0}
    assert select_remote_clocks([actor, critic]) == {3: ["time/critic_update"]}
    result = compute_throughput([actor, critic], times, 4, 10e12, {3: {"time/critic_update": 1.5}})
    assert result == pytest.approx(
        {
            "perf/tflops_per_gpu": (1e12 + 3e12 + 3e12) / 2 / 4 / 1e12,
            "perf/actor_tflops_per_gpu": 3e12 / 0.5 / 3 / 1e12,
            "perf/critic_tflops_per_gpu": 3e12 / 1.5 / 1 / 1e12,
            "perf/mfu": (1e12 + 3e12 + 3e12) / 2 / 4 / 10e12,
            "perf/actor_mfu": 3e12 / 0.5 / 3 / 10e12,
            "perf/critic_mfu": 3e12 / 1.5 / 1 / 10e12,
        }
    )
    assert compute_throughput([actor, critic], times, 4, 10e12) == {}, "counters reset each step"


def test_untrained_role_is_rated_by_its_forward_passes() -> None:
    teacher = RoleFlops("teacher", FLOPS, "teacher_logprobs", 2, first_rank=1, is_trained=False)
    reward = RoleFlops("reward", FLOPS, "", is_trained=False)
    teacher.add_forward([100])
    reward.add_forward([50])
    result = compute_throughput([teacher, reward], {"time/step": 1.0}, 4, None, {1: {"time/teacher_logprobs": 0.5}})
    assert result == pytest.approx({"perf/tflops_per_gpu": 1.5 / 4, "perf/teacher_tflops_per_gpu": 1.0})


def test_no_mfu_without_a_gpu() -> None:
    work = RoleFlops("actor", FLOPS, "actor_update")
    work.add_update([10])
    assert compute_throughput([work], {"time/step": 1.0}, 1, None).keys() == {"perf/tflops_per_gpu"}


def test_tokens_that_sequences_share_count_once() -> None:
    """Of two sequences of 100 tokens, the second computes the last 40; its attention lacks pairs of the first 60."""
    flops = dataclasses.replace(FLOPS, attention_per_pair=1e6)
    work = RoleFlops("actor", flops, "actor_update")
    work.add_update([100, 100], [0, 60])
    result = compute_throughput([work], {"time/step": 1.0, "time/actor_update": 1.0}, 1, None)
    pairs = 5050 + 5050 - 60 * 61 / 2
    expected = (140 * (8e9 + 16e9 + 2e9 + 4e9) + 3e6 * pairs) / 1e12
    assert result["perf/actor_tflops_per_gpu"] == pytest.approx(expected)
    assert result["perf/actor_shared_tokens"] == 60 / 200


def test_gpu_monitor_averages_samples_until_exhausted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mfu, "SAMPLE_INTERVAL_S", 0.001)
    samples, stop_requested = iter([(0.5, 2**30), (1.0, 2**31)]), threading.Event()

    def sample() -> tuple[float, int] | None:
        if (result := next(samples, None)) is None:
            stop_requested.set()
        return result

    gpu = GpuMonitor(sample)
    assert stop_requested.wait(60)
    assert gpu.metrics() == {"perf/gpu_utilization": 0.75, "perf/gpu_memory_gib": 2.0}
    assert gpu.metrics() == {}
    gpu.close()


def test_gpu_monitor_has_no_metrics_without_a_gpu() -> None:
    assert GpuMonitor(lambda: None).metrics() == {}
