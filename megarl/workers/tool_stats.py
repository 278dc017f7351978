"""Metrics of tool calls and of agent sessions, over all engines, and the limit on failing tools.

A tool call fails when the tool raised, died or exceeded `rollout.tool_timeout`. A call that could not be parsed, names
an unknown tool or violates the schema reaches no tool: it is an error of the policy. If most calls of a step do,
a line says so once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from megarl.config import ConfigError, RolloutConfig
from megarl.environments.process_sessions import ToolCallStats
from megarl.rollout.rollout_runner import RolloutRunner
from megarl.rollout.session_server.recording import SessionMetrics
from megarl.types import Comm

SESSION_COUNTERS = (
    *("sessions", "requests", "refused", "failed", "forks"),
    *("branches", "drift", "over_max_turns", "observations_truncated"),
)


class AgentMetrics:
    """Metrics of agent sessions.

    is_enabled: whether the run has agents. runner: that of this rank's engine, if any.
    """

    def __init__(self, is_enabled: bool, comm: Comm, runner: RolloutRunner | None) -> None:
        self._is_enabled, self._comm, self._runner = is_enabled, comm, runner
        self._last_counts = torch.zeros(len(SESSION_COUNTERS) + 1, dtype=torch.int64)
        self.metrics: dict[str, float] = {}

    def update(self) -> None:
        """Compute the metrics since the last call. Collective."""
        if not self._is_enabled:
            return
        session_metrics = SessionMetrics() if self._runner is None else self._runner.session_metrics
        counts = torch.tensor(
            [*(getattr(session_metrics, name) for name in SESSION_COUNTERS), sum(session_metrics.ignored.values())]
        )
        new_counts = dict(
            zip((*SESSION_COUNTERS, "ignored"), self._comm.all_reduce(counts - self._last_counts).tolist(), strict=True)
        )
        self._last_counts = counts
        drift, branches = new_counts.pop("drift"), new_counts["branches"]
        self.metrics = {f"agents/{name}": float(count) for name, count in new_counts.items()}
        self.metrics["agents/retokenization_drift_frac"] = drift / max(1, branches)


MIN_CALLS = 16
"""Minimum number of calls of a tool to evaluate: with fewer, all may fail by chance."""
MIN_MALFORMED = 8
"""Minimum number of calls of a tool in a step to warn of malformed ones."""
_ALARM_SHARE = 0.5
"""Share of a tool's calls that may fail without an alarm."""


@dataclass
class _ToolState:
    step_calls: ToolCallStats
    """Calls of the current step."""
    unchecked_calls: ToolCallStats
    """Calls not yet checked against `rollout.max_tool_failed_frac`."""
    is_logged: bool = False
    is_alarmed: bool = False


class ToolMonitor:
    """Tracks failing tool calls, and enforces `rollout.max_tool_failed_frac`.

    is_enabled: whether the run has tools or environments. runner: that of this rank's engine, if any. log, alarm: log a
    line and raise an alarm.
    """

    def __init__(
        self,
        is_enabled: bool,
        config: RolloutConfig,
        comm: Comm,
        runner: RolloutRunner | None,
        log: Callable[[str], None],
        alarm: Callable[[str], None],
    ) -> None:
        self._is_enabled, self._max_failed_share = is_enabled, config.max_tool_failed_frac
        self._comm, self._runner, self._log, self._alarm = comm, runner, log, alarm
        self._last_calls: dict[str, ToolCallStats] = {}
        self._tools: dict[str, _ToolState] = {}
        self._has_warned = False

    def begin_step(self) -> None:
        for tool in self._tools.values():
            tool.step_calls = ToolCallStats()

    def update(self, step: int) -> None:
        """Check the calls since the last call of this method. Collective.

        Raises ConfigError on all ranks if more than `rollout.max_tool_failed_frac` of a tool's calls failed.
        """
        if not self._is_enabled:
            return
        current = {} if self._runner is None else self._runner.tool_call_stats
        new_calls = {name: calls - self._last_calls.get(name, ToolCallStats()) for name, calls in current.items()}
        self._last_calls = current
        total_calls: dict[str, ToolCallStats] = {}
        for rank_calls in self._comm.all_gather_objects(new_calls):
            for name, calls in rank_calls.items():
                total_calls[name] = total_calls.get(name, ToolCallStats()) + calls
        for name in sorted(total_calls):
            self._check_tool(step, name, total_calls[name])

    def _check_tool(self, step: int, name: str, calls: ToolCallStats) -> None:
        tool = self._tools.setdefault(name, _ToolState(ToolCallStats(), ToolCallStats()))
        tool.step_calls, tool.unchecked_calls = tool.step_calls + calls, tool.unchecked_calls + calls
        if calls.num_failed and not tool.is_logged:
            tool.is_logged = True
            self._log(f"step {step}: {_describe_failures(name, calls)}: {calls.first_error}; logs/tools_*.log has more")
        self._warn_if_malformed(step, name, tool.step_calls)
        if tool.unchecked_calls.num_calls < MIN_CALLS:
            return
        checked, tool.unchecked_calls = tool.unchecked_calls, ToolCallStats()
        is_bad = checked.num_failed > _ALARM_SHARE * checked.num_calls
        if is_bad and not tool.is_alarmed:
            self._alarm(f"step {step}: {_describe_failures(name, checked)}: {checked.first_error}")
        tool.is_alarmed = is_bad
        if checked.num_failed > self._max_failed_share * checked.num_calls:
            raise ConfigError(
                f"{_describe_failures(name, checked)}, more than "
                f"rollout.max_tool_failed_frac={self._max_failed_share:g} allows: {checked.first_error}; fix the tool, "
                f"or raise that key"
            )

    def _warn_if_malformed(self, step: int, name: str, calls: ToolCallStats) -> None:
        """Log a warning, once per run, if the arguments of most of the step's calls do not match the schema."""
        malformed, total = calls.num_malformed, calls.num_malformed + calls.num_calls
        if self._has_warned or total < MIN_MALFORMED or malformed <= _ALARM_SHARE * total:
            return
        self._has_warned = True
        self._log(
            f"step {step}: warning: the arguments of {malformed} of {total} calls of the tool {name} do not match its "
            f"schema, so they did not reach it; the policy reads, for example: {calls.first_mismatch}"
        )

    @property
    def metrics(self) -> dict[str, float]:
        """Share of the step's calls that failed, over all tools and per called tool."""
        called = {name: tool.step_calls for name, tool in self._tools.items() if tool.step_calls.num_calls}
        if not called:
            return {}
        fractions = {f"tool/{name}_failed_frac": calls.num_failed / calls.num_calls for name, calls in called.items()}
        total = sum(called.values(), ToolCallStats())
        return {"rollout/tool_failed_frac": total.num_failed / total.num_calls} | fractions


def _describe_failures(name: str, calls: ToolCallStats) -> str:
    return f"{calls.num_failed} of {calls.num_calls} calls of the tool {name} failed"
