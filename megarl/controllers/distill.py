"""On-policy distillation: the policy samples, and a teacher scores each of its tokens.

This minimises the reverse KL, from the policy to the teacher, in the states that the policy itself visits; a student
trained on its teacher's texts never sees these (arXiv:2306.13649). It is a policy gradient whose per-token cost is the
KL estimate k1, without discounting, so that each token answers for itself alone (Thinking Machines Lab, "On-Policy
Distillation", 2025):

    A_t = log pi_teacher(a_t | s_t) - log pi(a_t | s_t)

Its expected gradient in a state is that of -KL(pi(. | s_t) || pi_teacher(. | s_t)). As in PPO, the ratio of the loss is
to the behavior policy, and clipped.

A teacher may be the policy itself that knows more, such as the solution (on-policy self-distillation,
arXiv:2601.18734, with the sampled token's log-ratio): its `prompt` is then in place of the last user message, and its
log-probs are those of the sampled tokens after that. There may be several teachers, each for some data sources or with
a weight. With weights that sum to 1,

    A_t = sum_k w_k log pi_k(a_t | s_t) - log pi(a_t | s_t),

which minimises sum_k w_k KL(pi || pi_k).
"""

from __future__ import annotations

import string
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import torch

from megarl.algorithms.advantages import group_advantages, spread_to_tokens
from megarl.algorithms.token_stats import token_mean
from megarl.chat_format.chat_template import ChatTemplate
from megarl.config import Config, ConfigError, Weight, strict
from megarl.config.strict import PositiveFloat, Prose
from megarl.controllers.controller import Flow, StepResult
from megarl.controllers.cross_tokenizer import Alignment, align_rollouts
from megarl.controllers.mini_batches import MetricMeans
from megarl.controllers.policy_gradient import Experience, PolicyUpdateController, policy_loss, policy_loss_columns
from megarl.parallel.placement import BUILTIN_ROLES, role_settings
from megarl.types import (
    IMAGE_PLACEHOLDER,
    Image,
    ModelOutput,
    Prompt,
    Rollout,
    Rollouts,
    TokenLoss,
    TrainBatch,
    Turn,
    as_token_ids,
    reads,
)
from megarl.types.requirements import Requirements
from megarl.workers.futures import Future
from megarl.workers.worker_registry import TEACHER


@dataclass(frozen=True)
class TeacherOptions:
    weight: PositiveFloat = 1.0
    """Weight among the teachers of a rollout, which are normalized to sum to 1."""
    sources: tuple[str, ...] = ()
    """Data sources (the column `data_source`) of the prompts that it teaches; empty for all."""
    prompt: Prose = ""
    """Format string that replaces the last user message for this teacher: `{prompt}` is that message, `{ground_truth}`
    the reference answer, and other names are further columns of the row. Empty for the student's prompt."""
    tokenizer: Literal["policy", "teacher"] = "policy"
    """Whose tokens the teacher reads: `teacher` for a model with another tokenizer, which reads the policy's texts
    (`controllers/cross_tokenizer.py`)."""


@dataclass(frozen=True)
class DistillOptions:
    teachers: dict[str, Any] = field(default_factory=lambda: {"teacher": {}})
    """Options of each teacher by its role. `reference` is the policy with its initial weights, `actor` the policy
    itself before the step's updates; any other name is a model of its own: `roles: {NAME: {model: FOLDER}}`. Keys:
    `weight` among the teachers of a rollout, normalized to sum to 1; `sources`, the data sources that it teaches, all
    by default; `prompt`, a format string that it reads in place of the last user message, such as "{prompt} The
    solution is {ground_truth}. Explain it.", with the names of the row's further columns; `tokenizer`, `teacher` for
    a model with another tokenizer than the policy's, which must be the only teacher."""
    reward_coef: Weight = 0.0
    """Weight of the reward's advantage, group-relative as in GRPO, added to the teacher's advantage on all tokens of a
    sample; 0 learns from the teacher alone."""
    center_advantages: bool = False
    """Subtract the mean of the teacher's advantages over all tokens of the batch. This mean is minus the KL, so without
    centering all sampled tokens are discouraged, those that the teacher agrees with only somewhat less: right in
    expectation, but noisier."""
    advantage_clip: PositiveFloat | None = None
    """Clip the teacher's advantage of a token to [-advantage_clip, advantage_clip], in nats; null disables
    clipping."""
    synonyms = {"centre": "center_advantages", "bound": "advantage_clip"}


