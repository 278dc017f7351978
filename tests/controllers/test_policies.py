"""Several policies in one flow: their roles and requirements, and which roles each algorithm sees."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from megarl.config import ConfigError, from_dict
from megarl.controllers.controller import StepResult, load_requirements
from megarl.controllers.policies import PoliciesController, PPOAndReMaxController
from megarl.controllers.ppo import PPOController
from megarl.parallel.placement import engine_ranks, role_parallel
from megarl.parallel.policy_configs import policy_config, takes_turns
from megarl.types import Prompt

pytestmark = pytest.mark.alone

NAME = "megarl.controllers.policies:PPOAndReMaxController"
B = {
    "actor_b": {"model": "/other", "parallel": {"tp": 2}, "optimizer": {"lr": 0.5}},
    "rollout_b": {"rollout": {"tp": 2, "temperature": 0.7}},
}


def config(**sections: Any) -> Any:
    return from_dict({"algorithm": NAME, "parallel": {"world_size": 4}, "rollout": {"max_context": 77}, **sections})


def test_roles_of_both_policies() -> None:
    declared = load_requirements(config())
    first = ("actor", "reference", "critic", "reward")
    assert declared.roles == ("rollout", "rollout_b", *first, "actor_b", "reference_b")
    assert declared.trained_roles == ("actor", "critic", "actor_b") and declared.main_role == "actor"
    assert not declared.is_group_relative and declared.is_off_policy
    updates = PPOAndReMaxController(config(run={"num_rollout": 5, "num_update": 2})).num_updates
    assert (updates("actor"), updates("critic"), updates("actor_b")) == (10, 10, 10)


def test_second_policy_has_its_own_settings_and_ranks() -> None:
    full = config(roles=B, placement={"actor": "0-1", "rollout": "0-1", "critic": "0-1", "actor_b": "2-3"})
    other = policy_config(full, "rollout_b")
    assert (other.model.path, other.actor_optimizer.lr, other.rollout.temperature) == ("/other", 0.5, 0.7)
    assert other.rollout.max_context == 77 and other.run.seed != full.run.seed
    assert engine_ranks(other) == [(0, 1)]  # on the ranks of `rollout`
    assert (role_parallel(other, "actor").tp, role_parallel(full, "actor_b").tp, full.parallel.tp) == (2, 2, 1)
    assert role_parallel(other, "actor").world_size == 2
    assert policy_config(full, "actor") is full
    roles = load_requirements(full).roles
    assert takes_turns(full, roles, "rollout") and takes_turns(full, roles, "rollout_b")


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"roles": {"rollout_b": {"model": "/x"}}}, r"roles\.rollout_b\.model: .* set roles\.actor_b\.model"),
        ({"roles": {"actor": {"optimizer": {"lr": 1}}}}, r"roles\.actor\.optimizer .* set actor_optimizer"),
        ({"roles": {"actor_b": {"optimizer": {"lrr": 1}}}}, r"did you mean roles\.actor_b\.optimizer\.lr\?"),
        ({"rollout": {"oversample": 2}}, r"rollout\.oversample: not implemented for runs with several policies"),
    ],
)
def test_invalid_settings_of_a_policy(sections: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        for role in ("actor", "actor_b", "rollout_b"):
            policy_config(config(**sections), role)
            role_parallel(config(**sections), role)


class Recorded(PPOController):
    """Reports which roles it was given."""

    def step(self, flow: Any, items: Any) -> StepResult:
        self.items = items
        return StepResult({"actor/x": flow.actor, "rollout/y": flow.rollout, "guards/z": flow.reward})


class WithoutCritic(Recorded):
    trained_roles = ("actor",)

    @classmethod
    def roles(cls, config: Any) -> tuple[str, ...]:
        return ("rollout", "actor", "reward")


class Both(PoliciesController):
    algorithms = {"": Recorded, "b": WithoutCritic}


class TwoCritics(PoliciesController):
    algorithms = {"": Recorded, "b": Recorded}


def test_each_algorithm_sees_its_own_roles() -> None:
    flow: Any = SimpleNamespace(config=config(), actor=1, rollout=2, reward=3, actor_b=4, rollout_b=5)
    controller = Both(config())
    metrics = controller.step(flow, ()).metrics
    assert metrics == {"actor/x": 1, "rollout/y": 2, "guards/z": 3, "b/actor/x": 4, "b/rollout/y": 5}
    controller.controllers["b"].steps = 3
    restored = Both(config())
    restored.load_state_dict(controller.state_dict())
    assert (restored.controllers[""].steps, restored.controllers["b"].steps) == (0, 3)
    with pytest.raises(ConfigError, match="the policy b has a critic, which only the first policy may have"):
        TwoCritics.roles(config())


def test_prompts_are_rendered_for_each_model() -> None:
    """The other model writes two tokens per letter; what then leaves no room for a response is left out."""
    full = config(roles={"actor_b": {"model": "/other"}, "rollout_b": {"rollout": {"max_context": 7}}})
    chat = SimpleNamespace(encode_prompt=lambda prompt: [1] * 2 * len(prompt.id))
    engines = SimpleNamespace(context=SimpleNamespace(chat=chat))
    flow: Any = SimpleNamespace(config=full, actor=1, rollout=2, reward=3, actor_b=4, rollout_b=engines)
    prompts = [Prompt(id=name, messages=(), token_ids=(5,)) for name in ("a", "bcd", "efgh")]
    controller: Any = Both(full)
    controller.step(flow, prompts)
    assert controller.controllers[""].items is prompts
    rendered = controller.controllers["b"].items
    assert [(prompt.id, len(prompt.token_ids)) for prompt in rendered] == [("a", 2), ("bcd", 6)]
