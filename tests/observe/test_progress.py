"""Progress lines and the live display of a run."""

from __future__ import annotations

import threading

import pytest
from rich.console import Console

from megarl.observe.health_bands import Band
from megarl.observe.progress import DISPLAYED_METRICS, Progress, format_dominant_phases, format_duration

pytestmark = pytest.mark.alone

METRICS = {"rollout/reward_mean": 0.5, "actor/kl_to_reference": 0.0123, "time/step": 2.0, "other": 1.0}


def test_prints_one_line_per_step_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress("PPO", 3)
    progress.begin_step(1)
    progress.begin_phase("generate")
    progress.end_step(1, METRICS)
    progress.report_evaluation(1, {"eval/reward_greedy": 0.25, "eval/turns_mean_greedy": 2.0})
    progress.report_evaluation(1, {"eval/loss": 0.7, "eval/accuracy": 0.5, "eval/margin": -0.125})
    progress.report_evaluation(
        1, {"eval/reward_greedy": 0.5, "eval/weight_version": 1.0, "eval/weight_version_last": 2.0}
    )
    progress.begin_step(2)
    progress.begin_step(3)
    progress.end_step(3, METRICS)
    progress.close()
    first, second, third, fourth, last = capsys.readouterr().out.splitlines()
    assert first.startswith("step 1/3  reward 0.500  KL to reference 0.0123  s/step 2.0")
    assert "left" not in first, "0:00 left is no news"
    assert second == "held out, after step 1: reward_greedy 0.250"
    assert third == "held out, after step 1: accuracy 0.500  margin -0.125"
    assert fourth == "held out, after step 1, by the weights of 1 to 2: reward_greedy 0.500"
    assert last.startswith("step 3/3") and "left" not in last


def test_shows_skipped_updates() -> None:
    progress = Progress("PPO", 3, live=False)
    assert "skipped" not in progress.format_step(1, METRICS | {"actor/skipped": 0.0, "critic/skipped": 0.0})
    line = progress.format_step(1, METRICS | {"actor/skipped": 0.5, "critic/skipped": 1.0})
    assert "  skipped updates 50%  skipped updates of the critic 100%" in line


def test_each_title_is_understood_without_others() -> None:
    line = Progress("PPO", 3, live=False).format_step(2, {"rollout/logprob_diff_mean": 8.8e-07})
    assert line == "step 2/3  mean log-prob difference 8.8e-07"
    assert not [title for title, _, _ in DISPLAYED_METRICS if title.startswith("its")]


def test_disabled_progress_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress("PPO", 3, enabled=False)
    progress.begin_step(1)
    progress.end_step(1, METRICS)
    progress.log("hello")
    progress.close()
    assert capsys.readouterr().out == ""


def test_display_shows_phase_step_and_metrics() -> None:
    progress = Progress("PPO", 10, live=False)
    progress.begin_step(1)
    progress.end_step(1, METRICS)
    progress.begin_step(2)
    progress.begin_phase("actor_update")
    progress._values["eval/reward_greedy"] = 0.75
    progress.estimate_remaining = lambda: 7.0  # type: ignore[method-assign]
    console = Console(width=120, record=True, file=open("/dev/null", "w"))
    console.print(progress._render())
    output = console.export_text()
    for text in ("PPO", "step 1/10", "0:07 left", "now: actor update", "reward 0.500", "held-out greedy 0.750"):
        assert text in output


def test_evaluation_only_run_shows_no_steps() -> None:
    progress = Progress("GENERATE", 1, live=False, has_steps=False)
    progress.begin_step(1)
    progress.end_step(1, METRICS)
    assert progress.format_step(1, METRICS).startswith("all answered:  reward 0.500")
    console = Console(width=120, record=True, file=open("/dev/null", "w"))
    console.print(progress._render())
    output = console.export_text()
    assert "GENERATE" in output and "step 1" not in output and "left" not in output