@dataclass(frozen=True)
class TextExperience(Experience):
    """Experience with the answers in the tokens of a teacher that has its own tokenizer."""

    alignment: Alignment | None = None


SELF = ("reference", "actor")
"""Teachers with the policy's own model."""


class DistillController(PolicyUpdateController):
    """Distills from the role `teacher`, or from those of `options.teachers`, which need the policy's tokenizer:
    `roles: {teacher: {model: FOLDER}}`."""

    Options = DistillOptions

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.teachers = read_teachers(self.options)
        self._teacher_chat: ChatTemplate | None = None  # of the teacher with its own tokenizer

    @classmethod
    def read_options(cls, config: Config) -> Any:
        if config.kl.apply_to != "none":
            raise ConfigError(
                f"kl.apply_to={config.kl.apply_to} with algorithm={config.algorithm}: distillation penalizes the "
                "KL to the teacher; set it to none"
            )
        options = super().read_options(config)
        for name, teacher in read_teachers(options).items():
            if teacher.tokenizer == "teacher":
                check_cross_tokenizer(config, name, options)
        return options

    @classmethod
    def roles(cls, config: Config) -> tuple[str, ...]:
        settings = config.reward
        options = cls.read_options(config)
        has_reward = settings.functions or settings.model or "reward" in config.roles or options.reward_coef
        teachers = [name for name in options.teachers if name != "actor"]
        return ("rollout", "actor", *teachers, *(("reward",) if has_reward else ()))

    @classmethod
    def declare_requirements(cls, config: Config) -> Requirements:
        options = cls.read_options(config)
        return replace(
            super().declare_requirements(config),
            is_group_relative=options.reward_coef > 0,
            workers={name: TEACHER for name in options.teachers if name not in SELF},
            cross_tokenizer_roles=tuple(
                name for name, teacher in read_teachers(options).items() if teacher.tokenizer == "teacher"
            ),
        )

    def load_items(self, flow: Flow) -> Sequence[Prompt]:
        """Return the training prompts. Raises ConfigError if the first one lacks a column that a teacher's prompt
        names."""
        items = super().load_items(flow)
        for name, teacher in self.teachers.items():
            if teacher.prompt and len(items):
                fill_prompt(items[0], teacher.prompt, f"options.teachers.{name}.prompt")
        return items

    def load_eval_items(self, flow: Flow) -> Sequence[Prompt]:
        """Return the held-out prompts; empty without a reward to rate answers."""
        return super().load_eval_items(flow) if "reward" in self.roles(self.config) else ()

    def step(self, flow: Flow, items: Sequence[Prompt]) -> StepResult:
        config = self.config

        # 1. Experience: rollouts, and log-probs of policy and teachers.
        experience = self.collect_experience(flow, items)
        batch, policy, metrics = self.run_models(flow, experience)
        assert policy.logprobs is not None and batch.ref_logprobs is not None

        # 2. Advantages: the teacher's preference for each token, plus the reward's where it has a weight.
        advantages = torch.where(batch.loss_mask, batch.ref_logprobs - policy.logprobs, 0.0)
        alignment = experience.alignment if isinstance(experience, TextExperience) else None
        if alignment is not None:
            has_span = batch.loss_mask & (alignment.heads >= 0)
            advantages = torch.where(has_span, advantages, 0.0)
            metrics["distill/aligned_frac"] = token_mean(has_span.float(), batch.loss_mask, batch.all_reduce)
        metrics["distill/reverse_kl"] = -token_mean(advantages, batch.loss_mask, batch.all_reduce)
        if alignment is not None:
            advantages = alignment.sum_spans(advantages)
        if (clip := self.options.advantage_clip) is not None:
            advantages = advantages.clamp(-clip, clip)
        if self.options.center_advantages:
            mean = token_mean(advantages, batch.loss_mask, batch.all_reduce)
            advantages = torch.where(batch.loss_mask, advantages - mean, 0.0)
        if weight := self.options.reward_coef:
            episodes = batch.episodes
            reward, group = episodes.take_last(batch.sequence_reward), episodes.take_last(batch.group)
            per_episode = episodes.expand(group_advantages(reward, group, config.advantage.norm_by_std))
            advantages = advantages + weight * spread_to_tokens(
                per_episode[batch.local_indices], batch.cu_seqlens, batch.loss_mask
            )
        batch, metrics = self.mask_again(flow, experience, batch.with_(advantages=advantages), metrics)

        # 3. Updates, then the weight sync.
        @reads(*policy_loss_columns(config))
        def actor_loss(output: ModelOutput, part: TrainBatch) -> TokenLoss:
            return policy_loss(output, part, config, 0.0)

        means = MetricMeans()
        for mini in self.mini_batches(experience, batch):
            means.add(flow.actor.update(mini, actor_loss))
        flow.rollout.update_weights(flow.actor)
        return self.finish_step(experience, batch, metrics | means.sync(), kl_mean=None)

    def collect_experience(self, flow: Flow, items: Sequence[Prompt]) -> Experience:
        experience = super().collect_experience(flow, items)
        name, teacher = next(iter(self.teachers.items()))
        if teacher.tokenizer == "policy":
            return experience
        chat = flow.data.chat
        if self._teacher_chat is None:
            path = role_settings(self.config, name).model
            self._teacher_chat = ChatTemplate.load(path, chat.catalog.tools, chat.catalog.environments)
        alignment = align_rollouts(
            experience.trained_rollouts,
            chat,
            self._teacher_chat,
            lambda prompt: fill_prompt(prompt, teacher.prompt, f"options.teachers.{name}.prompt"),
        )
        return TextExperience(**vars(experience), alignment=alignment)

    def begin_reference(self, flow: Flow, experience: Experience, batch: TrainBatch) -> Future[ModelOutput]:
        """Start the teachers' forward passes. The future has the means of their log-probs by weight, [T]; of a teacher
        with its own tokenizer the sum of each span, at the span's first token."""
        rollouts = experience.trained_rollouts
        if isinstance(experience, TextExperience) and (alignment := experience.alignment) is not None:
            read = TrainBatch.from_rollouts(alignment.rollouts)
            future = getattr(flow, next(iter(self.teachers))).forward(read)

            def receive_spans() -> ModelOutput:
                values = future.wait().logprobs
                assert values is not None
                return ModelOutput(logprobs=alignment.gather_targets(values[read.loss_mask]))

            return Future(receive_spans)
        weights = self._source_weights(rollouts)
        parts = []
        for (name, teacher), weight in zip(self.teachers.items(), weights, strict=True):
            is_taught = weight > 0
            if not bool(is_taught.any()):
                continue
            taught = rollouts if bool(is_taught.all()) else rollouts.select(is_taught)
            if teacher.prompt:
                taught = replace_prompts(flow, taught, teacher.prompt, f"options.teachers.{name}.prompt")
            read = batch if taught is rollouts else TrainBatch.from_rollouts(taught)
            parts.append((weight, read, getattr(flow, name).forward(read)))

        def receive() -> ModelOutput:
            logprobs = torch.zeros_like(batch.rollout_logprobs)
            for weight, read, future in parts:
                values = future.wait().logprobs
                assert values is not None
                token_weights = weight[batch.sequence_ids].float()
                # Prompts differ in length, but the action tokens are the same ones in the same order.
                is_taught = batch.loss_mask & (token_weights > 0)
                logprobs[is_taught] += token_weights[is_taught] * values[read.loss_mask]
            return ModelOutput(logprobs=logprobs)

        return Future(receive)

    def _source_weights(self, rollouts: Rollouts) -> torch.Tensor:
        """Return the weight of each teacher for each rollout, [teachers, N] fp64; columns sum to 1."""
        rows = [
            [teacher.weight if not teacher.sources or source in teacher.sources else 0.0 for source in rollouts.sources]
            for teacher in self.teachers.values()
        ]
        weights = torch.tensor(rows, dtype=torch.float64)  # [teachers, sources]
        untaught = [
            source for source, total in zip(rollouts.sources, weights.sum(0).tolist(), strict=True) if not total
        ]
        if untaught:
            raise ConfigError(
                f"options.teachers: no teacher has the data source {untaught[0]!r} among its sources; add it to "
                "one, or leave out the sources of a teacher"
            )
        return (weights / weights.sum(0))[:, rollouts.source]


