"""The generate algorithm: rollouts of a data set without training."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from megarl.config import ConfigError, from_dict
from megarl.controllers.controller import load_requirements, make_controller
from megarl.dry_run.rollout_checks import check_asynchronous
from megarl.types import Prompt, Rollouts

pytestmark = pytest.mark.alone


def recording_flow(calls: list[Any]) -> Any:
    def generate(items: Any, samples: int, held_out: bool = False) -> Rollouts:
        calls.append((items, samples))
        return Rollouts.gather([])

    def score(rollouts: Rollouts) -> Rollouts:
        calls.append("score")
        return rollouts

    return SimpleNamespace(rollout=SimpleNamespace(generate=generate), reward=SimpleNamespace(score=score))


@pytest.mark.parametrize("scored", [True, False])
def test_step_generates_and_optionally_scores(scored: bool) -> None:
    config = from_dict({"algorithm": "generate", "options": {"scored": scored}, "rollout": {"samples_per_prompt": 3}})
    assert not config.run.export and not config.data.shuffle
    requirements = load_requirements(config)
    assert requirements.roles == (("rollout", "reward") if scored else ("rollout",))
    assert requirements.trained_roles == () and requirements.main_role == "rollout" and requirements.has_engines(config)
    calls: list[Any] = []
    prompts = [Prompt("a", ())]
    result = make_controller(config).step(recording_flow(calls), prompts)
    assert calls == [(prompts, 3), *(["score"] if scored else [])]
    assert result.metrics == {} and result.rollouts is not None and result.batch is None


def test_asynchronous_rollouts_are_rejected() -> None:
    config = from_dict({"algorithm": "generate", "rollout": {"asynchronous": True}})
    with pytest.raises(ConfigError, match="rollout.asynchronous with algorithm=generate: nothing trains concurrently"):
        check_asynchronous(config, load_requirements(config), [])
