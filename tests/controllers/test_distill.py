"""Distillation as written in `controllers/distill.py`, with tables of logits as policy and teacher."""

from __future__ import annotations

import io
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import PIL.Image
import pytest
import tiny_models
import torch
from thread_ranks import as_ranks

from megarl.chat_format.chat_template import ChatTemplate
from megarl.config import Config, ConfigError, from_dict
from megarl.controllers.controller import load_requirements, make_controller
from megarl.controllers.cross_tokenizer import align_answer, align_rollouts
from megarl.controllers.distill import fill_prompt, replace_prompts
from megarl.data.images import ImageFormat, ImageProcessor
from megarl.types import LOCAL, Comm, Image, ModelOutput, Prompt, Rollout, Rollouts, TrainBatch, Turn, as_token_ids
from megarl.workers.futures import Future

sys.path.insert(0, str(Path(__file__).parent))

from test_learning import ACTIONS, TableFlow  # noqa: E402

pytestmark = pytest.mark.alone

TEACHER = torch.tensor([[0.0, 2.0, 0.0, 1.0, -1.0, 0.0], [1.0, 0.0, 0.0, 0.0, 2.0, -2.0]])


class TeacherFlow(TableFlow):
    """A flow with a teacher, which is a constant table."""

    def __init__(self, config: Config, comm: Comm = LOCAL, world: int = 1) -> None:
        super().__init__(config, comm, world)
        self.teacher = SimpleNamespace(forward=self.teacher_forward)

    def teacher_forward(self, batch: TrainBatch) -> Future[ModelOutput]:
        position = (batch.positions - 1).clamp(0, 1)
        logprobs = TEACHER.log_softmax(-1)[position, batch.tokens.long().clamp(max=ACTIONS - 1)]
        return Future.completed(ModelOutput(logprobs=logprobs))

    def reverse_kl(self) -> float:
        """Return the exact KL(policy || teacher) in nats per token."""
        policy = self.policy.table.detach().log_softmax(-1)
        return float((policy.exp() * (policy - TEACHER.log_softmax(-1))).sum(-1).mean())


def config_of(options: dict[str, Any] | None = None, samples: int = 8, **sections: Any) -> Config:
    tree = {"algorithm": "distill", "options": options or {}, "rollout": {"samples_per_prompt": samples}}
    return from_dict({**tree, "run": {"num_update": 2, "ppo_epochs": 2}, **sections})


def run_steps(config: Config, steps: int, comm: Comm = LOCAL, world: int = 1) -> tuple[Any, list[dict[str, float]]]:
    flow: Any = TeacherFlow(config, comm, world)
    controller = make_controller(config)
    prompts = [Prompt(id=str(i), messages=()) for i in range(5)]
    metrics = [controller.step(flow, prompts).metrics for _ in range(steps)]
    restored = make_controller(config)
    restored.load_state_dict(controller.state_dict())
    assert restored.state_dict() == controller.state_dict() and restored.state_dict()["steps"] == steps
    return flow, metrics


@pytest.mark.parametrize("correction", ["none", "tis"])
def test_policy_converges_to_the_teacher(correction: str) -> None:
    flow, metrics = run_steps(config_of({}, 16, correction={"kind": correction}), 60)
    assert "score" not in flow.calls and flow.calls[:3] == ["generate", "sleep", "update_weights"]
    first = TeacherFlow(flow.config).reverse_kl()
    assert metrics[0]["distill/reverse_kl"] == pytest.approx(first, abs=0.25) and first > 0.3
    assert flow.reverse_kl() < 0.03
    assert abs(sum(step["distill/reverse_kl"] for step in metrics[-10:])) / 10 < 0.1


