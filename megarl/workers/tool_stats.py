"""Metrics of tool calls and of agent sessions, over all engines, and the limit on failing tools.

A tool call fails when the tool raised, died or exceeded `rollout.tool_timeout`. A call that could not be parsed, names
an unknown tool or violates the schema reaches no tool: it is an error of the policy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from megarl.config import ConfigError, RolloutConfig
from megarl.environments.error_log import Calls
from megarl.rollout.rollout_context import Conversations
from megarl.rollout.session_server.recording import Figures
from megarl.types import Everyone

COUNTED = ("sessions", "requests", "refused", "failed", "forks", "branches", "drift", "turns_over", "observations_cut")


class Agents:
    """wanted: whether there are any. talks: of this rank's engine."""

    def __init__(self, wanted: bool, everyone: Everyone, talks: Conversations | None) -> None:
        self._wanted, self._everyone, self._talks = wanted, everyone, talks
        self._before = torch.zeros(len(COUNTED) + 1, dtype=torch.int64)
        self.figures: dict[str, float] = {}

    def note(self) -> None:
        """Look at what has come since the last time. Collective."""
        if not self._wanted:
            return
        own = Figures() if self._talks is None else self._talks.sessions
        mine = torch.tensor([*(getattr(own, name) for name in COUNTED), sum(own.ignored.values())])
        found = dict(zip((*COUNTED, "ignored"), self._everyone.total(mine - self._before).tolist(), strict=True))
        self._before = mine
        drift, branches = found.pop("drift"), found["branches"]
        self.figures = {f"agents/{name}": float(count) for name, count in found.items()}
        self.figures["agents/drift_frac"] = drift / max(1, branches)


LEAST = 16
"""Calls of a tool that are judged together at least: of fewer all may fail by chance."""
_ALARM = 0.5
"""Share of a tool's failed calls beyond which there is an alarm."""


@dataclass
class _Tool:
    step: Calls
    """Of the step under way."""
    judged: Calls
    """Those that `rollout.max_failed_tools` has not been held against yet."""
    is_said: bool = False
    is_alarmed: bool = False


class ToolCalls:
    """wanted: whether there may be any. talks: of this rank's engine. say, alarm: lines of the run's log."""

    def __init__(
        self,
        wanted: bool,
        config: RolloutConfig,
        everyone: Everyone,
        talks: Conversations | None,
        say: Callable[[str], None],
        alarm: Callable[[str], None],
    ) -> None:
        self._wanted, self._most, self._everyone, self._talks = wanted, config.max_failed_tools, everyone, talks
        self._say, self._alarm = say, alarm
        self._before: dict[str, Calls] = {}
        self._tools: dict[str, _Tool] = {}

    def begin_step(self) -> None:
        for tool in self._tools.values():
            tool.step = Calls()

    def note(self, step: int) -> None:
        """Look at what was called since the last time. Collective; raises ConfigError on all ranks where more than
        `rollout.max_failed_tools` of a tool's calls failed."""
        if not self._wanted:
            return
        now = {} if self._talks is None else self._talks.tool_calls
        mine = {name: calls - self._before.get(name, Calls()) for name, calls in now.items()}
        self._before = now
        found: dict[str, Calls] = {}
        for said in self._everyone.objects(mine):
            for name, calls in said.items():
                found[name] = found.get(name, Calls()) + calls
        for name in sorted(found):
            self._look(step, name, found[name])

    def _look(self, step: int, name: str, calls: Calls) -> None:
        tool = self._tools.setdefault(name, _Tool(Calls(), Calls()))
        tool.step, tool.judged = tool.step + calls, tool.judged + calls
        if calls.failed and not tool.is_said:
            tool.is_said = True
            self._say(f"step {step}: {_failed(name, calls)}: {calls.first}; logs/tools_*.log has others")
        if tool.judged.called < LEAST:
            return
        judged, tool.judged = tool.judged, Calls()
        is_bad = judged.failed > _ALARM * judged.called
        if is_bad and not tool.is_alarmed:
            self._alarm(f"step {step}: {_failed(name, judged)}: {judged.first}")
        tool.is_alarmed = is_bad
        if judged.failed > self._most * judged.called:
            raise ConfigError(
                f"{_failed(name, judged)}, more than rollout.max_failed_tools={self._most:g} allows: {judged.first}; "
                "mend the tool, or raise that key"
            )

    @property
    def figures(self) -> dict[str, float]:
        """Of the step: the share of calls that failed, of all tools and of each that was called."""
        called = {name: tool.step for name, tool in self._tools.items() if tool.step.called}
        if not called:
            return {}
        whole = sum(calls.failed for calls in called.values()) / sum(calls.called for calls in called.values())
        return {"rollout/tool_failed_frac": whole} | {
            f"tool/{name}_failed_frac": calls.failed / calls.called for name, calls in called.items()
        }


def _failed(name: str, calls: Calls) -> str:
    return f"{calls.failed} of {calls.called} calls of the tool {name} failed"
