"""Failing tools: log lines, alarms, metrics and the end of the run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from megarl.config import ConfigError, RolloutConfig
from megarl.environments.process_sessions import ToolCallStats
from megarl.types.comm import LOCAL
from megarl.workers.tool_stats import ToolMonitor


class MonitoredTools:
    """A `ToolMonitor` on one rank, with its log lines and alarms."""

    def __init__(self, **config: Any) -> None:
        self.runner = SimpleNamespace(tool_call_stats={})
        self.lines: list[str] = []
        self.alarms: list[str] = []
        log_functions = self.lines.append, self.alarms.append
        self.monitor = ToolMonitor(True, RolloutConfig(**config), LOCAL, cast(Any, self.runner), *log_functions)

    def step(self, number: int, **calls: ToolCallStats) -> dict[str, float]:
        """Take a step with these tool calls; return its metrics."""
        before = self.runner.tool_call_stats
        self.runner.tool_call_stats = before | {
            name: before.get(name, ToolCallStats()) + call_stats for name, call_stats in calls.items()
        }
        self.monitor.begin_step()
        self.monitor.update(number)
        return self.monitor.metrics


def test_tool_that_always_fails_ends_the_run() -> None:
    tools = MonitoredTools()
    with pytest.raises(ConfigError) as error:
        tools.step(1, f=ToolCallStats(32, 32, "no licence (OSError at f.py:3)"), g=ToolCallStats(5, 0))
    assert str(error.value) == (
        "32 of 32 calls of the tool f failed, more than rollout.max_tool_failed_frac=0.99 allows: no licence (OSError "
        "at f.py:3); fix the tool, or raise that key"
    )
    assert tools.lines == [
        "step 1: 32 of 32 calls of the tool f failed: no licence (OSError at f.py:3); logs/tools_*.log has more"
    ]
    assert tools.alarms == ["step 1: 32 of 32 calls of the tool f failed: no licence (OSError at f.py:3)"]


def test_mostly_malformed_calls_are_logged_once() -> None:
    tools = MonitoredTools()
    few = ToolCallStats(4, 0, num_malformed=4, first_mismatch="Error: unknown argument lever")
    assert tools.step(1, f=few, g=ToolCallStats(num_malformed=7, first_mismatch="no")) == {
        "rollout/tool_failed_frac": 0.0,
        "tool/f_failed_frac": 0.0,
    }
    assert tools.lines == []
    many = ToolCallStats(3, 0, num_malformed=5, first_mismatch="Error: argument wheel is missing")
    for step in (2, 3):
        tools.step(step, f=many)
    assert tools.lines == [
        "step 2: warning: the arguments of 5 of 8 calls of the tool f do not match its schema, so they did not reach "
        "it; the policy reads, for example: Error: unknown argument lever"
    ]
    assert tools.alarms == []


def test_metrics_cover_one_step() -> None:
    tools = MonitoredTools()
    result = tools.step(1, f=ToolCallStats(20, 5, "odd"), g=ToolCallStats(20, 0))
    assert result == {"rollout/tool_failed_frac": 0.125, "tool/f_failed_frac": 0.25, "tool/g_failed_frac": 0.0}
    assert tools.step(2, g=ToolCallStats(4, 1, "late")) == {
        "rollout/tool_failed_frac": 0.25,
        "tool/g_failed_frac": 0.25,
    }
    assert tools.step(3) == {} and tools.alarms == []


def test_tools_are_logged_once_and_few_calls_accumulate() -> None:
    tools = MonitoredTools()
    for step in (1, 2, 3):
        tools.step(step, f=ToolCallStats(5, 5, "odd"))
    assert len(tools.lines) == 1 and tools.alarms == []
    with pytest.raises(ConfigError, match="20 of 20 calls of the tool f failed"):
        tools.step(4, f=ToolCallStats(5, 5, "odd"))


def test_alarms_repeat_after_recovery_and_respect_the_limit() -> None:
    tools = MonitoredTools(max_tool_failed_frac=1.0)
    for step, failed in enumerate((16, 16, 2, 9), 1):
        tools.step(step, f=ToolCallStats(16, failed, "odd"))
    assert [line.partition(":")[0] for line in tools.alarms] == ["step 1", "step 4"]
    strict = MonitoredTools(max_tool_failed_frac=0.1)
    with pytest.raises(
        ConfigError, match="2 of 16 calls of the tool f failed, more than rollout.max_tool_failed_frac=0.1"
    ):
        strict.step(1, f=ToolCallStats(16, 2, "odd"))