def test_expected_gradient_is_that_of_the_reverse_kl() -> None:
    """The expectation sums over all tokens, with the controller's advantages."""
    logits = torch.tensor([0.3, -0.7, 1.1], dtype=torch.float64, requires_grad=True)
    teacher = torch.tensor([0.0, 0.5, -1.0], dtype=torch.float64).log_softmax(-1)
    policy = logits.log_softmax(-1)
    advantages = teacher - policy.detach()
    ratio = torch.exp(policy - policy.detach())
    (actual,) = torch.autograd.grad(-(policy.detach().exp() * ratio * advantages).sum(), logits, retain_graph=True)
    (expected,) = torch.autograd.grad((policy.exp() * (policy - teacher)).sum(), logits)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def first_batch(options: dict[str, Any]) -> tuple[Any, TrainBatch]:
    config = config_of(options)
    flow: Any = TeacherFlow(config)
    result = make_controller(config).step(flow, [Prompt("p", ()), Prompt("q", ())])
    assert result.batch is not None and result.batch.advantages is not None
    assert not result.batch.advantages[~result.batch.loss_mask].any()
    return flow, result.batch


def test_advantages_by_hand() -> None:
    """The initial policy is uniform, with log-prob -log 6."""
    uniform_logprob = -torch.tensor(6.0).log()
    unclipped, clipped, with_reward = (
        first_batch(options) for options in ({}, {"advantage_clip": 0.5}, {"advantage_clip": 0.5, "reward_coef": 2.0})
    )
    for flow, batch in (unclipped, clipped, with_reward):
        teacher_advantages = (flow.teacher_forward(batch).wait().logprobs - uniform_logprob)[batch.loss_mask]
        if flow is not unclipped[0]:
            teacher_advantages = teacher_advantages.clamp(-0.5, 0.5)
        group_advantages = batch.advantages[batch.loss_mask] - teacher_advantages
        if flow is not with_reward[0]:
            assert float(group_advantages.abs().max()) < 1e-6 and "score" not in flow.calls
    reward, group = with_reward[1].sequence_reward.double(), with_reward[1].group
    expected = torch.zeros_like(reward)
    for number in (0, 1):
        local = reward[group == number]
        expected[group == number] = 2.0 * (local - local.mean()) / (local.std() + 1e-6)
    flow, batch = first_batch({"center_advantages": True})
    teacher_advantages = (flow.teacher_forward(batch).wait().logprobs - uniform_logprob)[batch.loss_mask]
    torch.testing.assert_close(
        batch.advantages[batch.loss_mask], teacher_advantages - teacher_advantages.mean(), rtol=0, atol=1e-6
    )
    per_sequence = group_advantages.reshape(-1, 2)
    torch.testing.assert_close(per_sequence, expected.float()[:, None].expand(-1, 2), rtol=1e-4, atol=1e-5)
    assert "score" in with_reward[0].calls and float(per_sequence.abs().max()) > 1


@pytest.mark.parametrize("options", [{}, {"reward_coef": 1.0, "advantage_clip": 1.0, "center_advantages": True}])
def test_step_does_not_depend_on_world_size(options: dict[str, Any]) -> None:
    config = config_of(options)

    def train(comm: Comm, world: int) -> list[Any]:
        flow, metrics = run_steps(config, 3, comm, world)
        return [*metrics, flow.policy.table.detach()]

    single_rank = train(LOCAL, 1)
    for world in (2, 3):
        first, *other_ranks = as_ranks(world, lambda comm, world=world: train(comm, world))
        for actual in other_ranks:
            torch.testing.assert_close(actual, first, rtol=0, atol=0)
        torch.testing.assert_close(first, single_rank, rtol=1e-5, atol=1e-6)


class NineChat:
    """Renders messages of n letters as n times the token 9."""

    def render_prompt(self, prompt: Prompt) -> Prompt:
        return replace(prompt, token_ids=as_token_ids([9] * len(prompt.messages[-1]["content"])))

    def decode(self, ids: Any) -> str:
        return "q" * len(ids)


