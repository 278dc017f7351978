"""Rollouts of a data set, and nothing trained."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from megarl.config import ConfigError, from_dict
from megarl.controllers.controller import load_requirements, make_controller
from megarl.dry_run.rollout_checks import check_asynchronous
from megarl.types import Prompt, Rollouts

pytestmark = pytest.mark.alone


def flow(calls: list[Any]) -> Any:
    def generate(items: Any, samples: int, held_out: bool = False) -> Rollouts:
        calls.append((items, samples))
        return Rollouts.gather([])

    def score(rollouts: Rollouts) -> Rollouts:
        calls.append("score")
        return rollouts

    return SimpleNamespace(rollout=SimpleNamespace(generate=generate), reward=SimpleNamespace(score=score))


@pytest.mark.parametrize("scored", [True, False])
def test_a_step_is_answers_and_their_rewards(scored: bool) -> None:
    config = from_dict({"algorithm": "generate", "options": {"scored": scored}, "rollout": {"samples_per_prompt": 3}})
    assert not config.run.export and not config.data.shuffle
    declared = load_requirements(config)
    assert declared.roles == (("rollout", "reward") if scored else ("rollout",))
    assert declared.trained_roles == () and declared.main_role == "rollout" and declared.has_engines(config)
    calls: list[Any] = []
    prompts = [Prompt("a", ())]
    result = make_controller(config).step(flow(calls), prompts)
    assert calls == [(prompts, 3), *(["score"] if scored else [])]
    assert result.metrics == {} and result.rollouts is not None and result.batch is None


def test_nothing_goes_on_beside_it() -> None:
    config = from_dict({"algorithm": "generate", "rollout": {"asynchronous": True}})
    with pytest.raises(ConfigError, match="rollout.asynchronous with algorithm=generate: nothing trains concurrently"):
        check_asynchronous(config, load_requirements(config), [])
