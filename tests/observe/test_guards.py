"""`Guards`: alarms and counters derived from a step's metrics."""

from __future__ import annotations

import json
from math import nan
from typing import Any

import pytest

from megarl.config import Config, ConfigError, from_dict
from megarl.controllers.controller import load_requirements
from megarl.observe.guards import Guards, check_guards

pytestmark = pytest.mark.alone


class RecordedGuards:
    """`Guards` with the lines and alarms they emit."""

    def __init__(self, **guards: Any) -> None:
        self.lines: list[str] = []
        self.alarms: list[str] = []
        self.guards = Guards(from_dict({"guards": guards}).guards, self.lines.append, self.alarms.append)

    def resume(self, **guards: Any) -> RecordedGuards:
        """Return new guards restored from the state of these."""
        restored = RecordedGuards(**guards)
        restored.guards.load_state_dict(json.loads(json.dumps(self.guards.state_dict())))
        return restored


def test_disabled_guards_emit_nothing() -> None:
    recorded = RecordedGuards()
    metrics = {"guards/ppo_kl": 9.0, "actor/kl_to_reference": 9.0, "actor/grad_norm": 99.0}
    assert recorded.guards.check(1, metrics) == {} and not recorded.alarms + recorded.lines
    recorded.guards.raise_if_stopped()


def test_third_consecutive_rollback_stops_the_run() -> None:
    recorded = RecordedGuards(ppo_kl=0.05)
    rolled_back = {"guards/ppo_kl": 0.31}
    counts = [recorded.guards.check(step, rolled_back if step in (1, 2, 4, 5) else {}) for step in (1, 2, 3, 4, 5)]
    assert [result["guards/rollbacks"] for result in counts] == [1, 2, 2, 3, 4]
    recorded.guards.raise_if_stopped()  # two in a row, twice
    assert len(recorded.alarms) == 4
    assert recorded.alarms[0].startswith(
        "step 1: actor/ppo_kl 0.31 is above guards.ppo_kl=0.05: rolled the policy back"
    )
    assert "once in this run" in recorded.alarms[0] and "4 times" in recorded.alarms[3]
    assert "lower actor_optimizer.lr" in recorded.alarms[0]
    resumed = recorded.resume(ppo_kl=0.05)
    assert resumed.guards.check(6, rolled_back) == {"guards/rollbacks": 5}
    with pytest.raises(ConfigError, match=r"^step 6: .* 3 consecutive steps were rolled back.*actor_optimizer\.lr"):
        resumed.guards.raise_if_stopped()


def test_policies_roll_back_apart() -> None:
    """Steps of each policy alternate, so none has rolled back twice in a row; then b does three times."""
    recorded = RecordedGuards(ppo_kl=0.05)
    first, other = {"guards/ppo_kl": 0.5}, {"guards/actor_b_ppo_kl": 0.25}
    for step, metrics in enumerate((first, other, first, first | other, other), 1):
        recorded.guards.check(step, metrics)
        recorded.guards.raise_if_stopped()
    assert len(recorded.alarms) == 6
    assert recorded.alarms[1].startswith("step 2: b/actor/ppo_kl 0.25 is above guards.ppo_kl=0.05")
    assert "lower roles.actor_b.optimizer.lr" in recorded.alarms[1]
    resumed = recorded.resume(ppo_kl=0.05)
    assert resumed.guards.check(6, other) == {"guards/rollbacks": 7}
    with pytest.raises(ConfigError, match=r"^step 6: b/actor/ppo_kl .* 3 consecutive steps were rolled back"):
        resumed.guards.raise_if_stopped()


def test_excessive_kl_of_each_policy_alarms_once() -> None:
    recorded = RecordedGuards(kl=0.5)
    names = ("actor/kl_to_reference", "b/actor/kl_to_reference")
    steps = ((0.1, 0.6), (0.1, 0.7), (0.8, 0.7))
    turned_off = [
        recorded.guards.check(step, dict(zip(names, values, strict=True)))["guards/kl_off"]
        for step, values in enumerate(steps, 1)
    ]
    assert turned_off == [1, 1, 2] and len(recorded.alarms) == 2
    assert recorded.alarms[0].startswith("step 1: the KL of policy b to the reference, 0.6 nats a token")
    assert recorded.resume(kl=0.5).guards.check(4, dict.fromkeys(names, 0.9)) == {"guards/kl_off": 2}


def test_resumes_from_a_checkpoint_of_one_policy() -> None:
    recorded = RecordedGuards(kl=0.5, ppo_kl=0.05)
    recorded.guards.load_state_dict({"rollbacks": 2, "in_a_row": 2, "kl_off": True})
    metrics = {"guards/ppo_kl": 0.1, "actor/kl_to_reference": 0.9}
    assert recorded.guards.check(3, metrics) == {"guards/rollbacks": 3, "guards/kl_off": 1}
    assert len(recorded.alarms) == 1
    with pytest.raises(ConfigError, match="3 consecutive steps"):
        recorded.guards.raise_if_stopped()