class PromptedFlow(TableFlow):
    """A flow whose teachers' log-probs are minus the token's id, minus 10 for each token of the prompt, times a factor.
    The chat encodes a message of n letters as n tokens."""

    def __init__(self, config: Config, comm: Comm = LOCAL, world: int = 1) -> None:
        super().__init__(config, comm, world)
        self.batches: dict[str, TrainBatch] = {}
        self.math, self.code = (self.make_teacher(name, factor) for name, factor in (("math", 1.0), ("code", 3.0)))
        self.reference = self.make_teacher("reference", 1.0)
        self.data = SimpleNamespace(chat=NineChat(), max_positions=40)

    def make_teacher(self, name: str, factor: float) -> Any:
        def forward(batch: TrainBatch) -> Future[ModelOutput]:
            self.batches[name] = batch
            lengths = batch.cu_seqlens.diff()
            prompts = torch.repeat_interleave(lengths - 2, lengths)  # each answer has two tokens
            return Future.completed(ModelOutput(logprobs=-factor * (batch.tokens + 10.0 * prompts)))

        return SimpleNamespace(forward=forward)


def user_prompts(*texts: str, **fields: Any) -> list[Prompt]:
    """Return prompts of one message each; the data source is "math" or "code" in turn."""
    sources = ("math", "code")
    return [
        Prompt(str(i), ({"role": "user", "content": text},), data_source=sources[i % 2], **fields)
        for i, text in enumerate(texts)
    ]


def run_prompted(teachers: dict[str, Any], prompts: list[Prompt], comm: Comm = LOCAL, world: int = 1) -> Any:
    flow: Any = PromptedFlow(config_of({"teachers": teachers}), comm, world)
    result = make_controller(flow.config).step(flow, prompts)
    assert result.batch is not None and result.batch.ref_logprobs is not None
    return flow, result.batch


@pytest.mark.parametrize("world", [1, 2])
def test_self_distillation_reads_the_same_tokens_after_another_prompt(world: int) -> None:
    """The teacher's prompt has 1 + 2 + 1 + 4 letters in place of 1; the answers and their order stay."""
    teachers = {"reference": {"prompt": "{prompt}: {ground_truth}{hint}"}}
    prompts = user_prompts("q", "q", "q", ground_truth=7, extra={"hint": "hint"})

    def run(comm: Comm) -> tuple[torch.Tensor, ...]:
        flow, batch = run_prompted(teachers, prompts, comm, world)
        read, mask = flow.batches["reference"], batch.loss_mask
        assert read.lengths.tolist() == [10] * 24 and batch.lengths.tolist() == [3] * 24
        assert torch.equal(read.tokens[read.loss_mask], batch.tokens[mask])
        torch.testing.assert_close(batch.ref_logprobs[mask], -(batch.tokens[mask] + 80.0))
        return batch.ref_logprobs, batch.advantages

    for ref_logprobs, advantages in as_ranks(world, run):
        assert ref_logprobs.shape == advantages.shape


def test_several_teachers_by_source_and_weight() -> None:
    """Without sources both teach all: the mean of 1 and 3 with weights 3 and 1 is 1.5."""
    prompts = user_prompts("q", "q", "q")
    _, batch = run_prompted({"math": {"weight": 3}, "code": {}}, prompts)
    mask, base = batch.loss_mask, -(batch.tokens + 10.0)
    torch.testing.assert_close(batch.ref_logprobs[mask], 1.5 * base[mask])
    flow, batch = run_prompted({"math": {"sources": ["math"]}, "code": {"sources": ["code"], "weight": 9}}, prompts)
    factor = torch.where(batch.group[batch.sequence_ids] == 1, 3.0, 1.0)  # the second prompt is of code
    torch.testing.assert_close(batch.ref_logprobs[mask], (factor * -(batch.tokens + 10.0))[mask])
    assert flow.batches["math"].num_sequences == 16 and flow.batches["code"].num_sequences == 8
    with pytest.raises(ConfigError, match="no teacher has the data source 'code' among its sources"):
        run_prompted({"math": {"sources": ["math"]}}, prompts)


