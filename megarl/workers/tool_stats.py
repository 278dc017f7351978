"""Metrics of tool calls and of agent sessions, over all engines, and the limit on failing tools.

A tool call fails when the tool raised, died or exceeded `rollout.tool_timeout`. A call that could not be parsed, names
an unknown tool or violates the schema reaches no tool: it is an error of the policy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from megarl.config import ConfigError, RolloutConfig
from megarl.environments.error_log import ToolCallStats
from megarl.rollout.rollout_context import RolloutRunner
from megarl.rollout.session_server.recording import SessionMetrics
from megarl.types import Comm

SESSION_COUNTERS = (
    "sessions",
    "requests",
    "refused",
    "failed",
    "forks",
    "branches",
    "drift",
    "turns_over",
    "observations_cut",
)


class AgentMetrics:
    """wanted: whether there are any. talks: of this rank's engine."""

    def __init__(self, wanted: bool, everyone: Comm, talks: RolloutRunner | None) -> None:
        self._is_enabled, self._comm, self._runner = wanted, everyone, talks
        self._last_counts = torch.zeros(len(SESSION_COUNTERS) + 1, dtype=torch.int64)
        self.metrics: dict[str, float] = {}

    def update(self) -> None:
        """Look at what has come since the last time. Collective."""
        if not self._is_enabled:
            return
        own = SessionMetrics() if self._runner is None else self._runner.session_metrics
        mine = torch.tensor([*(getattr(own, name) for name in SESSION_COUNTERS), sum(own.ignored.values())])
        found = dict(
            zip((*SESSION_COUNTERS, "ignored"), self._comm.all_reduce(mine - self._last_counts).tolist(), strict=True)
        )
        self._last_counts = mine
        drift, branches = found.pop("drift"), found["branches"]
        self.metrics = {f"agents/{name}": float(count) for name, count in found.items()}
        self.metrics["agents/drift_frac"] = drift / max(1, branches)


MIN_CALLS = 16
"""Calls of a tool that are judged together at least: of fewer all may fail by chance."""
_ALARM_SHARE = 0.5
"""Share of a tool's failed calls beyond which there is an alarm."""


@dataclass
class _ToolState:
    step_calls: ToolCallStats
    """Of the step under way."""
    unchecked_calls: ToolCallStats
    """Those that `rollout.max_failed_tools` has not been held against yet."""
    is_logged: bool = False
    is_alarmed: bool = False


class ToolMonitor:
    """wanted: whether there may be any. talks: of this rank's engine. say, alarm: lines of the run's log."""

    def __init__(
        self,
        wanted: bool,
        config: RolloutConfig,
        everyone: Comm,
        talks: RolloutRunner | None,
        say: Callable[[str], None],
        alarm: Callable[[str], None],
    ) -> None:
        self._is_enabled, self._max_failed_share, self._comm, self._runner = (
            wanted,
            config.max_failed_tools,
            everyone,
            talks,
        )
        self._log, self._alarm = say, alarm
        self._last_calls: dict[str, ToolCallStats] = {}
        self._tools: dict[str, _ToolState] = {}

    def begin_step(self) -> None:
        for tool in self._tools.values():
            tool.step_calls = ToolCallStats()

    def update(self, step: int) -> None:
        """Look at what was called since the last time. Collective; raises ConfigError on all ranks where more than
        `rollout.max_failed_tools` of a tool's calls failed."""
        if not self._is_enabled:
            return
        now = {} if self._runner is None else self._runner.tool_call_stats
        mine = {name: calls - self._last_calls.get(name, ToolCallStats()) for name, calls in now.items()}
        self._last_calls = now
        found: dict[str, ToolCallStats] = {}
        for said in self._comm.all_gather_objects(mine):
            for name, calls in said.items():
                found[name] = found.get(name, ToolCallStats()) + calls
        for name in sorted(found):
            self._check_tool(step, name, found[name])

    def _check_tool(self, step: int, name: str, calls: ToolCallStats) -> None:
        tool = self._tools.setdefault(name, _ToolState(ToolCallStats(), ToolCallStats()))
        tool.step_calls, tool.unchecked_calls = tool.step_calls + calls, tool.unchecked_calls + calls
        if calls.num_failed and not tool.is_logged:
            tool.is_logged = True
            self._log(
                f"step {step}: {_describe_failures(name, calls)}: {calls.first_error}; logs/tools_*.log has others"
            )
        if tool.unchecked_calls.num_calls < MIN_CALLS:
            return
        judged, tool.unchecked_calls = tool.unchecked_calls, ToolCallStats()
        is_bad = judged.num_failed > _ALARM_SHARE * judged.num_calls
        if is_bad and not tool.is_alarmed:
            self._alarm(f"step {step}: {_describe_failures(name, judged)}: {judged.first_error}")
        tool.is_alarmed = is_bad
        if judged.num_failed > self._max_failed_share * judged.num_calls:
            raise ConfigError(
                f"{_describe_failures(name, judged)}, more than rollout.max_failed_tools={self._max_failed_share:g} allows: {judged.first_error}; "
                "mend the tool, or raise that key"
            )

    @property
    def metrics(self) -> dict[str, float]:
        """Of the step: the share of calls that failed, of all tools and of each that was called."""
        called = {name: tool.step_calls for name, tool in self._tools.items() if tool.step_calls.num_calls}
        if not called:
            return {}
        whole = sum(calls.num_failed for calls in called.values()) / sum(calls.num_calls for calls in called.values())
        return {"rollout/tool_failed_frac": whole} | {
            f"tool/{name}_failed_frac": calls.num_failed / calls.num_calls for name, calls in called.items()
        }


def _describe_failures(name: str, calls: ToolCallStats) -> str:
    return f"{calls.num_failed} of {calls.num_calls} calls of the tool {name} failed"
