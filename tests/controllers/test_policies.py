"""Several policies in one flow: their roles and requirements, and which roles each algorithm sees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megarl.config import ConfigError, from_dict
from megarl.config.stages import change_config
from megarl.controllers import policies
from megarl.controllers.controller import StepResult, load_requirements
from megarl.controllers.pf_ppo import PFPPOController
from megarl.controllers.policies import PoliciesController, PPOAndReMaxController
from megarl.controllers.ppo import PPOController
from megarl.data.loader import PromptLoader
from megarl.parallel.placement import engine_ranks, role_parallel
from megarl.parallel.policy_configs import (
    check_change,
    find_shared_ranks,
    list_engine_roles,
    policy_config,
    takes_turns,
)
from megarl.types import LOCAL, Prompt, Rollout, Rollouts, Turn
from megarl.types.requirements import Requirements

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
        (
            {"roles": {"rollout_b": {"rollout": {"replay": "run"}}}},
            r"roles\.rollout_b\.rollout\.replay: all policies replay the same run; set rollout\.replay",
        ),
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


def with_loader(items: Sequence[Prompt] = (), chat: Any = None) -> Any:
    """Return the engines of another policy, whose loader deals out these prompts."""
    loader = PromptLoader(items or [Prompt("p", ())], 1, seed=1, shuffle=False)
    return SimpleNamespace(context=SimpleNamespace(prompt_loader=loader, chat=chat))


def test_each_algorithm_sees_its_own_roles() -> None:
    engines = with_loader()
    flow: Any = SimpleNamespace(config=config(), actor=1, rollout=2, reward=3, actor_b=4, rollout_b=engines)
    controller = Both(config())
    result = controller.step(flow, ())
    assert result.metrics == {"actor/x": 1, "rollout/y": 2, "guards/z": 3, "b/actor/x": 4, "b/rollout/y": engines}
    assert result.policies.keys() == {"b"} and result.policies["b"].metrics["actor/x"] == 4
    controller.controllers["b"].steps = 3
    restored = Both(config())
    restored.load_state_dict(controller.state_dict())
    assert (restored.controllers[""].steps, restored.controllers["b"].steps) == (0, 3)
    assert load_requirements(config(algorithm=f"{__name__}:TwoCritics")).trained_roles == (
        *("actor", "critic"),
        *("actor_b", "critic_b"),
    )


def test_sampling_of_engines_that_generate_ahead_cannot_change() -> None:
    """Here those of the other policy alone."""
    full = config(roles={"rollout_b": {"rollout": {"oversample": 1.5}}})
    with pytest.raises(
        ConfigError, match=r"^stages: rollout\.temperature cannot change with roles\.rollout_b\.rollout\.ov"
    ):
        check_change(full, change_config(full, {"rollout": {"temperature": 0.5}}, ""), "stages: ")
    own = {"oversample": 1.5, "temperature": 0.75}
    full = config(roles={"rollout_b": {"rollout": own}})
    check_change(full, change_config(full, {"rollout": {"temperature": 0.5}}, ""))


def test_critic_of_another_policy_has_its_own_settings() -> None:
    critic = {"path": "/value", "parallel": {"pp": 2}, "optimizer": {"lr": 0.25, "weight_decay": 0.5}}
    full = config(
        critic=critic,
        roles={"actor_b": {"model": "/other", "parallel": {"tp": 2}}, "critic_b": {"optimizer": {"lr": 0.125}}},
        placement={"actor": "0-1", "critic": "0-1", "actor_b": "2-3", "rollout": "0-1", "rollout_b": "2-3"},
    )
    other = policy_config(full, "critic_b")
    assert (other.critic.path, other.critic.optimizer.lr, other.critic.optimizer.weight_decay) == ("", 0.125, 0.5)
    layout = role_parallel(other, "critic")
    assert layout == role_parallel(full, "critic_b") and (layout.tp, layout.pp, layout.world_size) == (2, 2, 2)
    named = config(critic=critic, roles={"critic_b": {"model": "/b", "parallel": {"tp": 4}}})
    other = policy_config(named, "actor_b")
    assert (other.critic.path, role_parallel(named, "critic_b").tp, role_parallel(named, "critic_b").pp) == ("/b", 4, 1)
    assert policy_config(config(critic=critic), "critic_b").critic.path == "/value"


def test_each_policy_has_its_own_position_in_the_prompts() -> None:
    """The first draws three further prompts in a step, which the other is dealt in its next step."""
    names = "abcdefgh"
    loader = PromptLoader([Prompt(name, ()) for name in names], 2, seed=1, shuffle=False)
    rollout_b = SimpleNamespace(context=SimpleNamespace(prompt_loader=loader.fork("b")))
    flow: Any = SimpleNamespace(config=config(), actor=1, rollout=2, reward=3, actor_b=4, rollout_b=rollout_b)
    controller: Any = Both(config())
    dealt = []
    for _ in range(2):
        controller.step(flow, loader.next_batch())
        loader.next_items(3)
        dealt.append(["".join(prompt.id for prompt in part.items) for part in controller.controllers.values()])
    assert dealt == [["ab", "ab"], ["fg", "cd"]]


def test_prompts_that_a_policy_cannot_answer_are_left_out_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other model writes two tokens per letter, and has room for six."""
    full = config(roles={"actor_b": {"model": "/other"}, "rollout_b": {"rollout": {"max_context": 7}}})
    other = SimpleNamespace(
        encode_prompt=lambda prompt: [1] * 2 * len(prompt.id),
        render_prompt=lambda prompt: replace(prompt, token_ids=(1,) * 2 * len(prompt.id)),
    )
    monkeypatch.setattr(policies.ChatTemplate, "load", lambda path, *catalog: {"/other": other}[path])
    asked: list[Any] = []
    catalog = SimpleNamespace(tools={}, environments={})
    data = SimpleNamespace(
        chat=SimpleNamespace(catalog=catalog), load_prompts=lambda files, limits: asked.extend(limits)
    )
    controller: Any = Both(full)
    controller.load_items(SimpleNamespace(data=data))
    assert asked == [(other.encode_prompt, 6, "roles.rollout_b.rollout.max_context")]
    view: Any = with_loader(chat=other)
    rendered = controller._render(SimpleNamespace(rollout=view), "b", [Prompt("abc", (), token_ids=(5,))])
    assert [len(prompt.token_ids) for prompt in rendered] == [6]
    same: Any = Both(config())
    asked.clear()
    same.load_items(SimpleNamespace(data=data))
    assert asked == []