def test_teachers_are_roles() -> None:
    teachers = {"math": {}, "reference": {"weight": 0.1}, "actor": {"prompt": "{prompt} {hint}"}}
    requirements = load_requirements(config_of({"teachers": teachers}))
    assert requirements.roles == ("rollout", "actor", "math", "reference")
    assert requirements.workers == {"math": "megarl.workers.actor:TeacherWorker"}


def test_a_teachers_prompt_must_fit_the_data() -> None:
    teachers = {"reference": {"prompt": "{prompt} {solution}"}}
    with pytest.raises(
        ConfigError, match=r"teachers.reference.prompt: prompt 0 has no column 'solution'; it has prompt"
    ):
        run_prompted(teachers, user_prompts("q"))
    long = user_prompts("q", extra={"solution": "x" * 40})
    with pytest.raises(ConfigError, match="a conversation of 44 tokens, beyond the model's 40 positions"):
        run_prompted(teachers, long)
    with pytest.raises(ConfigError, match="prompt 0 does not begin with its row's"):  # the engine's has one token
        run_prompted({"reference": {"prompt": "{prompt}"}}, user_prompts("two"))
    (picture,) = user_prompts("<image>", images=(Image(b"png"),))
    with pytest.raises(ConfigError, match=r"prompt 0 has images, .* let the template have \{prompt\} once"):
        fill_prompt(picture, "{prompt}{prompt}", "key")
    assert fill_prompt(picture, "{prompt}?", "key").images == picture.images
    with pytest.raises(ConfigError, match="prompt 0 has no user message to replace"):
        run_prompted({"reference": {"prompt": "{prompt}"}}, [Prompt("0", ({"role": "system", "content": "q"},))])


def test_a_teachers_prompt_replaces_the_last_message_that_an_environment_wrote() -> None:
    """All other tokens of the conversation stay, also those that are not what the template would write today. The
    message's text occurs before it, and the next message's in the first turn."""
    chat, user = ChatTemplate(tiny_models.tokenizer()), "<|im_start|>user\n"
    system, asked = "<|im_start|>system\nIs 2+2? it<|im_end|>\n", "<|im_end|>\n<|im_start|>assistant\n"
    start = [*chat.encode(system), *chat.encode(f"{user}2+")[:-1], *chat.encode("+"), *chat.encode(f"2?{asked}")]
    assert chat.decode(start) == f"{system}{user}2+2?{asked}"
    row = Prompt("p", ({"role": "user", "content": "task 7"},), ground_truth=4, extra={"hint": "even"})
    messages = tuple(
        {"role": role, "content": content}
        for role, content in (("system", "Is 2+2? it"), ("user", "2+2?"), ("assistant", "5"), ("user", "a"))
    )
    answer = Turn(chat.encode("5<|im_end|>"), [0.0] * len(chat.encode("5<|im_end|>")), True)
    rollout = Rollout(row, (Turn(start), answer, Turn(chat.encode("a"))), messages=messages)
    flow: Any = SimpleNamespace(data=SimpleNamespace(chat=chat, max_positions=1000))
    taught = replace_prompts(flow, Rollouts.gather([rollout]), "{prompt} It is {ground_truth}, {hint}.", "key").local[0]
    assert chat.decode(taught.turns[0].token_ids) == f"{system}{user}2+2? It is 4, even.{asked}"
    assert taught.turns[1:] == rollout.turns[1:]
    kept = len(chat.encode(system + user))
    assert taught.turns[0].token_ids[:kept].tolist() == start[:kept]
    assert taught.turns[0].token_ids[-5:].tolist() == start[-5:]


