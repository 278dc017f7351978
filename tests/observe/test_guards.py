"""What is said and counted of guards, by their traces in the metrics."""

from __future__ import annotations

import json
from math import nan
from typing import Any

import pytest

from megarl.config import Config, ConfigError, from_dict
from megarl.controllers.controller import load_requirements
from megarl.observe.guards import Guards, check_guards

pytestmark = pytest.mark.alone


class Said:
    """Guards, and the lines that they give."""

    def __init__(self, **guards: Any) -> None:
        self.lines: list[str] = []
        self.alarms: list[str] = []
        self.guards = Guards(from_dict({"guards": guards}).guards, self.lines.append, self.alarms.append)

    def resumed(self, **guards: Any) -> Said:
        """Others that go on with what these have saved."""
        other = Said(**guards)
        other.guards.load_state_dict(json.loads(json.dumps(self.guards.state_dict())))
        return other


def test_guards_that_are_off_say_nothing_and_add_nothing() -> None:
    said = Said()
    metrics = {"guards/ppo_kl": 9.0, "actor/kl_to_reference": 9.0, "actor/grad_norm": 99.0}
    assert said.guards.check(1, metrics) == {} and not said.alarms + said.lines
    said.guards.raise_if_stopped()


def test_going_back_is_counted_and_the_third_in_a_row_ends_the_run() -> None:
    said = Said(ppo_kl=0.05)
    back = {"guards/ppo_kl": 0.31}
    counts = [said.guards.check(step, back if step in (1, 2, 4, 5) else {}) for step in (1, 2, 3, 4, 5)]
    assert [result["guards/rollbacks"] for result in counts] == [1, 2, 2, 3, 4]
    said.guards.raise_if_stopped()  # two in a row, twice
    assert len(said.alarms) == 4
    assert said.alarms[0].startswith("step 1: actor/ppo_kl 0.31 is above guards.ppo_kl=0.05: rolled the policy back")
    assert "once in this run" in said.alarms[0] and "4 times" in said.alarms[3]
    assert "lower actor_optimizer.lr" in said.alarms[0]
    resumed = said.resumed(ppo_kl=0.05)
    assert resumed.guards.check(6, back) == {"guards/rollbacks": 5}
    with pytest.raises(ConfigError, match=r"^step 6: .* 3 consecutive steps were rolled back.*actor_optimizer\.lr"):
        resumed.guards.raise_if_stopped()


def test_a_kl_that_explodes_is_said_once() -> None:
    said = Said(kl=0.5)
    result = [
        said.guards.check(step, {"actor/kl_to_reference": kl})["guards/kl_off"] for step, kl in ((1, 0.5), (2, 0.6))
    ]
    assert result == [0.0, 1.0] and len(said.alarms) == 1
    assert said.alarms[0].startswith(
        "step 2: the KL to the reference, 0.6 nats a token, is above guards.kl=0.5: its coe"
    )
    resumed = said.resumed(kl=0.5)
    assert resumed.guards.check(3, {"actor/kl_to_reference": 0.9}) == {"guards/kl_off": 1.0} and not resumed.alarms


def test_memory_is_said_when_there_is_less_of_it() -> None:
    said = Said(oom_retry=True)

    def metrics(often: float, budget: float, recomputes: float = 0.0) -> dict[str, float]:
        names = {"out_of_memory": often, "token_budget": budget, "recomputes": recomputes}
        return {f"guards/reward_model_{name}": value for name, value in names.items()}

    for step, argument in enumerate(((0, 3072), (2, 768), (2, 768), (3, 768, 1)), 1):
        assert said.guards.check(step, metrics(*argument)) == {}
    first, second = said.alarms
    assert first.startswith("step 2: out of memory, 2 times so far: micro-batches of the reward model now have at most")
    assert "train.max_tokens_per_gpu=768" in first and "recomputed" not in first and "all layers recomputed" in second
    resumed = said.resumed(oom_retry=True)
    resumed.guards.check(5, metrics(3, 768, 1))
    assert not resumed.alarms


