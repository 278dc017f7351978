"""Evaluation concurrent with training: the same metrics as a synchronous one, plus the weight versions."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megarl.config import ConfigError, from_dict
from megarl.controllers.controller import make_controller
from megarl.types import Prompt, Rollouts

sys.path.insert(0, str(Path(__file__).parent))

from scripted_flow import ScriptedFlow, scripted_rollout  # noqa: E402

pytestmark = pytest.mark.alone

CONFIG = from_dict({"algorithm": "grpo", "run": {"eval_samples": 2}, "rollout": {"samples_per_prompt": 2}})
PROMPTS = [Prompt(str(i), ()) for i in range(2)]


class AsyncFlow(ScriptedFlow):
    """A flow that starts generations asynchronously; group i comes from weight version 5 + i.

    num_samples: samples per prompt of each generation.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.num_samples: list[int] = []

    def start_generation(self, items: Any, samples: int, greedy: bool = False, held_out: bool = False) -> Any:
        self.num_samples.append(samples)
        groups = (self.greedy if greedy else self.sampled).pop(0)
        local = [scripted_rollout(i, reward, version=5 + i) for i, group in enumerate(groups) for reward in group]
        return SimpleNamespace(is_done=lambda: True, result=lambda: Rollouts.gather(local), start_version=5)


def test_async_evaluation_matches_synchronous() -> None:
    sampled, greedy = [[1.0, 0.0], [0.0, 0.0]], [[1.0], [0.0]]
    controller = make_controller(CONFIG)
    synchronous = controller.evaluate(ScriptedFlow(CONFIG, [sampled], [greedy]), PROMPTS)
    flow = AsyncFlow(CONFIG, [sampled], [greedy])
    pending = controller.begin_evaluation(flow, PROMPTS)
    assert pending is not None and pending.is_done() and flow.num_samples == [1, 2]
    result = pending.result()
    assert result.pop("eval/weight_version") == 5 and result.pop("eval/weight_version_last") == 6
    synchronous.pop("eval/weight_version", None)
    assert result == synchronous and result["eval/pass_at_2"] == 0.5 and result["eval/reward_greedy"] == 0.5


def test_evaluation_is_recorded_with_the_step_at_which_it_began() -> None:
    flow = AsyncFlow(CONFIG, [[[1.0, 0.0], [0.0, 0.0]]], [[[1.0], [0.0]]])
    flow.step = 3
    pending = make_controller(CONFIG).begin_evaluation(flow, PROMPTS)
    assert pending is not None
    flow.step = 5
    pending.result()
    assert flow.evaluations == [(3, [True, False], "")]


def test_too_many_aborted_rollouts_fail_the_evaluation() -> None:
    config = replace(CONFIG, rollout=replace(CONFIG.rollout, max_aborted_frac=0.1))
    flow = AsyncFlow(config, [[[1.0, None], [0.0, 0.0]]], [[[1.0], [0.0]]])
    pending = make_controller(config).begin_evaluation(flow, PROMPTS)
    assert pending is not None
    with pytest.raises(ConfigError, match="1 of 4 rollouts were aborted"):
        pending.result()


def test_algorithms_without_rollouts_evaluate_synchronously() -> None:
    assert make_controller(from_dict({"algorithm": "sft"})).begin_evaluation(ScriptedFlow(CONFIG, []), PROMPTS) is None