def test_a_teachers_prompt_keeps_images_of_a_turn_that_an_environment_wrote() -> None:
    """The environment puts a message that the template drops, and a system message, before the row's own."""
    file = io.BytesIO()
    PIL.Image.new("RGB", (16, 8)).save(file, "PNG")
    tokenizer, names = tiny_models.tokenizer(), ["<|vision_start|>", "<|image_pad|>", "<|vision_end|>"]
    tokenizer.add_special_tokens({"additional_special_tokens": names})
    size = {"patch_size": 4, "merge_size": 2, "size": {"shortest_edge": 64, "longest_edge": 4096}}
    pad = tokenizer.convert_tokens_to_ids("<|image_pad|>")
    chat = ChatTemplate(tokenizer, images=ImageFormat(*names, pad, ImageProcessor("", size, 2)))
    row = Prompt("p", ({"role": "user", "content": "<image>2+2?"},), ground_truth=4, images=(Image(file.getvalue()),))
    system = {"role": "system", "content": "Look!"}
    first = chat.render_prompt(replace(row, messages=(system, *row.messages)))
    messages = (system, {"role": "assistant", "content": "x" * 200}, *row.messages)
    rollout = Rollout(row, (Turn(first.token_ids, images=first.images),), messages=messages)
    flow: Any = SimpleNamespace(data=SimpleNamespace(chat=chat, max_positions=1000))
    taught = replace_prompts(flow, Rollouts.gather([rollout]), "It is {ground_truth}. {prompt}", "key").local[0]
    expected = chat.render_prompt(replace(row, messages=(system, {"role": "user", "content": "It is 4. <image>2+2?"})))
    assert chat.decode(taught.turns[0].token_ids) == chat.decode(expected.token_ids)
    assert taught.turns[0].images == expected.images and expected.images[0].start > first.images[0].start


class LetterChat:
    """A tokenizer of pieces of `size` letters, whose ids are their code points in base 1000; 999 ends a turn."""

    def __init__(self, size: int) -> None:
        self.size, self.end_of_turn, self.end_token_ids = size, 999, frozenset({999})
        self.pieces: dict[int, str] = {}

    def encode(self, text: str) -> list[int]:
        parts = [text[i : i + self.size] for i in range(0, len(text), self.size)]
        ids = [sum(ord(letter) * 1000**k for k, letter in enumerate(part)) for part in parts]
        self.pieces |= dict(zip(ids, parts, strict=True))
        return ids

    def encode_prompt(self, prompt: Prompt) -> list[int]:
        return self.encode(prompt.messages[-1]["content"])

    def render_prompt(self, prompt: Prompt) -> Prompt:
        return replace(prompt, token_ids=as_token_ids(self.encode_prompt(prompt)))

    def decode(self, ids: Any) -> str:
        return "".join(self.pieces[int(i)] for i in ids)


def test_a_teacher_with_another_tokenizer_scores_spans_of_text() -> None:
    """The policy has two letters in a token, the teacher three: `abcdefgh` has the spans abcdef and gh."""
    chat, teacher = LetterChat(2), LetterChat(3)
    prompt = Prompt("p", ({"role": "user", "content": "q"},))
    answer = [*chat.encode("abcdefgh"), 999]
    turns = (Turn(chat.encode_prompt(prompt)), Turn(answer, [0.0] * 5, True))
    cut = (Turn(chat.encode_prompt(prompt)), Turn(answer[:1], [0.0], True))
    rollouts = Rollouts.gather([Rollout(prompt, turns), Rollout(prompt, cut, "length")])
    alignment = align_rollouts(rollouts, chat, teacher, lambda prompt: prompt)  # type: ignore[arg-type]
    taught = [rollout.turns[1].token_ids.tolist() for rollout in alignment.rollouts.local]
    assert taught == [[*teacher.encode("abcdefgh"), 999], teacher.encode("ab")]
    # Tokens q ab cd ef gh end, q ab; the heads of the spans are ab, gh, the end, and ab.
    assert alignment.heads.tolist() == [-1, 1, 1, 1, 4, 5, -1, 7]
    assert alignment.targets.tolist() == [1, 1, 4, 5, 7]  # of abc def gh end, ab
    logprobs = alignment.gather_targets(torch.tensor([-1.0, -2.0, -4.0, -8.0, -16.0]))
    assert logprobs.tolist() == [0, -3, 0, 0, -4, -8, 0, -16]
    policy = torch.tensor([9.0, -0.5, -0.5, -1.0, -1.0, -2.0, 9.0, -3.0])
    assert alignment.sum_spans(logprobs - policy).tolist() == [0, -1, -1, -1, -3, -6, 0, -13]


