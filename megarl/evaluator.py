"""When a run evaluates on held-out data: between steps, or during training if generation has its own ranks.

During training no step waits. Results are logged when they arrive, as of the step after which the evaluation began. A
failed evaluation is logged and the run continues; at most one evaluation runs at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megarl.config import Config, ConfigError
from megarl.controllers.controller import Controller, Evaluation
from megarl.observe.clock import Clock
from megarl.observe.run_log import RunLog
from megarl.types.requirements import Requirements


class Evaluating:
    """Evaluation methods of a flow."""

    config: Config
    requirements: Requirements
    controller: Controller
    clock: Clock
    log: RunLog
    step: int
    eval_items: Sequence[Any]
    pending_evaluation: tuple[int, Evaluation] | None = None
    """The running evaluation, and the step after which it began."""

    def _begin_step(self) -> None:
        raise NotImplementedError

    def _eval_due(self, first: int) -> bool:
        every = self.config.run.eval_every
        return bool(every and len(self.eval_items) and (first or self.step % every == 0))

    def _evaluate(self) -> dict[str, float]:
        """Evaluate the current weights. Returns metrics, or {} if the evaluation continues during the next steps."""
        self._poll_evaluation(wait=True)
        self._begin_step()  # so that seeds do not depend on what the previous step sampled
        flow: Any = self
        evaluation = self.controller.begin_evaluation(flow, self.eval_items) if self._is_async else None
        if evaluation is not None:
            self.pending_evaluation = self.step, evaluation
            self.clock.lap()
            return {}
        return self._log_evaluation(self.step, self.controller.evaluate(flow, self.eval_items))

    @property
    def _is_async(self) -> bool:
        return self.requirements.has_rollout and self.config.rollout.asynchronous

    def _poll_evaluation(self, wait: bool) -> dict[str, float]:
        """Return the metrics of a finished asynchronous evaluation; {} if it is still running or has failed."""
        if self.pending_evaluation is None or not (wait or self.pending_evaluation[1].is_done()):
            return {}
        (step, evaluation), self.pending_evaluation = self.pending_evaluation, None
        try:
            metrics = evaluation.result()
        except ConfigError as error:
            self.clock.lap()
            self.log.alarm(f"the evaluation after step {step} has failed: {error}")
            return {}
        return self._log_evaluation(step, metrics)

    def _drop_evaluation(self) -> None:
        """Abandon the running evaluation of a run that stops early."""
        if self.pending_evaluation is not None:
            self.log.log(f"the evaluation after step {self.pending_evaluation[0]} is not over, and is left out")
            self.pending_evaluation = None

    def _log_evaluation(self, step: int, metrics: dict[str, float]) -> dict[str, float]:
        self.clock.lap()  # evaluation is not part of a training step's time
        self.log.log_evaluation(step, metrics)
        return metrics
