"""A policy that has gone too far from the one that was sampled from goes back to it: `guards.ppo_kl`.

`actor/ppo_kl` of an update says how far the updates of its step before it have brought the policy: the first has 0, or
what `rollout.asynchronous` makes of it. So the last good policy is the one that the step began with, which the engine
has, and that is what is kept. All ranks of the role have the same figure and do the same; others need not know, for
rows are sent to updates that are left out, too.
"""

from __future__ import annotations

from megarl.megatron.model import MegatronModel

METRIC = "actor/ppo_kl"
WENT_BACK = "guards/ppo_kl"
"""Metric of a step that did: what was too much."""


class GoingBack:
    """Of one model. `limit` None: never."""

    def __init__(self, limit: float | None) -> None:
        self._limit = limit
        self._kept_in = self._back_in = -1
        """Steps."""

    def pauses(self, step: int) -> bool:
        """Whether the rest of this step's updates is left out."""
        return self._back_in == step

    def begin(self, step: int, model: MegatronModel) -> None:
        """Before each update: the first of a step is of a policy to go back to."""
        if self._limit is not None and self._kept_in != step:
            model.keep()
        self._kept_in = step

    def checked(self, model: MegatronModel, metrics: dict[str, float]) -> dict[str, float]:
        """What an update has reported, after which the model may be another. One that is not a number is too much."""
        found = metrics.get(METRIC, 0.0)
        if self._limit is None or found <= self._limit:
            return metrics
        model.go_back()
        self._back_in = self._kept_in
        return metrics | {WENT_BACK: found}