def test_estimates_remaining_time_from_the_mean_step(monkeypatch: pytest.MonkeyPatch) -> None:
    clock_time = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: clock_time[0])
    progress = Progress("PPO", 10, live=False)
    assert progress.estimate_remaining() is None
    for step in (1, 2, 3):
        progress.begin_step(step)
        clock_time[0] += 4.0
        progress.end_step(step, {})
    assert progress.estimate_remaining() == pytest.approx(4.0 * 7, abs=4.0)
    assert [format_duration(seconds) for seconds in (7.4, 754, 3723)] == ["0:07", "12:34", "1:02:03"]


BANDS = {"actor/entropy": Band("entropy", 0.4, 0.6), "actor/grad_norm": Band("gradient norm", None, 2.0)}


def test_line_names_metrics_out_of_band() -> None:
    progress = Progress("PPO", 3, live=False, bands=BANDS)
    assert "band" not in progress.format_step(1, METRICS | {"actor/entropy": 0.5})
    line = progress.format_step(1, METRICS | {"actor/entropy": 0.3, "actor/grad_norm": float("nan")})
    assert line.endswith("  out of band: entropy, gradient norm")
    assert "band" not in Progress("PPO", 3, live=False).format_step(1, {"actor/entropy": 0.3})


def test_display_colors_metrics_by_band() -> None:
    progress = Progress("PPO", 10, live=False, bands=BANDS)
    progress.begin_step(1)
    progress.end_step(1, METRICS | {"actor/entropy": 0.3, "actor/grad_norm": 1.5})
    console = Console(width=120, record=True, file=open("/dev/null", "w"), force_terminal=True)
    console.print(progress._render())
    output = console.export_text(styles=True)
    for style, text in (("\x1b[1;31m", "0.3, below 0.4 to 0.6"), ("\x1b[32m", "1.5, in at most 2")):
        assert f"{style}{text}" in output


@pytest.fixture
def clock_time(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    result = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: result[0])
    return result


def render(progress: Progress) -> str:
    console = Console(width=120, record=True, file=open("/dev/null", "w"))
    console.print(progress._render())
    return console.export_text()


def test_phase_with_a_counter_shows_share_and_time_left(clock_time: list[float]) -> None:
    progress = Progress("PPO", 10, enabled=False)
    progress.begin_phase("load")
    clock_time[0] += 30.0
    assert progress.estimate_phase() is None and "━" in render(progress), "duration unknown"
    progress.update_phase(25, 100)
    assert progress.estimate_phase() == (0.25, pytest.approx(90.0))
    assert "now: load 0:30, 25%, 1:30 left" in render(progress)
    progress.begin_phase("export")
    assert progress.estimate_phase() is None


def test_phase_without_a_counter_uses_its_last_duration(clock_time: list[float]) -> None:
    progress = Progress("PPO", 10, enabled=False)
    for name in ("generate", "actor_update", "generate"):
        progress.begin_phase(name)
        clock_time[0] += 40.0
        progress.begin_phase("between")
    progress.begin_phase("generate")
    clock_time[0] += 10.0
    assert progress.describe_phase() == "generate 0:10, 25%, 0:30 left"
    clock_time[0] += 40.0
    assert progress.describe_phase() == "generate 0:50", "longer than last time"


def test_logs_a_long_phase_without_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("megarl.observe.progress.REPORT_INTERVAL_S", 0.01)
    logged = threading.Event()
    monkeypatch.setattr(Progress, "log", lambda self, text: (lines.append(text), logged.set()))
    lines: list[str] = []
    progress = Progress("PPO", 10, live=False)
    progress.begin_phase("engine_start")
    assert logged.wait(60)
    progress.close()
    assert lines[0].startswith("now: ")


def test_shows_the_dominant_phases_of_a_step() -> None:
    times = {"time/step": 10.0, "time/generate": 6.2, "time/actor_update": 3.1, "time/reward": 0.5}
    assert format_dominant_phases(times) == "generate 62%, actor update 31%"
    assert format_dominant_phases({"time/step": 0.0}) == format_dominant_phases({}) == ""
    progress = Progress("PPO", 10, enabled=False)
    assert "  generate 62%, actor update 31%" in progress.format_step(1, times)
    progress.end_step(1, times | {"time/save": 9.0})
    progress.end_step(2, times)
    assert "last step: generate 62%, actor update 31%" in render(progress), "of this step alone"
