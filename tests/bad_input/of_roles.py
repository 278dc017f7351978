"""Invalid role settings, reward models and teachers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from case import Case
from safetensors.torch import load_file, save_file


def reward(name: str, settings: str, *expected: str, overrides: tuple[str, ...] = ()) -> Case:
    return Case(f"reward: {name}", expected, (f"roles={{reward: {settings}}}", *overrides))


def write_judge(folder: Path) -> None:
    """Write a folder with a classifier config, and the policy's weights and tokenizer."""
    file = folder / "model/config.json"
    judge_folder = folder / "judge"
    judge_folder.mkdir()
    for path in file.parent.iterdir():
        (judge_folder / path.name).write_bytes(path.read_bytes())
    values = {**json.loads(file.read_text()), "architectures": ["Qwen3MoeForSequenceClassification"]}
    (judge_folder / "config.json").write_text(json.dumps(values))


def swapped_tokens(folder: Path) -> None:
    """Copy the policy to `teacher/` with the ids of two tokens swapped."""
    teacher = folder / "teacher"
    teacher.mkdir()
    for path in (folder / "model").iterdir():
        (teacher / path.name).write_bytes(path.read_bytes())
    tokenizer = json.loads((teacher / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    first_token, second_token = sorted(vocab, key=vocab.__getitem__)[:2]
    vocab[first_token], vocab[second_token] = vocab[second_token], vocab[first_token]
    (teacher / "tokenizer.json").write_text(json.dumps(tokenizer))


def smaller_vocab(folder: Path) -> None:
    swapped_tokens(folder)
    file, weights = folder / "teacher/config.json", folder / "teacher/model.safetensors"
    file.write_text(json.dumps({**json.loads(file.read_text()), "vocab_size": 512}))
    tensors = load_file(weights)
    tensors |= {name: tensors[name][:512].clone() for name in ("model.embed_tokens.weight", "lm_head.weight")}
    save_file(tensors, weights, metadata={"format": "pt"})


def teacher_case(
    name: str, *expected: str, overrides: tuple[str, ...] = (), prepare: Callable[[Path], None] | None = None
) -> Case:
    overrides = ("algorithm=distill", *(overrides or ("roles={teacher: {model: FOLDER/teacher}}",)))
    return Case(f"teacher: {name}", expected, overrides, prepare or (lambda folder: None))


def judge_case(name: str, settings: str, expected: str, reward: str = "{backend: judge}") -> Case:
    return Case(f"judge: {name}", (expected,), (f"roles={{reward: {reward}, judge: {settings}}}",))


def policy_case(name: str, roles: str, expected: str, *overrides: str) -> Case:
    algorithm = "algorithm=megarl.controllers.policies:PPOAndReMaxController"
    return Case(f"second policy: {name}", (expected,), (algorithm, f"roles={{{roles}}}", *overrides))


MODEL = ("reward.model=FOLDER/model",)
CASES = [
    reward("an unknown backend", "{backend: grpc}", "roles.reward.backend=grpc", "megatron, transformers, pool, http"),
    reward("a service without an address", "{backend: http}", "roles.reward.options.url is not set"),
    reward("a service with an invalid URL", "{backend: http, options: {url: judge}}", "'judge' is not a URL"),
    reward("a misspelt option", "{backend: http, options: {urls: x}}", "did you mean roles.reward.options.url"),
    reward(
        "options of a backend without options", "{options: {url: x}}", "roles.reward.options.url", "takes no options"
    ),
    reward("two backends", "{backend: [http, judge]}", "name one of http and judge"),
    reward("a pool and a model", "{backend: pool}", "has no model", overrides=MODEL),
    reward(
        "a service with a password",
        "{backend: http, options: {url: 'http://a:b@c'}}",
        "use roles.reward.options.auth_env",
    ),
    reward(
        "a service at a private address",
        "{backend: http, options: {url: 'http://10.0.0.1'}}",
        "set roles.reward.options.private",
    ),
    reward(
        "a judge without a model name",
        "{backend: judge, options: {url: 'http://a'}}",
        "roles.reward.options.model is not set",
    ),
    reward(
        "a judge with a policy as reward model",
        "{backend: judge, options: {url: 'http://a', model: m}}",
        "has no score.weight: it is not a reward model",
        overrides=MODEL,
    ),
    reward(
        "a judge prompt without the answer",
        "{backend: judge, options: {url: 'http://a', model: m, prompt: 'grade'}}",
        "has no {answer}",
    ),
    judge_case(
        "no model", "{backend: sglang}", "roles.judge.model is not set; it must name the HF folder of the judge"
    ),
    judge_case("a missing folder", "{backend: sglang, model: FOLDER/judge}", "FOLDER/judge: no such folder"),
    judge_case(
        "a key that does not apply",
        "{backend: sglang, model: FOLDER/model, rollout: {temperature: 0.5}}",
        "roles.judge.rollout.temperature does not apply to the judge; its keys are tp, ep, sglang,",
    ),
    judge_case(
        "a misspelt engine setting",
        "{backend: sglang, model: FOLDER/model, rollout: {max_contxt: 5}}",
        "did you mean roles.judge.rollout.max_context?",
    ),
    judge_case(
        "an engine larger than its ranks",
        "{backend: sglang, model: FOLDER/model, rollout: {tp: 3, max_context: 64}}",
        "the engines of the judge: roles.judge.rollout.tp=3 does not divide",
    ),
    judge_case(
        "longer conversations than the model allows",
        "{backend: sglang, model: FOLDER/model, rollout: {max_context: 1000000}}",
        "roles.judge.rollout.max_context=1000000 is beyond the model's",
    ),
    judge_case(
        "a URL beside its engines",
        "{backend: sglang, model: FOLDER/model}",
        "roles.judge has engines for a judge, but there is none without a url",
        reward="{backend: judge, options: {url: 'http://a', model: m}}",
    ),
    judge_case(
        "engines that nobody asks",
        "{backend: sglang, model: FOLDER/model}",
        "set roles.reward.backend to judge",
        reward="{}",
    ),
    policy_case("a missing folder", "actor_b: {model: FOLDER/b}", "roles.actor_b.model=FOLDER/b: no such folder"),
    policy_case(
        "an unknown role", "actor_c: {}", "roles.actor_c: megarl.controllers.policies:PPOAndReMaxController has"
    ),
    policy_case(
        "engines that do not fit", "rollout_b: {rollout: {tp: 3}}", "roles.rollout_b.rollout.tp=3 does not divide"
    ),
    policy_case("a layout that does not fit", "actor_b: {parallel: {pp: 7}}", "is not a multiple of tp x pp = 1 x 7"),
    policy_case("a model of its engines", "rollout_b: {model: FOLDER/model}", "set roles.actor_b.model"),
    policy_case(
        "a replay of its own", "rollout_b: {rollout: {replay: FOLDER/run}}", "all policies replay the same run"
    ),
    policy_case(
        "a replay without its rollouts", "", "FOLDER/run/policies/b: no such run folder", "rollout.replay=FOLDER/run"
    ),
    policy_case(
        "a KV cache that cannot stay",
        "rollout_b: {rollout: {asynchronous: true, on_weight_sync: in_place}}",
        "roles.rollout_b.rollout.on_weight_sync=in_place with engines on the ranks of the",
    ),
    reward("a classifier without a model", "{backend: transformers}", "needs reward.model"),
    reward("a policy as a classifier", "{backend: transformers}", "is not a sequence classifier", overrides=MODEL),
    reward("options as a list", "{options: [1]}", "roles.reward.options must be a mapping"),
    Case(
        "reward: a classifier with two labels",
        ("has 2 labels", "LABEL_0, LABEL_1"),
        ("roles={reward: {backend: transformers}}", "reward.model=FOLDER/judge"),
        write_judge,
    ),
    teacher_case("no teacher model", "roles.teacher.model is not set", overrides=("kl.apply_to=none",)),
    teacher_case("a missing teacher folder", "roles.teacher.model=FOLDER/teacher: no such folder"),
    teacher_case(
        "another tokenizer", "has another tokenizer than model.path", "the teacher reads", prepare=swapped_tokens
    ),
    teacher_case(
        "a smaller vocabulary",
        "has a vocabulary of 512",
        "must have its tokenizer and vocabulary",
        prepare=smaller_vocab,
    ),
    teacher_case(
        "with a reference", "kl.apply_to=loss with algorithm=distill", "none", overrides=("kl.apply_to=loss",)
    ),
    teacher_case("an advantage clip of 0", "options.advantage_clip", overrides=("options={advantage_clip: 0}",)),
    Case("a worker that does not exist", ("no_such_lab",), ("roles={reward: {worker: 'no_such_lab:Judge'}}",)),
    Case("an unknown role", ("roles.jugde", "has no such role"), ("roles={jugde: {}}",)),
    Case("roles as a list", ("roles must be a mapping",), ("roles=[1]",)),
]
