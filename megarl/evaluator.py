"""Evaluation on held-out data: between steps, or during training if generation has its own ranks.

During training no step waits. Results are logged when they arrive, as of the step after which the evaluation began. A
failed evaluation is logged and the run continues; at most one evaluation runs at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from megarl.config import ConfigError
from megarl.controllers.controller import Controller, Evaluation
from megarl.observe.clock import Clock
from megarl.observe.run_log import RunLog


class Evaluator:
    """Runs the evaluations of a run.

    flow: the flow that the controller's methods receive. items: held-out items; without any, evaluation is off. every:
    steps between evaluations; 0 turns them off. is_async: whether generation has ranks of its own. begin_step: called
    before each evaluation, so that its seeds do not depend on what the step before sampled.
    """

    def __init__(
        self,
        controller: Controller,
        flow: Any,
        items: Sequence[Any],
        every: int,
        is_async: bool,
        clock: Clock,
        log: RunLog,
        begin_step: Callable[[], None],
    ) -> None:
        self._controller, self._flow, self._items = controller, flow, items
        self._every, self._is_async = every, is_async
        self._clock, self._log, self._begin_step = clock, log, begin_step
        self._pending: tuple[int, Evaluation] | None = None
        """The running evaluation, and the step after which it began."""

    def is_due(self, step: int, is_last: bool = False) -> bool:
        """Return whether to evaluate after this step. The last step is always evaluated."""
        return bool(self._every and len(self._items) and (is_last or step % self._every == 0))

    def run(self, step: int) -> dict[str, float]:
        """Evaluate the current weights. Returns metrics, or {} if the evaluation continues during the next steps."""
        self.poll(wait=True)
        self._begin_step()
        evaluation = self._controller.begin_evaluation(self._flow, self._items) if self._is_async else None
        if evaluation is not None:
            self._pending = step, evaluation
            self._clock.lap()
            return {}
        return self._report(step, self._controller.evaluate(self._flow, self._items))

    def poll(self, wait: bool) -> dict[str, float]:
        """Return the metrics of a finished asynchronous evaluation; {} if it is still running or has failed."""
        if self._pending is None or not (wait or self._pending[1].is_done()):
            return {}
        (step, evaluation), self._pending = self._pending, None
        try:
            metrics = evaluation.result()
        except ConfigError as error:
            self._clock.lap()
            self._log.alarm(f"the evaluation after step {step} has failed: {error}")
            return {}
        return self._report(step, metrics)

    def drop(self) -> None:
        """Abandon the running evaluation of a run that stops early."""
        if self._pending is not None:
            self._log.log(f"the evaluation after step {self._pending[0]} is not over, and is left out")
            self._pending = None

    def _report(self, step: int, metrics: dict[str, float]) -> dict[str, float]:
        self._clock.lap()  # evaluation is not part of a training step's time
        self._log.log_evaluation(step, metrics)
        return metrics
