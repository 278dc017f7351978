"""An evaluation beside training: when it begins, what it is logged as, and that no failure of it loses the run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from megarl.config import ConfigError
from megarl.controllers.evaluation import Evaluator

pytestmark = pytest.mark.alone


class Under:
    """An evaluation, over after so many looks. Without an end it is waited for."""

    def __init__(self, step: int, looks: int, error: str = "") -> None:
        self.step, self.looks, self.error = step, looks, error

    def is_done(self) -> bool:
        self.looks -= 1
        return self.looks < 0

    def result(self) -> dict[str, float]:
        if self.error:
            raise ConfigError(self.error)
        return {"eval/weight_version": float(self.step)}


class Run:
    """The loop with nothing in it. looks: of each evaluation. told: what is done, in order."""

    def __init__(self, looks: int, steps: int, every: int, beside: bool = True, error: str = "") -> None:
        self.told: list[str] = []
        self.step, self.steps = 0, steps
        log: Any = SimpleNamespace(
            log_evaluation=lambda step, metrics: self.told.append(
                f"logged {step} by {metrics['eval/weight_version']:.0f}"
            ),
            alarm=self.told.append,
            log=self.told.append,
            lap=lambda: None,
        )
        controller: Any = SimpleNamespace(
            begin_evaluation=lambda flow, items: self.begun(looks, error),
            evaluate=lambda flow, items: {"eval/weight_version": float(self.step)},
        )
        self.controller, self.log, self.clock, self.begin_step = controller, log, log, lambda: None
        self.config = SimpleNamespace(
            run=SimpleNamespace(eval_every=every), rollout=SimpleNamespace(asynchronous=beside)
        )
        self.requirements = SimpleNamespace(has_rollout=True)
        self.evaluator = Evaluator(self, ["prompt"])  # type: ignore[arg-type]

    def begun(self, looks: int, error: str) -> Under:
        self.told.append(f"begun {self.step}")
        return Under(self.step, looks, error)

    def loop(self) -> dict[str, float]:
        while self.step < self.steps:
            if self.evaluator.is_due(self.step):
                self.evaluator.run(self.step)
            self.step += 1
            self.told.append(f"step {self.step}")
            self.evaluator.poll(wait=False)
        last = self.evaluator.run(self.step)
        return last | self.evaluator.poll(wait=True)


def test_steps_go_on_meanwhile_and_figures_are_of_the_step_after_which_it_began() -> None:
    run = Run(looks=1, steps=4, every=3)
    assert run.loop() == {"eval/weight_version": 4.0}  # the last one is waited for
    assert run.told == [
        *("begun 0", "step 1", "step 2", "logged 0 by 0", "step 3"),
        *("begun 3", "step 4", "logged 3 by 3", "begun 4", "logged 4 by 4"),
    ]


def test_the_next_one_waits_for_the_one_under_way() -> None:
    run = Run(looks=99, steps=2, every=1)
    run.loop()
    assert run.told == [
        *("begun 0", "step 1", "logged 0 by 0", "begun 1", "step 2", "logged 1 by 1", "begun 2", "logged 2 by 2")
    ]


def test_a_failure_is_said_and_the_run_goes_on() -> None:
    run = Run(looks=0, steps=2, every=2, error="an engine was lost")
    assert run.loop() == {}
    said = [f"the evaluation after step {step} failed: an engine was lost" for step in (0, 2)]
    assert run.told == ["begun 0", "step 1", said[0], "step 2", "begun 2", said[1]]


def test_without_ranks_of_its_own_it_is_between_steps() -> None:
    run = Run(looks=0, steps=2, every=1, beside=False)
    run.loop()
    assert run.told == ["logged 0 by 0", "step 1", "logged 1 by 1", "step 2", "logged 2 by 2"]


def test_a_run_that_stops_does_not_wait() -> None:
    run = Run(looks=9, steps=1, every=1)
    run.evaluator.run(0)
    run.evaluator.drop()
    assert run.told[-1] == "the evaluation after step 0 has not finished and is skipped"
    assert run.evaluator.poll(wait=True) == {}
