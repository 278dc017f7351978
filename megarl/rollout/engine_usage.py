"""Observations of an engine during a generation, as sums that add up over engines, and their metrics."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from typing import Self

from megarl.engine.engine_protocol import EngineLoad


@dataclass(frozen=True)
class EngineUsage:
    """Sums over the reads of an engine's load, and counts of its responses.

    Attributes:
        num_reads: reads of the load while requests were open
        running, waiting, cache_usage: sums of `EngineLoad`'s
        waiting_conversations: sum of the conversations that waited for the budget
        num_budgeted: reads at which the budget was limited, and the sum of the budgets then, as shares of the cache
        num_continued: responses to requests that continued a conversation of which the engine had computed a prefix
        num_evicted: those of which it had evicted most of the prefix
        num_retractions: how often the engine retracted a running request
        max_cache_usage: largest cache usage
    """

    num_reads: float = 0
    running: float = 0
    waiting: float = 0
    cache_usage: float = 0
    waiting_conversations: float = 0
    num_budgeted: float = 0
    budget: float = 0
    num_continued: float = 0
    num_evicted: float = 0
    num_retractions: float = 0
    max_cache_usage: float = 0

    def add_load(self, load: EngineLoad, num_conversations: int, budget: float) -> Self:
        """Add a read. num_conversations: those that wait for the budget. budget: tokens, possibly infinity."""
        is_limited = bool(load.capacity) and budget < float("inf")
        return replace(
            self,
            num_reads=self.num_reads + 1,
            running=self.running + load.num_running,
            waiting=self.waiting + load.num_waiting,
            cache_usage=self.cache_usage + load.cache_usage,
            waiting_conversations=self.waiting_conversations + num_conversations,
            num_budgeted=self.num_budgeted + is_limited,
            budget=self.budget + (budget / load.capacity if is_limited else 0.0),
            max_cache_usage=max(self.max_cache_usage, load.cache_usage),
        )

    def add_response(self, is_continued: bool, is_evicted: bool, retractions: int) -> Self:
        """Add a response."""
        return replace(
            self,
            num_continued=self.num_continued + is_continued,
            num_evicted=self.num_evicted + is_evicted,
            num_retractions=self.num_retractions + retractions,
        )

    def merge(self, other: EngineUsage) -> EngineUsage:
        """Return the sums over both."""
        return EngineUsage.of_rows([self.to_row(), other.to_row()])

    def to_row(self) -> list[float]:
        """Return the values in the order of the fields."""
        return list(astuple(self))

    @staticmethod
    def of_rows(rows: Sequence[Sequence[float]]) -> EngineUsage:
        """Return the sums over the rows of several engines; of the last field the maximum."""
        if not rows:
            return EngineUsage()
        values = [sum(column) for column in zip(*rows, strict=True)]
        values[-1] = max(row[-1] for row in rows)
        return EngineUsage(*values)

    @property
    def metrics(self) -> dict[str, float]:
        """Means per engine and read; without reads only what the responses say."""
        metrics = {"engine/retractions": self.num_retractions}
        if self.num_continued:
            metrics["engine/evicted_frac"] = self.num_evicted / self.num_continued
        if self.num_reads:
            metrics |= {
                "engine/running_requests": self.running / self.num_reads,
                "engine/waiting_requests": self.waiting / self.num_reads,
                "engine/waiting_conversations": self.waiting_conversations / self.num_reads,
                "engine/cache_usage_mean": self.cache_usage / self.num_reads,
                "engine/cache_usage_max": self.max_cache_usage,
            }
        if self.num_budgeted:
            metrics["engine/cache_budget"] = self.budget / self.num_budgeted
        return metrics


WIDTH = len(EngineUsage().to_row())
"""Values of a row."""
