"""Said in the log: that for some steps all answers to each prompt have had the same reward, so that nothing is learned.

Only of algorithms that learn from nothing else than how samples of a prompt differ; a critic tells actions apart where
rewards do not. It is no guard: it costs nothing, changes nothing, and is always on.
"""

from __future__ import annotations

from collections.abc import Mapping

from megarl.types.declared import Declared

FIGURE = "rollout/zero_spread_frac"

IN_A_ROW = 3
"""Steps of which it is said; one alone is chance where prompts are few."""


class Spread:
    """Of a run; all ranks see the same figures."""

    def __init__(self, declared: Declared) -> None:
        self._on = declared.compares_samples and "critic" not in declared.roles
        self._refills = declared.asks_further
        self._steps = 0

    def look(self, step: int, metrics: Mapping[str, float]) -> str:
        """A line for the log once there are `IN_A_ROW` such steps, and again where it comes again after a better one;
        else empty. A step without any reward says nothing."""
        if not self._on or FIGURE not in metrics:
            return ""
        self._steps = self._steps + 1 if metrics[FIGURE] == 1.0 else 0
        if self._steps != IN_A_ROW:
            return ""
        mean = metrics["rollout/reward_mean"]
        other = "" if self._refills else ", or set algorithm=dapo, which looks for prompts that differ"
        return (
            f"step {step}: for {IN_A_ROW} steps all answers to each prompt have had the same reward ({FIGURE} 1, mean "
            f"{mean:.3g}): they tell no answer from another, and nothing is learned from them. Read some answers "
            "(tools/view_rollouts.py): does the reward find what is right in them? If so, take easier prompts where "
            "all are wrong (or sft first), harder ones where all are right; or raise rollout.samples_per_prompt or "
            f"rollout.temperature{other}"
        )