def read_teachers(options: DistillOptions) -> dict[str, TeacherOptions]:
    """Return the options of each teacher by its role. Raises ConfigError for invalid ones, and if there is nothing to
    learn from them."""
    teachers = {}
    for name, tree in options.teachers.items():
        key = f"options.teachers.{name}"
        if not isinstance(name, str) or not name.isidentifier() or name in BUILTIN_ROLES.keys() - SELF:
            raise ConfigError(
                f"{key}: a teacher is reference, actor, or a name of its own with roles.NAME.model, not another role"
            )
        if isinstance(tree, dict) and tree.get("tokenizer") == "own":
            raise ConfigError(f"{key}.tokenizer=own: this value is now called teacher")
        teachers[name] = strict.build_dataclass(TeacherOptions, tree or {}, f"{key}.", root=Config)
        check_prompt(teachers[name].prompt, f"{key}.prompt")
    if not teachers:
        raise ConfigError("options.teachers is empty: name a teacher")
    if "actor" in teachers and not teachers["actor"].prompt:
        raise ConfigError(
            "options.teachers.actor without a prompt: the teacher is then the student, and every advantage is 0; set "
            "options.teachers.actor.prompt"
        )
    if list(teachers) == ["reference"] and not teachers["reference"].prompt:
        raise ConfigError(
            "options.teachers.reference without a prompt: the teacher is then the student at its start, from which "
            "there is nothing to learn; set options.teachers.reference.prompt, or add another teacher"
        )
    return teachers


