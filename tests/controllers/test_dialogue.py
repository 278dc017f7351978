"""A conversation of two policies: what each sees, and which rewards their turns have."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megarl.config import ConfigError, from_dict
from megarl.controllers.controller import StepResult, load_requirements
from megarl.controllers.dialogue import DialogueController, DialogueOptions, see_conversation
from megarl.controllers.policies import PoliciesController
from megarl.types import Prompt, Rollout, Rollouts, Turn

pytestmark = pytest.mark.alone

OPTIONS = DialogueOptions("Right?", "Again.")
SYSTEM, QUESTION = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+3?"}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def test_each_policy_sees_its_own_turns_as_the_assistants() -> None:
    question = (SYSTEM, QUESTION)
    assert see_conversation(question, ["6"], "b", OPTIONS) == (
        SYSTEM,
        {"role": "user", "content": "2+3?\n\n6\n\nRight?"},
    )
    assert see_conversation(question, ["6", "No."], "", OPTIONS) == (
        *question,
        assistant("6"),
        {"role": "user", "content": "No.\n\nAgain."},
    )


class FakeRollout:
    """Says its scripted answers, one list per call. A replay may have other `samples` than the configuration."""

    samples = 0

    def __init__(self, *answers: list[str]) -> None:
        self.answers, self.asked = list(answers), list[Any]()
        self.context = SimpleNamespace(chat=SimpleNamespace(render_prompt=self.render))

    def render(self, prompt: Prompt) -> Prompt:
        tokens = sum(len(str(message["content"]).split()) for message in prompt.messages)
        return Prompt(prompt.id, prompt.messages, token_ids=tuple(range(tokens)))

    def generate(self, prompts: Any, samples: int) -> Rollouts:
        self.asked.append([prompt.messages for prompt in prompts])
        texts, turns = self.answers.pop(0), (Turn((1,)), Turn((2,), (0.0,), True))
        samples = samples if samples == 1 else self.samples or samples
        rollouts = [
            Rollout(prompt, turns, group=group, messages=(*prompt.messages, assistant(texts[group * samples + number])))
            for group, prompt in enumerate(prompts)
            for number in range(samples)
        ]
        assert len(rollouts) == len(texts)
        return Rollouts.gather(rollouts)


def make_flow(config: Any) -> Any:
    def score(rollouts: Rollouts) -> Rollouts:
        return rollouts.replace_local([replace(rollout, reward=float(rollout.answer)) for rollout in rollouts.local])

    solver, critic = FakeRollout(["1", "2", "3", "4"], ["1", "7", "3", "5"]), FakeRollout(["a", "b", "c", "d"])
    return SimpleNamespace(config=config, reward=SimpleNamespace(score=score), rollout=solver, rollout_b=critic)


def config(**rollout: Any) -> Any:
    name = "megarl.controllers.dialogue:DialogueController"
    kl = {"apply_to": "none"}
    return from_dict({"algorithm": name, "kl": kl, "rollout": {"samples_per_prompt": 2, **rollout}})


def test_rewards_and_groups_of_both_policies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PoliciesController, "step", lambda self, flow, items: StepResult({}))
    controller = DialogueController(config())
    flow, prompts = make_flow(config()), [Prompt("p", (QUESTION,)), Prompt("q", (QUESTION,))]
    metrics = controller.step(flow, prompts).metrics
    assert metrics == {"dialogue/improvement": (0 + 5 + 0 + 1) / 4, "dialogue/complete_frac": 1.0}
    answers, comments = (controller.controllers[name].experience.trained_rollouts for name in ("", "b"))  # type: ignore[attr-defined]
    assert answers.reward.tolist() == [1, 2, 3, 4, 1, 7, 3, 5]
    assert answers.group.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]  # each answer is compared within its turn
    assert comments.reward.tolist() == [0, 5, 0, 1] and comments.group.tolist() == [0, 0, 1, 1]
    assert [rollout.answer for rollout in comments.local] == ["a", "b", "c", "d"]
    assert flow.rollout.asked[1][3][1:] == (
        assistant("4"),
        {"role": "user", "content": "d\n\nTake this into account and answer the question again."},
    )
    assert torch.equal(answers.actions, torch.ones(8, dtype=torch.int64))


def test_replay_may_have_other_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PoliciesController, "step", lambda self, flow, items: StepResult({}))
    controller, flow = DialogueController(config()), make_flow(config())
    flow.rollout.samples, flow.rollout_b.answers = 3, [list("abcdef")]
    flow.rollout.answers = [list("123456"), list("234567")]
    controller.step(flow, [Prompt("p", (QUESTION,)), Prompt("q", (QUESTION,))])
    answers, comments = (controller.controllers[name].experience.trained_rollouts for name in ("", "b"))  # type: ignore[attr-defined]
    assert answers.group.tolist() == [0] * 3 + [1] * 3 + [2] * 3 + [3] * 3
    assert comments.group.tolist() == [0] * 3 + [1] * 3


def test_conversation_without_room_breaks_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """The prompts of the critic have 13 tokens, those of the solver's second turns 12 or 14."""
    monkeypatch.setattr(PoliciesController, "step", lambda self, flow, items: StepResult({}))
    small, prompts = config(max_context=14, max_new_tokens=2), [Prompt("p", (QUESTION,)), Prompt("q", (QUESTION,))]
    flow, controller = make_flow(small), DialogueController(small)
    flow.rollout_b.answers = [["a", "much too long", "c", "much too long"]]
    flow.rollout.answers = [["1", "2", "3", "4"], ["2", "5"]]
    metrics = controller.step(flow, prompts).metrics
    assert metrics == {"dialogue/improvement": 1.5, "dialogue/complete_frac": 0.5}
    answers, comments = (controller.controllers[name].experience.trained_rollouts for name in ("", "b"))  # type: ignore[attr-defined]
    assert answers.group.tolist() == [0, 0, 1, 1, 2, 3]
    assert comments.reward.tolist() == [1, 2] and comments.group.tolist() == [0, 1]
    with pytest.raises(ConfigError, match=r"no conversation leaves room for another turn in rollout.max_context=8"):
        DialogueController(config(max_context=8, max_new_tokens=2)).step(make_flow(config(max_context=8)), prompts)
    own = from_dict(
        {
            "algorithm": "megarl.controllers.dialogue:DialogueController",
            "kl": {"apply_to": "none"},
            "rollout": {"samples_per_prompt": 2},
            "roles": {"rollout_b": {"rollout": {"max_context": 8, "max_new_tokens": 2}}},
        }
    )
    with pytest.raises(ConfigError, match=r"another turn in roles\.rollout_b\.rollout\.max_context=8; raise it"):
        DialogueController(own).step(make_flow(own), prompts)


def test_roles_of_a_dialogue() -> None:
    declared = load_requirements(config())
    assert declared.roles == ("rollout", "rollout_b", "actor", "reward", "actor_b")
    assert declared.trained_roles == ("actor", "actor_b") and declared.is_group_relative