def test_a_band_is_said_once_when_it_is_left_and_once_when_it_is_reached_again() -> None:
    said = Said(alarms=True)
    entropies = (0.5, 0.3, 0.2, nan, 0.45, 0.7)
    counts = [said.guards.check(step, {"actor/entropy": value}) for step, value in enumerate(entropies, 1)]
    assert [result["guards/out_of_band"] for result in counts] == [0, 1, 1, 1, 0, 1]
    low, high = said.alarms
    assert low.startswith("step 2: actor/entropy is 0.3, below 0.4 to 0.6: raise kl.coef")
    assert high.startswith("step 6: actor/entropy is 0.7, above 0.4 to 0.6: lower loss.entropy_coef")
    assert said.lines == ["step 5: actor/entropy is back in its band: 0.45, in 0.4 to 0.6"]


def test_bands_are_counted_together_and_kept() -> None:
    said = Said(alarms=True)
    assert said.guards.check(1, {"actor/entropy": 0.1, "actor/grad_norm": nan}) == {"guards/out_of_band": 2}
    assert said.guards.check(2, {"rollout/reward_mean": 1.0}) == {"guards/out_of_band": 2}  # an evaluation's, or SFT's
    resumed = said.resumed(alarms=True, bands={"actor/grad_norm": None})
    assert resumed.guards.check(3, {"actor/entropy": 0.1, "actor/grad_norm": nan}) == {"guards/out_of_band": 1}
    assert not resumed.alarms
    resumed.guards.check(4, {"actor/entropy": 0.5})
    assert len(resumed.lines) == 1


def test_a_checkpoint_of_a_run_without_guards() -> None:
    said = Said(ppo_kl=0.05, kl=1.0, alarms=True)
    said.guards.load_state_dict({})
    assert said.guards.check(1, {}) == {"guards/rollbacks": 0, "guards/kl_off": 0.0, "guards/out_of_band": 0}


def config(algorithm: str = "ppo", **sections: Any) -> Config:
    return from_dict({"algorithm": algorithm, **sections})


def test_guards_of_what_is_not_there() -> None:
    def check(argument: Config) -> list[str]:
        warnings: list[str] = []
        check_guards(argument, load_requirements(argument), warnings)
        return warnings

    assert check(config(guards={"kl": 1.0})) == []
    with pytest.raises(ConfigError, match=r"guards\.kl is set, but .* kl\.apply_to=none has no reference"):
        check(config(guards={"kl": 1.0}, kl={"apply_to": "none"}))
    with pytest.raises(ConfigError, match=r"guards\.ppo_kl is set, but algorithm=sft has no actor/ppo_kl"):
        check(config("sft", guards={"ppo_kl": 0.05}))
    (warning,) = check(config(guards={"ppo_kl": 0.05}))
    assert "run.num_update=1" in warning
    assert check(config(guards={"ppo_kl": 0.05}, run={"num_update": 2})) == []
    with pytest.raises(ConfigError, match=r"guards\.bands\."):
        check(config(guards={"alarms": True, "bands": {"actor/entropy": 1}}))


def test_what_was_skipped_too_often_and_whether_a_step_since_was_a_good_one() -> None:
    said = Said()
    look = said.guards.check
    assert look(1, {"actor/skipped": 1.0}) == {} and said.guards.skip_limited_roles == ()
    assert look(2, {"actor/skipped": 1.0, "guards/actor_consecutive_skips": 6.0}) == {}
    assert said.guards.skip_limited_roles == ("actor",)
    said.guards.record_restore(1)
    assert said.guards.skip_limited_roles == () and said.guards.restored_step == 1
    assert look(3, {"actor/skipped": 0.5}) == {"guards/checkpoint_restores": 1} and said.guards.restored_step == 1
    resumed = said.resumed()
    assert resumed.guards.restored_step == 1
    resumed.guards.check(4, {"eval/nll": 1.0})  # in which nothing was updated
    assert resumed.guards.restored_step == 1
    assert resumed.guards.check(4, {"actor/skipped": 0.0, "critic/skipped": 0.0}) == {"guards/checkpoint_restores": 1}
    assert resumed.guards.restored_step is None and not resumed.alarms