def check_cross_tokenizer(config: Config, name: str, options: DistillOptions) -> None:
    """Raise ConfigError for what a teacher with its own tokenizer cannot have."""
    key = f"options.teachers.{name}.tokenizer=teacher"
    if len(options.teachers) > 1:
        raise ConfigError(f"{key}: spans of text differ between teachers, so it must be the only teacher")
    if config.rollout.max_turns > 1 or config.rollout.environments:
        raise ConfigError(
            f"{key} compares the text of one answer: set rollout.max_turns=1, and rollout.environments to none"
        )
    if name in SELF:
        raise ConfigError(f"{key}: the {name} is the policy's own model; leave tokenizer out")


def check_prompt(template: str, key: str) -> None:
    """Raise ConfigError unless `template` is empty or a format string of plain names."""
    try:
        names = [name for _, name, _, _ in string.Formatter().parse(template) if name is not None]
    except ValueError as error:
        raise ConfigError(f"{key} is not a format string: {error}; write {{{{ and }}}} for braces") from None
    if bad := [name for name in names if not name.isidentifier()]:
        raise ConfigError(f"{key}: {{{bad[0]}}} is not the name of a column; write {{{{ and }}}} for braces")


def fill_prompt(prompt: Prompt, template: str, key: str) -> Prompt:
    """Return the prompt with the filled `template` as the last user message; unchanged if it is empty. Raises
    ConfigError for a column that the row lacks, and for images that the template leaves out."""
    if not template:
        return prompt
    last = max((i for i, message in enumerate(prompt.messages) if message["role"] == "user"), default=None)
    if last is None:
        raise ConfigError(f"{key}: prompt {prompt.id} has no user message to replace")
    columns = {**prompt.extra, "ground_truth": prompt.ground_truth, "prompt": prompt.messages[last]["content"]}
    columns = {name: value for name, value in columns.items() if value is not None}
    try:
        text = template.format_map(columns)
    except KeyError as error:
        raise ConfigError(
            f"{key}: prompt {prompt.id} has no column {error.args[0]!r}; it has {', '.join(sorted(columns))}"
        ) from None
    if text.count(IMAGE_PLACEHOLDER) != str(columns["prompt"]).count(IMAGE_PLACEHOLDER) and prompt.images:
        raise ConfigError(
            f"{key}: prompt {prompt.id} has images, which the teacher reads, too; let the template have {{prompt}} once"
        )
    filled = {**prompt.messages[last], "content": text}
    return replace(prompt, messages=(*prompt.messages[:last], filled, *prompt.messages[last + 1 :]))


