"""Tools that fail: a line, an alarm, figures, and the end of a run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from megarl.config import ConfigError, RolloutConfig
from megarl.environments.process_sessions import ToolCallStats
from megarl.types.comm import LOCAL
from megarl.workers.tool_stats import ToolMonitor


class Watched:
    """A `ToolMonitor` of one rank, and what it said."""

    def __init__(self, **config: Any) -> None:
        self.talks = SimpleNamespace(tool_call_stats={})
        self.said: list[str] = []
        self.alarms: list[str] = []
        lines = self.said.append, self.alarms.append
        self.tools = ToolMonitor(True, RolloutConfig(**config), LOCAL, cast(Any, self.talks), *lines)

    def step(self, number: int, **calls: ToolCallStats) -> dict[str, float]:
        """Take a step in which these were called."""
        before = self.talks.tool_call_stats
        self.talks.tool_call_stats = before | {
            name: before.get(name, ToolCallStats()) + item for name, item in calls.items()
        }
        self.tools.begin_step()
        self.tools.update(number)
        return self.tools.metrics


def test_a_tool_that_fails_on_every_call_ends_the_run() -> None:
    watched = Watched()
    with pytest.raises(ConfigError) as error:
        watched.step(1, f=ToolCallStats(32, 32, "no licence (OSError at f.py:3)"), g=ToolCallStats(5, 0))
    assert str(error.value) == (
        "32 of 32 calls of the tool f failed, more than rollout.max_tool_failed_frac=0.99 allows: no licence (OSError "
        "at f.py:3); fix the tool, or raise that key"
    )
    assert watched.said == [
        "step 1: 32 of 32 calls of the tool f failed: no licence (OSError at f.py:3); logs/tools_*.log has more"
    ]
    assert watched.alarms == ["step 1: 32 of 32 calls of the tool f failed: no licence (OSError at f.py:3)"]


def test_figures_are_of_the_step() -> None:
    watched = Watched()
    result = watched.step(1, f=ToolCallStats(20, 5, "odd"), g=ToolCallStats(20, 0))
    assert result == {"rollout/tool_failed_frac": 0.125, "tool/f_failed_frac": 0.25, "tool/g_failed_frac": 0.0}
    assert watched.step(2, g=ToolCallStats(4, 1, "late")) == {
        "rollout/tool_failed_frac": 0.25,
        "tool/g_failed_frac": 0.25,
    }
    assert watched.step(3) == {} and watched.alarms == []


def test_each_tool_is_said_once_and_few_calls_are_judged_together() -> None:
    watched = Watched()
    for step in (1, 2, 3):
        watched.step(step, f=ToolCallStats(5, 5, "odd"))
    assert len(watched.said) == 1 and watched.alarms == []
    with pytest.raises(ConfigError, match="20 of 20 calls of the tool f failed"):
        watched.step(4, f=ToolCallStats(5, 5, "odd"))


def test_an_alarm_again_after_better_ones_and_another_limit() -> None:
    watched = Watched(max_tool_failed_frac=1.0)
    for step, failed in enumerate((16, 16, 2, 9), 1):
        watched.step(step, f=ToolCallStats(16, failed, "odd"))
    assert [line.partition(":")[0] for line in watched.alarms] == ["step 1", "step 4"]
    strict = Watched(max_tool_failed_frac=0.1)
    with pytest.raises(
        ConfigError, match="2 of 16 calls of the tool f failed, more than rollout.max_tool_failed_frac=0.1"
    ):
        strict.step(1, f=ToolCallStats(16, 2, "odd"))
