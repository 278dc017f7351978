"""Two policies in one conversation: a solver answers, a critic comments, and the solver answers again.

    question -> solver (actor) -> critic (actor_b) -> solver

Both are trained, by GRPO, each on the tokens that it sampled. A policy sees the conversation in its own chat template:
what it said are the assistant's messages, what the other said are the user's. So the two may be different models with
different tokenizers, and each turn is a sequence of its own: the conversation so far as the prompt, then the turn.

With `rollout.asynchronous` or `rollout.oversample` the solver's first answers come from conversations that run ahead of
the step. The turns that follow have prompts that only these answers complete: engines generate them within the step, by
the current weights.

An answer of the solver has the reward of that answer, and is compared with the answers to the same question at the same
turn. A comment of the critic has the improvement as its reward: that of the second answer minus that of the first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch

from megarl.config import ConfigError
from megarl.controllers.controller import Flow, StepResult
from megarl.controllers.grpo import GRPOController
from megarl.controllers.policies import PoliciesController, flow_of, policy_role
from megarl.controllers.policy_gradient import Experience, select_trainable
from megarl.parallel.policy_configs import engine_key
from megarl.types import Message, Prompt, Rollouts

T = TypeVar("T")
SPEAKERS = ("", "b", "")
"""Policy of each turn."""


@dataclass(frozen=True)
class DialogueOptions:
    ask_critic: str = "Is this answer right? Say briefly what is wrong with it."
    """Message to the critic after an answer of the solver."""
    ask_solver: str = "Take this into account and answer the question again."
    """Message to the solver after a comment of the critic."""


class SpeakerController(GRPOController):
    """GRPO on the turns of one policy, which `DialogueController` collects."""

    experience: Experience

    def collect_experience(self, flow: Flow, items: Sequence[Prompt]) -> Experience:
        return self.experience


class DialogueController(PoliciesController):
    algorithms = {"": SpeakerController, "b": SpeakerController}
    Options = DialogueOptions

    def step(self, flow: Flow, items: Sequence[Prompt]) -> StepResult:
        # 1. The conversations, turn by turn: `samples` of each question.
        samples = self.config.rollout.samples_per_prompt
        first = flow.rollout.generate(items, samples)
        first = flow.reward.score(_one_each(first, len(first.episodes)))
        groups, question = torch.unique(first.group, return_inverse=True)
        prompts, answers = gather_prompts(first), [[text] for text in gather_answers(first)]
        comments, commented = self.speak(flow, "b", prompts, answers, range(len(prompts)))
        for index, text in zip(commented, gather_answers(comments), strict=True):
            answers[index].append(text)
        second, revised = self.speak(flow, "", prompts, answers, commented)
        second = flow.reward.score(second)

        # 2. Rewards. A conversation that broke off, or has no reward, teaches the critic nothing.
        improvement, is_complete = torch.zeros(len(prompts), dtype=torch.float64), ~_has_failed(first)
        improvement[revised] = second.reward - first.reward[revised]
        for turn, indices in ((comments, commented), (second, revised)):
            succeeded = torch.zeros_like(is_complete)
            succeeded[indices] = ~_has_failed(turn)
            is_complete &= succeeded
        second_question = question[revised] + len(groups)
        solved = Rollouts.concat([set_groups(first, question), set_groups(second, second_question)])
        comments = set_groups(set_rewards(comments, improvement[commented]), question[commented])

        # 3. Each policy learns from its own turns.
        self._set_experience("", Experience(solved, select_trainable(solved, self.config)))
        critic_config = self.controllers["b"].config
        trained = select_trainable(comments.select(is_complete[commented]), critic_config)
        self._set_experience("b", Experience(comments, trained))
        result = super().step(flow, items)
        mean = float(improvement[is_complete].mean()) if bool(is_complete.any()) else 0.0
        complete = {"dialogue/improvement": mean, "dialogue/complete_frac": float(is_complete.double().mean())}
        return replace(result, metrics={**result.metrics, **complete})

    def speak(
        self,
        flow: Flow,
        policy: str,
        prompts: Sequence[Prompt],
        answers: Sequence[Sequence[str]],
        active: Sequence[int],
    ) -> tuple[Rollouts, list[int]]:
        """Return the policy's next turn in the `active` conversations, and the numbers of those it took part in.

        answers: the texts of each conversation's turns so far. Those without room for another token break off. Raises
        ConfigError if all do.
        """
        speaker = flow_of(flow, policy)
        chat, longest = speaker.rollout.context.chat, speaker.config.rollout.max_context - 1
        rendered: dict[int, Prompt] = {}
        for index in active:
            messages = see_conversation(prompts[index].messages, answers[index], policy, self.options)
            prompt = chat.render_prompt(replace(prompts[index], messages=messages))
            if len(prompt.token_ids) <= longest:
                rendered[index] = prompt
        if not rendered:
            key = engine_key(self.config, policy_role("rollout", policy), "max_context")
            raise ConfigError(
                f"no conversation leaves room for another turn in {key}={longest + 1}; raise it, or lower "
                "rollout.max_new_tokens"
            )
        return _one_each(speaker.rollout.generate(list(rendered.values()), 1), len(rendered)), list(rendered)

    def _set_experience(self, policy: str, experience: Experience) -> None:
        controller = self.controllers[policy]
        assert isinstance(controller, SpeakerController)
        controller.experience = experience


def see_conversation(
    question: Sequence[Message], answers: Sequence[str], policy: str, options: DialogueOptions
) -> tuple[Message, ...]:
    """Return a conversation as a policy sees it. Consecutive messages of the user are joined: templates want turns."""
    messages: list[Message] = list(question)
    for number, text in enumerate(answers):
        if SPEAKERS[number] == policy:
            messages.append({"role": "assistant", "content": text})
            continue
        text = f"{text}\n\n{options.ask_solver if policy == '' else options.ask_critic}"
        last = messages[-1]
        if last["role"] == "user" and isinstance(last.get("content"), str):
            messages[-1] = {**last, "content": f"{last['content']}\n\n{text}"}
        else:
            messages.append({"role": "user", "content": text})
    return tuple(messages)


def gather_prompts(rollouts: Rollouts) -> list[Prompt]:
    """Return the prompt of each rollout, on all ranks. Over-sampling and replay may return other prompts than the step
    requested. Collective."""
    return _gather(rollouts, [rollout.prompt for rollout in rollouts.local])


def gather_answers(rollouts: Rollouts) -> list[str]:
    """Return the last text of each rollout, on all ranks: the next speaker's engines may be on others. Collective."""
    return _gather(rollouts, [rollout.answer for rollout in rollouts.local])