def fill_first_turn(chat: ChatTemplate, rollout: Rollout, template: str, key: str) -> Turn:
    """Return the first turn with the filled `template` in place of the last user message in it. Raises ConfigError."""
    first, num_actions = rollout.turns[0], sum(turn.is_action for turn in rollout.turns)
    answers = [i for i, message in enumerate(rollout.messages) if message["role"] == "assistant"]
    messages = rollout.messages[: answers[-num_actions]] if 0 < num_actions <= len(answers) else rollout.messages
    last = max((i for i, message in enumerate(messages) if message["role"] == "user"), default=-1)
    text, start, stop, images = chat.decode(first.token_ids), -1, 0, list(first.images)
    shown: list[Image] = []
    for message in messages[: last + 1]:  # in the order of the text, so that no message is found in another one
        words = str(message.get("content") or "").strip()
        num_images = words.count(IMAGE_PLACEHOLDER) if images else 0
        shown, images = images[:num_images], images[num_images:]
        if shown:
            words = chat.image_format.insert(words, shown, key)
        start = text.find(words, stop) if words else -1
        if start >= 0:
            stop = start + len(words)
    if start < 0:
        raise ConfigError(
            f"{key}: a conversation of prompt {rollout.prompt.id} does not begin with its row's prompt, and its first "
            "turn has no user message as its environment or agent wrote it; the teacher's prompt takes the place of one"
        )
    filled = fill_prompt(replace(rollout.prompt, messages=(messages[last],)), template, key).messages[0]["content"]
    if shown:
        filled = chat.image_format.insert(filled, shown, key)
    ids = as_token_ids(chat.replace_text(first.token_ids, start, stop, filled))
    return replace(first, token_ids=ids, images=chat.place_images(ids, first.images))


def replace_prompts(flow: Flow, rollouts: Rollouts, template: str, key: str) -> Rollouts:
    """Return the rollouts with the teacher's prompt in their first turn, and without records of the policy's experts.

    A conversation that does not begin with its row's prompt, because an environment or agent wrote its first messages,
    gets the template in place of the last user message among these; all other tokens stay. Collective. Raises
    ConfigError if there is none, and for a conversation that is then longer than the model's positions.
    """
    chat, local = flow.data.chat, []
    firsts: dict[str, tuple[Turn, Turn]] = {}  # by prompt: the first turn of a sample, and the teacher's
    for rollout in rollouts.local:
        prompt, first = rollout.prompt, rollout.turns[0]
        if prompt.id not in firsts or firsts[prompt.id][0] != first:
            if np.array_equal(first.token_ids, chat.render_prompt(prompt).token_ids):
                filled = chat.render_prompt(fill_prompt(prompt, template, key))
                firsts[prompt.id] = first, replace(first, token_ids=filled.token_ids, images=filled.images)
            else:
                firsts[prompt.id] = first, fill_first_turn(chat, rollout, template, key)
        _, first = firsts[prompt.id]
        local.append(replace(rollout, turns=(first, *rollout.turns[1:]), routing=None, sparse_indices=None))
    result = rollouts.replace_local(local)
    longest, limit = int(result.length.max()), flow.data.max_positions
    if longest > limit:
        raise ConfigError(
            f"{key} makes a conversation of {longest} tokens, beyond the model's {limit} positions; shorten it, or "
            "lower rollout.max_context"
        )
    return result
