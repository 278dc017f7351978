"""Held-out prompts that are asked beside training: the same figures as at once, with the weights that answered."""

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

from played import Played, one  # noqa: E402

pytestmark = pytest.mark.alone

CONFIG = from_dict({"algorithm": "grpo", "run": {"eval_samples": 2}, "rollout": {"samples_per_prompt": 2}})
PROMPTS = [Prompt(str(i), ()) for i in range(2)]


class Later(Played):
    """Answers of which the second half of each generation is by newer weights, when they are asked for."""

    def start_generation(self, items: Any, samples: int, greedy: bool = False, held_out: bool = False) -> Any:
        self.asked.append(samples)
        groups = (self.greedy if greedy else self.sampled).pop(0)
        local_items = [one(i, reward, version=5 + i) for i, group in enumerate(groups) for reward in group]
        return SimpleNamespace(is_done=lambda: True, result=lambda: Rollouts.gather(local_items), start_version=5)


def test_both_halves_say_what_is_said_at_once() -> None:
    sampled, greedy = [[1.0, 0.0], [0.0, 0.0]], [[1.0], [0.0]]
    controller = make_controller(CONFIG)
    at_once = controller.evaluate(Played(CONFIG, [sampled], [greedy]), PROMPTS)
    flow = Later(CONFIG, [sampled], [greedy])
    under_way = controller.begin_evaluation(flow, PROMPTS)
    assert under_way is not None and under_way.is_done() and flow.asked == [1, 2]
    result = under_way.result()
    assert result.pop("eval/weight_version") == 5 and result.pop("eval/weight_version_last") == 6
    at_once.pop("eval/weight_version", None)
    assert result == at_once and result["eval/pass_at_2"] == 0.5 and result["eval/reward_greedy"] == 0.5


def test_too_many_aborted_answers_are_an_error_of_the_evaluation() -> None:
    config = replace(CONFIG, rollout=replace(CONFIG.rollout, max_aborted_frac=0.1))
    flow = Later(config, [[[1.0, None], [0.0, 0.0]]], [[[1.0], [0.0]]])
    under_way = make_controller(config).begin_evaluation(flow, PROMPTS)
    assert under_way is not None
    with pytest.raises(ConfigError, match="1 of 4 rollouts were aborted"):
        under_way.result()


def test_an_algorithm_that_generates_nothing_evaluates_at_once() -> None:
    assert make_controller(from_dict({"algorithm": "sft"})).begin_evaluation(Played(CONFIG, []), PROMPTS) is None