def test_replay_of_a_policy_reads_its_part_of_the_recording(tmp_path: Path) -> None:
    plain, later = (config(rollout={"replay": replay}) for replay in (f"{tmp_path}", "runs/a@7"))
    assert policy_config(plain, "rollout_b").rollout.replay == f"{tmp_path}/policies/b"
    assert policy_config(later, "rollout_b").rollout.replay == "runs/a/policies/b@7"
    assert policy_config(config(), "rollout_b").rollout.replay == ""
    roles = load_requirements(plain).roles
    assert list_engine_roles(plain, roles) == () and list_engine_roles(config(), roles) == ("rollout", "rollout_b")


class Buffered(PFPPOController):
    """Its teacher reads texts in its own tokens, and its critic has a worker of its own."""

    workers = {"critic": "module:Critic", "teacher": "module:Teacher"}

    @classmethod
    def declare_requirements(cls, config: Any) -> Requirements:
        return replace(super().declare_requirements(config), cross_tokenizer_roles=("teacher",))


class TwoBuffers(PoliciesController):
    algorithms = {"": PFPPOController, "b": Buffered}


def test_workers_and_tokenizers_of_all_algorithms_are_declared() -> None:
    declared = TwoBuffers.declare_requirements(config(algorithm=f"{__name__}:TwoBuffers"))
    assert declared.workers == {"critic_b": "module:Critic", "teacher": "module:Teacher"}
    assert declared.cross_tokenizer_roles == ("teacher",)


def test_each_policy_restores_its_own_rollouts(tmp_path: Path) -> None:
    saved, restored = (TwoBuffers(config(algorithm=f"{__name__}:TwoBuffers")) for _ in range(2))
    rewards = {"": 0.25, "b": 0.5}
    for policy, reward in rewards.items():
        turns = Turn((1,)), Turn((2,), (0.0,), True)
        buffer: Any = saved.controllers[policy]
        buffer.buffer.add(Rollouts.gather([Rollout(Prompt("p", ()), turns, reward=reward)]))
    written = saved.save()(tmp_path)
    assert len(written) == 2 and all(path.is_file() for path in written)
    restored.restore(tmp_path, LOCAL)
    for policy, reward in rewards.items():
        buffer = restored.controllers[policy]
        assert [rollout.reward for rollout in buffer.buffer._rollouts.local] == [reward]


class FakeEvaluation:
    def __init__(self, metrics: dict[str, float], is_done: bool) -> None:
        self.metrics, self.done = metrics, is_done

    def is_done(self) -> bool:
        return self.done

    def result(self) -> dict[str, float]:
        return self.metrics


def test_evaluation_during_training_covers_all_policies(monkeypatch: pytest.MonkeyPatch) -> None:
    """It needs engines of all of them on ranks of their own."""
    for cls, reward in ((Recorded, 0.25), (WithoutCritic, 0.5)):
        evaluation = FakeEvaluation({"eval/reward_greedy": reward}, is_done=reward == 0.25)
        monkeypatch.setattr(cls, "begin_evaluation", lambda self, flow, items, evaluation=evaluation: evaluation)
    beside, asleep = (SimpleNamespace(generates_beside_training=value) for value in (True, False))
    flow: Any = SimpleNamespace(config=config(), rollout=beside, rollout_b=beside)
    running = Both(config()).begin_evaluation(flow, ())
    assert running is not None and not running.is_done()
    assert running.result() == {"eval/reward_greedy": 0.25, "eval/b/reward_greedy": 0.5}
    flow.rollout_b = asleep
    assert Both(config()).begin_evaluation(flow, ()) is None


def test_engines_of_a_policy_share_ranks_with_models_of_the_others() -> None:
    """`policy_config` has the policy's actor in place of the first's, so ranks are compared in the whole configuration:
    engines of b share rank 2 with the first actor, and those of the first share none."""
    full = config(placement={"actor": "0,2", "critic": "0", "rollout": "1", "actor_b": "0", "rollout_b": "2-3"})
    roles = load_requirements(full).roles
    assert find_shared_ranks(full, roles, "rollout") == set() and find_shared_ranks(full, roles, "rollout_b") == {2}
    assert not takes_turns(full, roles, "rollout") and takes_turns(full, roles, "rollout_b")
    both = config(placement={"actor": "0", "rollout": "1", "actor_b": "0", "rollout_b": "1"})
    assert find_shared_ranks(both, roles, "rollout") == find_shared_ranks(both, roles, "rollout_b") == {1}