def test_excessive_kl_alarms_once() -> None:
    recorded = RecordedGuards(kl=0.5)
    result = [
        recorded.guards.check(step, {"actor/kl_to_reference": kl})["guards/kl_off"] for step, kl in ((1, 0.5), (2, 0.6))
    ]
    assert result == [0.0, 1.0] and len(recorded.alarms) == 1
    assert recorded.alarms[0].startswith(
        "step 2: the KL to the reference, 0.6 nats a token, is above guards.kl=0.5: its coe"
    )
    resumed = recorded.resume(kl=0.5)
    assert resumed.guards.check(3, {"actor/kl_to_reference": 0.9}) == {"guards/kl_off": 1.0} and not resumed.alarms


def test_out_of_memory_alarms_when_the_token_budget_shrinks() -> None:
    recorded = RecordedGuards(oom_retry=True)

    def metrics(count: float, budget: float, recomputes: float = 0.0) -> dict[str, float]:
        names = {"out_of_memory": count, "token_budget": budget, "recomputes": recomputes}
        return {f"guards/reward_model_{name}": value for name, value in names.items()}

    for step, values in enumerate(((0, 3072), (2, 768), (2, 768), (3, 768, 1)), 1):
        assert recorded.guards.check(step, metrics(*values)) == {}
    first, second = recorded.alarms
    assert first.startswith("step 2: out of memory, 2 times so far: micro-batches of the reward model now have at most")
    assert "train.max_tokens_per_gpu=768" in first and "recomputed" not in first and "all layers recomputed" in second
    resumed = recorded.resume(oom_retry=True)
    resumed.guards.check(5, metrics(3, 768, 1))
    assert not resumed.alarms


def test_band_reports_leaving_and_returning_once_each() -> None:
    recorded = RecordedGuards(alarms=True)
    entropies = (0.5, 0.3, 0.2, nan, 0.45, 0.7)
    counts = [recorded.guards.check(step, {"actor/entropy": value}) for step, value in enumerate(entropies, 1)]
    assert [result["guards/out_of_band"] for result in counts] == [0, 1, 1, 1, 0, 1]
    low, high = recorded.alarms
    assert low.startswith("step 2: actor/entropy is 0.3, below 0.4 to 0.6: raise kl.coef")
    assert high.startswith("step 6: actor/entropy is 0.7, above 0.4 to 0.6: lower loss.entropy_coef")
    assert recorded.lines == ["step 5: actor/entropy is back in its band: 0.45, in 0.4 to 0.6"]


def test_out_of_band_count_spans_metrics_and_resumes() -> None:
    recorded = RecordedGuards(alarms=True)
    assert recorded.guards.check(1, {"actor/entropy": 0.1, "actor/grad_norm": nan}) == {"guards/out_of_band": 2}
    # Step 2 has the metrics of an evaluation or of SFT.
    assert recorded.guards.check(2, {"rollout/reward_mean": 1.0}) == {"guards/out_of_band": 2}
    resumed = recorded.resume(alarms=True, bands={"actor/grad_norm": None})
    assert resumed.guards.check(3, {"actor/entropy": 0.1, "actor/grad_norm": nan}) == {"guards/out_of_band": 1}
    assert not resumed.alarms
    resumed.guards.check(4, {"actor/entropy": 0.5})
    assert len(resumed.lines) == 1


def test_loads_checkpoint_of_a_run_without_guards() -> None:
    recorded = RecordedGuards(ppo_kl=0.05, kl=1.0, alarms=True)
    recorded.guards.load_state_dict({})
    assert recorded.guards.check(1, {}) == {"guards/rollbacks": 0, "guards/kl_off": 0.0, "guards/out_of_band": 0}


def config(algorithm: str = "ppo", **sections: Any) -> Config:
    return from_dict({"algorithm": algorithm, **sections})


def test_rejects_guards_without_their_metric() -> None:
    def check(config_to_check: Config) -> list[str]:
        warnings: list[str] = []
        check_guards(config_to_check, load_requirements(config_to_check), warnings)
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


def test_restore_after_too_many_skipped_updates_until_a_good_step() -> None:
    recorded = RecordedGuards()
    check = recorded.guards.check
    assert check(1, {"actor/skipped": 1.0}) == {} and recorded.guards.skip_limited_roles == ()
    assert check(2, {"actor/skipped": 1.0, "guards/actor_consecutive_skips": 6.0}) == {}
    assert recorded.guards.skip_limited_roles == ("actor",)
    recorded.guards.record_restore(1)
    assert recorded.guards.skip_limited_roles == () and recorded.guards.restored_step == 1
    assert check(3, {"actor/skipped": 0.5}) == {"guards/checkpoint_restores": 1} and recorded.guards.restored_step == 1
    resumed = recorded.resume()
    assert resumed.guards.restored_step == 1
    resumed.guards.check(4, {"eval/nll": 1.0})  # no update in this step
    assert resumed.guards.restored_step == 1
    assert resumed.guards.check(4, {"actor/skipped": 0.0, "critic/skipped": 0.0}) == {"guards/checkpoint_restores": 1}
    assert resumed.guards.restored_step is None and not resumed.alarms
