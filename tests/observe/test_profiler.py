"""`StepProfiler`: windows over the configured steps, and readable traces."""

from __future__ import annotations

import json
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pytest
import torch

from megarl.config import ConfigError, from_dict
from megarl.observe.clock import WAIT, Clock
from megarl.observe.profiler import CudaWindow, StepProfiler, check_profile
from megarl.parallel import device

pytestmark = pytest.mark.alone


class FakeProfiler:
    def __init__(self, calls: list[str]) -> None:
        self.calls = calls
        calls.append("start")

    def annotate(self, name: str) -> AbstractContextManager[None]:
        self.calls.append(name)
        return nullcontext()

    def stop(self, file: Path) -> str:
        self.calls.append(file.name)
        return "here"


def run_steps(profile: StepProfiler, clock: Clock, steps: range) -> None:
    for step in steps:
        profile.begin(step)
        with clock.phase(f"update_{step}", "actor"), clock.span("inside", WAIT), clock.span("own"):
            pass
        profile.end(step)


def test_profiles_consecutive_steps_in_one_window(tmp_path: Path) -> None:
    calls: list[str] = []
    lines: list[str] = []
    clock = Clock()
    profile = StepProfiler((2, 3, 5, 9), clock, tmp_path, 1, lines.append, lambda: FakeProfiler(calls))
    run_steps(profile, clock, range(1, 7))
    profile.begin(9)
    profile.close()  # the run ends in the middle
    profile.close()
    ranges = [[f"update_{step} (actor)", "inside (wait)", "own"] for step in (2, 3, 5)]
    assert calls == [
        *("start", *ranges[0], *ranges[1], "rank_00001_steps_2-3.json"),
        *("start", *ranges[2], "rank_00001_steps_5.json"),
        *("start", "rank_00001_steps_9.json"),
    ]
    assert lines == ["profile of steps 2-3: here", "profile of steps 5: here", "profile of steps 9: here"]
    assert clock.profiler_range is None


@pytest.mark.skipif(device.has_cuda(), reason="with CUDA nsys writes")
def test_cpu_trace_has_phases_and_operations(tmp_path: Path) -> None:
    clock, lines = Clock(), []
    profile = StepProfiler((1,), clock, tmp_path / "profile", 0, lines.append)
    profile.begin(1)
    with clock.phase("actor_update", "actor"):
        torch.ones(8, 8) @ torch.ones(8, 8)
    profile.end(1)
    (file,) = (tmp_path / "profile").iterdir()
    names = {event.get("name") for event in json.loads(file.read_text())["traceEvents"]}
    assert {"actor_update (actor)", "aten::mm"} <= names or {"actor_update (actor)", "aten::matmul"} <= names
    assert str(file) in lines[0]


def test_cuda_window_drives_nsys(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls: list[str] = []
    monkeypatch.setattr(device, "profiler_start", lambda: calls.append("start"))
    monkeypatch.setattr(device, "profiler_stop", lambda: calls.append("stop"))
    monkeypatch.setattr(device, "profiler_range", lambda name: nullcontext(calls.append(name)))
    clock, lines = Clock(), []
    profile = StepProfiler((1,), clock, tmp_path, 0, lines.append, CudaWindow)
    run_steps(profile, clock, range(1, 3))
    assert calls == ["start", "update_1 (actor)", "inside (wait)", "own", "stop"]
    assert "nsys profile -c cudaProfilerApi" in lines[0]


def test_profiler_failure_is_reported_once(tmp_path: Path) -> None:
    def fail() -> FakeProfiler:
        raise RuntimeError("another one is at work")

    clock, lines = Clock(), []
    profile = StepProfiler((1, 2), clock, tmp_path, 0, lines.append, fail)
    run_steps(profile, clock, range(1, 4))
    assert lines == ["could not profile: another one is at work; training continues without it"]


def test_rejects_steps_beyond_the_run() -> None:
    check_profile(from_dict({"run": {"num_rollout": 4}, "track": {"profile_steps": [3, 4]}}))
    with pytest.raises(ConfigError, match="track.profile_steps names step 5, but run.num_rollout=4"):
        check_profile(from_dict({"run": {"num_rollout": 4}, "track": {"profile_steps": [3, 5]}}))
    with pytest.raises(ConfigError, match=r"track.profile_steps\[0\] must be"):
        from_dict({"track": {"profile_steps": [0]}})