def _gather(rollouts: Rollouts, values: Sequence[T]) -> list[T]:
    """Return the values of all rollouts, on all ranks. values: of the local ones."""
    local = list(zip(rollouts.local_indices.tolist(), values, strict=True))
    by_index = dict(pair for pairs in rollouts.comm.all_gather_objects(local) for pair in pairs)
    return [by_index[index] for index in range(len(rollouts))]


def set_groups(rollouts: Rollouts, group: torch.Tensor) -> Rollouts:
    """Return the rollouts with these groups, [N]. Collective."""
    local = zip(rollouts.local, group[rollouts.local_indices].tolist(), strict=True)
    return rollouts.replace_local([replace(rollout, group=number) for rollout, number in local])


def set_rewards(rollouts: Rollouts, reward: torch.Tensor) -> Rollouts:
    """Return the rollouts with these rewards, [N]. Collective."""
    local = zip(rollouts.local, reward[rollouts.local_indices].tolist(), strict=True)
    return rollouts.replace_local([replace(rollout, reward=value) for rollout, value in local])


def _has_failed(rollouts: Rollouts) -> torch.Tensor:
    """Return [N] bool: True for rollouts without a reward."""
    return rollouts.has_status("aborted") | (rollouts.unscored > 0)


def _one_each(rollouts: Rollouts, count: int) -> Rollouts:
    """Return the rollouts if there is one of each conversation; an agent may return several branches."""
    if len(rollouts) != count:
        raise ConfigError(
            f"a turn gave {len(rollouts)} sequences for {count} conversations: a dialogue needs tools or environments "
            "in place of agents (rollout.environments)"
        )
    return rollouts
