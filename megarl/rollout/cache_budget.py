"""A budget of conversations that use an engine, so that its KV cache keeps the prefixes that their next turns need.

While a conversation waits for a tool, its keys and values stay in the engine's prefix cache. If more conversations are
in flight than the cache holds, they evict each other's prefixes, and each turn computes its whole context again. So the
oldest conversations use the engine, as many as fit in a budget of tokens, and the others wait:

    CacheBudget ─── update(response) ───▶ CacheBudget     what the engine's responses say about the budget
    CacheBudget ─── count_fitting(tokens of the conversations, oldest first) ───▶ how many may send requests

The budget is unlimited until prefixes are lost. Then it follows the rule of DCTCP (Alizadeh et al., SIGCOMM 2010): a
round without losses raises it by a share, and a round with losses lowers it by half of their share.

A prefix is worth its place only for so long: see `PrefillCost`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

from megarl.engine.engine_protocol import EngineLoad

UNLIMITED = float("inf")
_INCREASE = 0.05
"""Share of the budget by which a round without losses raises it, if conversations wait for it."""
_DECREASE = 0.5
"""Share of the budget that a round takes away in which every response has lost its prefix."""
_MAX_LOST = 0.02
"""Share of a round's responses that may lose their prefix without a consequence."""
_MIN_FILL = 0.5
"""Smallest budget, as a share of the cache. So many tokens fit in any case; losses then have another cause."""
_MIN_ROUND = 8
"""Smallest number of responses in a round."""
_PATIENCE = 0.25
"""Ratio of `patience_s` to the time in which the engine could compute its whole cache again."""
_MIN_PREFILLED = 1024
"""Prompt tokens of the shortest interval in which their cost is measured."""


@dataclass(frozen=True)
class CacheBudget:
    """Tokens of the conversations that may use an engine at a time.

    Attributes:
        tokens: the budget; infinity until prefixes are lost
        num_responses: responses of the round so far; a round has as many as conversations use the engine
        num_lost: those that the engine computed again in part, since it had evicted a prefix or retracted the request
    """

    tokens: float = UNLIMITED
    num_responses: int = 0
    num_lost: int = 0

    def count_fitting(self, tokens: Sequence[int]) -> int:
        """Return how many of the first conversations fit in the budget together: at least one, so that none waits
        forever. tokens: those of each."""
        total = 0
        for number, size in enumerate(tokens):
            total += size
            if number and total > self.tokens:
                return number
        return len(tokens)

    def update(self, is_lost: bool, tokens: Sequence[int], load: EngineLoad) -> Self:
        """Return the budget after a response.

        is_lost: whether the engine computed a part of it again. tokens: those of each conversation that uses the engine
        or waits for the budget, the oldest first. load: the engine's last known one; without a capacity the budget
        stays.
        """
        fitting = self.count_fitting(tokens)
        counted = replace(self, num_responses=self.num_responses + 1, num_lost=self.num_lost + is_lost)
        if not load.capacity or counted.num_responses < max(_MIN_ROUND, fitting):
            return counted
        lost_frac, budget = counted.num_lost / counted.num_responses, self.tokens
        if lost_frac > _MAX_LOST:
            lowered = min(budget, sum(tokens[:fitting])) * (1 - _DECREASE * lost_frac)
            budget = max(lowered, _MIN_FILL * load.capacity)
        elif fitting < len(tokens) and not load.num_waiting:
            budget *= 1 + _INCREASE
        return replace(self, tokens=budget, num_responses=0, num_lost=0)


@dataclass(frozen=True)
class PrefillCost:
    """The cost of a prompt token to an engine, from reads of its load.

    A step has a cost of its own, however few tokens it computes. So the smallest cost of all intervals counts.

    Attributes:
        token_s: seconds per prompt token; 0 until known
        last: load of the last read
    """

    token_s: float = 0.0
    last: EngineLoad | None = None

    def update(self, load: EngineLoad) -> Self:
        """Return the cost after another read. An interval with few tokens is extended."""
        if self.last is None or load.prefilled < self.last.prefilled:
            return replace(self, last=load)
        tokens, seconds = load.prefilled - self.last.prefilled, load.prefill_s - self.last.prefill_s
        if tokens < _MIN_PREFILLED:
            return self
        return replace(self, token_s=min(self.token_s or UNLIMITED, seconds / tokens), last=load)

    def patience_s(self, capacity: int) -> float:
        """Return the seconds for which a conversation that waits for a tool keeps its place in the budget.

        To keep a prefix costs cache that running requests could use, the longer the more; to compute it again costs the
        engine's time. The two are about equal after the time in which the engine could compute its whole cache of
        `capacity` tokens again (the five-minute rule of Gray and Putzolu, 1987, for a KV cache); in simulations a part
        of it costs least.
        """
        return _PATIENCE * capacity * self.token_s
