"""When a run looks at held-out data: between steps, or beside them where generation has ranks of its own.

Beside them no step waits. What has come of it is logged when it is there, as of the step after which it began. One that
fails is said, and the run goes on; one at a time is under way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megarl.config import Config, ConfigError
from megarl.controllers.controller import Controller, Evaluation
from megarl.observe.clock import Clock
from megarl.observe.run_log import RunLog
from megarl.types.requirements import Declared


class Evaluating:
    """Of a flow."""

    config: Config
    declared: Declared
    controller: Controller
    clock: Clock
    log: RunLog
    step: int
    eval_items: Sequence[Any]
    under_way: tuple[int, Evaluation] | None = None
    """After which step an evaluation began."""

    def _begin_step(self) -> None:
        raise NotImplementedError

    def _eval_due(self, first: int) -> bool:
        every = self.config.run.eval_every
        return bool(every and len(self.eval_items) and (first or self.step % every == 0))

    def _evaluate(self) -> dict[str, float]:
        """Of the weights of now; nothing where it goes on beside the next steps."""
        self._look_at_evaluation(wait=True)
        self._begin_step()  # so that seeds do not depend on what the step before has sampled
        flow: Any = self
        begun = self.controller.begin_evaluation(flow, self.eval_items) if self._generates_beside else None
        if begun is not None:
            self.under_way = self.step, begun
            self.clock.lap()
            return {}
        return self._evaluated(self.step, self.controller.evaluate(flow, self.eval_items))

    @property
    def _generates_beside(self) -> bool:
        return self.declared.generates and self.config.rollout.asynchronous

    def _look_at_evaluation(self, wait: bool) -> dict[str, float]:
        """What has come of the one that is under way, if any; nothing while it is, or where it has failed."""
        if self.under_way is None or not (wait or self.under_way[1].is_over()):
            return {}
        (step, evaluation), self.under_way = self.under_way, None
        try:
            figures = evaluation.figures()
        except ConfigError as error:
            self.clock.lap()
            self.log.alarm(f"the evaluation after step {step} has failed: {error}")
            return {}
        return self._evaluated(step, figures)

    def _leave_evaluation(self) -> None:
        """The run stops here, in a hurry."""
        if self.under_way is not None:
            self.log.say(f"the evaluation after step {self.under_way[0]} is not over, and is left out")
            self.under_way = None

    def _evaluated(self, step: int, metrics: dict[str, float]) -> dict[str, float]:
        self.clock.lap()  # evaluation is not part of a training step's time
        self.log.metrics(step, metrics)
        return metrics