def test_an_equal_tokenizer_gives_the_advantages_of_tokens() -> None:
    chat = LetterChat(2)
    prompt = Prompt("p", ({"role": "user", "content": "q"},))
    rollouts = Rollouts.gather([Rollout(prompt, (Turn(chat.encode("q")), Turn(chat.encode("abcd"), [0.0, 0.0], True)))])
    alignment = align_rollouts(rollouts, chat, chat, lambda prompt: prompt)  # type: ignore[arg-type]
    values = torch.tensor([5.0, 1.0, 2.0])
    assert alignment.sum_spans(values).tolist() == [0, 1, 2]
    assert alignment.gather_targets(values[1:]).tolist() == [0, 1, 2]


def test_text_that_a_teacher_cannot_spell_has_no_spans() -> None:
    chat, teacher = LetterChat(1), LetterChat(1)
    teacher.decode = lambda ids: LetterChat.decode(teacher, ids).lower()  # type: ignore[method-assign]
    ids, own, taught = align_answer([*chat.encode("aB"), 999], chat, teacher)  # type: ignore[arg-type]
    assert own == [-1, -1, 0] and taught == [-1, -1, 0] and ids[-1] == 999


def test_requirements() -> None:
    default = load_requirements(config_of())
    assert default.roles == ("rollout", "actor", "teacher") and default.is_off_policy and not default.is_group_relative
    with_reward = load_requirements(config_of({"reward_coef": 0.5}))
    assert with_reward.roles == ("rollout", "actor", "teacher", "reward") and with_reward.is_group_relative
    evaluated = load_requirements(config_of(reward={"functions": ["a:b"]}))  # evaluations need it
    assert evaluated.roles[-1] == "reward" and not evaluated.is_group_relative
    assert make_controller(config_of()).load_eval_items(None) == ()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"kl": {"apply_to": "loss"}}, "kl.apply_to=loss with algorithm=distill: .* set it to none"),
        ({"options": {"reward_coef": -1}}, "options.reward_coef"),
        ({"options": {"advantage_clip": 0}}, "options.advantage_clip"),
        ({"options": {"weight": 1}}, "unknown key options.weight"),
        ({"options": {"teachers": {}}}, "options.teachers is empty"),
        ({"options": {"teachers": {"actor": {}}}}, "options.teachers.actor without a prompt: .* every advantage is 0"),
        ({"options": {"teachers": {"reference": {}}}}, "options.teachers.reference without a prompt"),
        ({"options": {"teachers": {"critic": {}}}}, "options.teachers.critic: a teacher is reference, actor, or"),
        ({"options": {"teachers": {"a": {"tokenizer": "teacher"}, "b": {}}}}, "it must be the only teacher"),
        ({"options": {"teachers": {"a": {"tokenizer": "own"}}}}, "a.tokenizer=own: this value is now called teacher"),
        ({"options": {"teachers": {"a": {"tokenizer": "teacher"}}}}, "text of one answer: set rollout.max_turns=1"),
        ({"options": {"teachers": {"a": {"weight": 0}}}}, "options.teachers.a.weight"),
        ({"options": {"teachers": {"a": {"prompt": "{"}}}}, "options.teachers.a.prompt is not a format string"),
        ({"options": {"teachers": {"a": {"prompt": "{x.y}"}}}}, "{x.y} is not the name of a column"),
    ],
)
def test_invalid_options_raise(sections: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_requirements(config_of(**sections))
