"""Asynchronous evaluation: when it starts, which step it is logged as, and that its failure does not end the run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from megarl.config import ConfigError
from megarl.controllers.evaluation import Evaluator

pytestmark = pytest.mark.alone


class PendingEvaluation:
    """An evaluation that is done after a number of polls."""

    def __init__(self, step: int, polls: int, error: str = "") -> None:
        self.step, self.polls, self.error = step, polls, error

    def is_done(self) -> bool:
        self.polls -= 1
        return self.polls < 0

    def result(self) -> dict[str, float]:
        if self.error:
            raise ConfigError(self.error)
        return {"eval/weight_version": float(self.step)}


class FakeRun:
    """A training loop without training. polls: how often each evaluation is polled before it is done."""

    def __init__(self, polls: int, steps: int, eval_every: int, asynchronous: bool = True, error: str = "") -> None:
        self.events: list[str] = []
        self.step, self.steps = 0, steps
        log: Any = SimpleNamespace(
            log_evaluation=lambda step, metrics: self.events.append(
                f"logged {step} by {metrics['eval/weight_version']:.0f}"
            ),
            alarm=self.events.append,
            log=self.events.append,
            lap=lambda: None,
        )
        controller: Any = SimpleNamespace(
            begin_evaluation=lambda flow, items: self.begin(polls, error),
            evaluate=lambda flow, items: {"eval/weight_version": float(self.step)},
        )
        self.controller, self.log, self.clock, self.begin_step = controller, log, log, lambda: None
        self.config = SimpleNamespace(run=SimpleNamespace(eval_every=eval_every))
        self.rollout = SimpleNamespace(generates_beside_training=asynchronous)
        self.requirements = SimpleNamespace(has_rollout=True)
        self.evaluator = Evaluator(self, ["prompt"])  # type: ignore[arg-type]

    def begin(self, polls: int, error: str) -> PendingEvaluation:
        self.events.append(f"begin {self.step}")
        return PendingEvaluation(self.step, polls, error)

    def loop(self) -> dict[str, float]:
        while self.step < self.steps:
            if self.evaluator.is_due(self.step):
                self.evaluator.run(self.step)
            self.step += 1
            self.events.append(f"step {self.step}")
            self.evaluator.poll(wait=False)
        last = self.evaluator.run(self.step)
        return last | self.evaluator.poll(wait=True)


def test_training_continues_and_metrics_belong_to_the_starting_step() -> None:
    run = FakeRun(polls=1, steps=4, eval_every=3)
    assert run.loop() == {"eval/weight_version": 4.0}  # the last one is waited for
    assert run.events == [
        *("begin 0", "step 1", "step 2", "logged 0 by 0", "step 3"),
        *("begin 3", "step 4", "logged 3 by 3", "begin 4", "logged 4 by 4"),
    ]


def test_next_evaluation_waits_for_the_pending_one() -> None:
    run = FakeRun(polls=99, steps=2, eval_every=1)
    run.loop()
    assert run.events == [
        *("begin 0", "step 1", "logged 0 by 0", "begin 1", "step 2", "logged 1 by 1", "begin 2", "logged 2 by 2")
    ]


def test_failed_evaluation_is_logged_and_the_run_continues() -> None:
    run = FakeRun(polls=0, steps=2, eval_every=2, error="an engine was lost")
    assert run.loop() == {}
    alarms = [f"the evaluation after step {step} failed: an engine was lost" for step in (0, 2)]
    assert run.events == ["begin 0", "step 1", alarms[0], "step 2", "begin 2", alarms[1]]


def test_synchronous_evaluation_runs_between_steps() -> None:
    run = FakeRun(polls=0, steps=2, eval_every=1, asynchronous=False)
    run.loop()
    assert run.events == ["logged 0 by 0", "step 1", "logged 1 by 1", "step 2", "logged 2 by 2"]


def test_stopping_run_skips_the_pending_evaluation() -> None:
    run = FakeRun(polls=9, steps=1, eval_every=1)
    run.evaluator.run(0)
    run.evaluator.drop()
    assert run.events[-1] == "the evaluation after step 0 has not finished and is skipped"
    assert run.evaluator.poll(wait=True) == {}
