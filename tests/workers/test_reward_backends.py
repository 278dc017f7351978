"""Transformers classifiers, reward services and teachers on separate ranks, compared with transformers."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import WordLevel

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "rewards"))
from reward_server import RewardServer, chat_completion, count_words

WORDS = ("[unk]", "[pad]", "<end>", "one", "two", "three", "four", "five", "user", "assistant", "six")
TEMPLATE = "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} <end> {% endfor %}"
OTHER_TEMPLATE = "{% for m in messages %}{{ m['content'] }} <end> {% endfor %}"
STRICT_TEMPLATE = "{{ raise_exception('no system prompts') }}"
RESPONSES = (
    "one",
    "two three",
    "four five six one two",
    "three",
    "six six six",
    "one two three four five six one",
    "two",
)
PLACEMENT = {"placement": {"actor": 0, "rollout": "all"}}
WITH_REWARD_RANKS = {"placement": {"actor": 0, "rollout": "all", "reward": "1-2"}}


def tokenizer(words: tuple[str, ...] = WORDS, template: str | None = TEMPLATE) -> Any:
    from transformers import PreTrainedTokenizerFast

    raw = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="[unk]"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast_tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw, unk_token="[unk]", pad_token="[pad]", eos_token="<end>"
    )
    fast_tokenizer.chat_template = template
    return fast_tokenizer


def save(folder: Path, model: Any, words: Any) -> Any:
    """Save a model with deterministic random weights."""
    generator = torch.Generator().manual_seed(len(folder.name))
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.copy_(0.3 * torch.randn(tensor.shape, generator=generator))
    model.float().eval().save_pretrained(folder)
    words.save_pretrained(folder)
    return model


def llama(words: int = 16, **changes: Any) -> Any:
    from transformers import LlamaConfig

    sizes = dict(hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4)
    sizes |= dict(num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=False)
    return LlamaConfig(vocab_size=words, **{**sizes, **changes})


def bert(**changes: Any) -> Any:
    from transformers import BertConfig

    sizes = dict(hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, pad_token_id=1)
    return BertConfig(vocab_size=16, **sizes, **changes)


@pytest.fixture(scope="module")
def server() -> Iterator[RewardServer]:
    """A service, and a judge that counts words."""

    def reply(body: dict[str, Any]) -> Any:
        if "messages" in body:
            return chat_completion(f"Score: {len(body['messages'][0]['content'].split())}")
        return [count_words(conversation) for conversation in body["conversations"]]

    with RewardServer(reply=reply) as judging:
        yield judging


@pytest.fixture(scope="module")
def results(
    run_ranks: Callable[..., list[dict[str, Any]]], tmp_path_factory: pytest.TempPathFactory, server: RewardServer
) -> dict[str, Any]:
    """Return each rank's results, the models and the conversations."""
    from transformers import AutoModelForSequenceClassification as Classifier
    from transformers import LlamaForCausalLM

    folder = tmp_path_factory.mktemp("judges")
    saved_tokenizer = tokenizer()
    conversations = []
    for number, answer in enumerate(RESPONSES):
        messages = [{"role": "user", "content": "two"}, {"role": "assistant", "content": answer}]
        ids = saved_tokenizer.encode(
            saved_tokenizer.apply_chat_template(messages, tokenize=False), add_special_tokens=False
        )
        status = "aborted" if number == 4 else "stop"
        conversations.append({"ids": ids, "messages": messages, "status": status})
    policy = llama()
    save(folder / "policy", LlamaForCausalLM(policy), saved_tokenizer)
    other_tokenizer = tokenizer(tuple(reversed(WORDS)), OTHER_TEMPLATE)
    classifier = dict(num_labels=1, pad_token_id=1)
    models = {
        "own": save(folder / "own", Classifier.from_config(llama(**classifier)), saved_tokenizer),
        "bare": save(folder / "bare", Classifier.from_config(llama(num_labels=1)), tokenizer(template=None)),
        "bert": save(
            folder / "bert", Classifier.from_config(bert(id2label={0: "bad", 1: "good", 2: "so"})), other_tokenizer
        ),
        "short": save(
            folder / "short", Classifier.from_config(llama(max_position_embeddings=9, **classifier)), saved_tokenizer
        ),
        "strict": save(
            folder / "strict", Classifier.from_config(llama(**classifier)), tokenizer(template=STRICT_TEMPLATE)
        ),
        "other_tokenizer": save(
            folder / "other_tokenizer",
            Classifier.from_config(llama(**classifier)),
            tokenizer(tuple(reversed(WORDS)), None),
        ),
        "teacher": save(
            folder / "teacher", LlamaForCausalLM(llama(24, hidden_size=32, num_hidden_layers=4)), saved_tokenizer
        ),
    }
    models["small"] = save(folder / "small", LlamaForCausalLM(llama(WORDS.index("six"))), saved_tokenizer)
    save(folder / "headless", LlamaForCausalLM(policy), saved_tokenizer)
    named = json.loads((folder / "headless" / "config.json").read_text())
    named |= {"architectures": ["LlamaForSequenceClassification"], "num_labels": 1}
    (folder / "headless" / "config.json").write_text(json.dumps(named))
    broken = Classifier.from_config(llama(**classifier))
    save(folder / "nan", broken, saved_tokenizer)
    broken.score.weight.data.fill_(math.nan)
    broken.save_pretrained(folder / "nan")

    def judge(name: str, functions: bool = False, **options: Any) -> dict[str, Any]:
        chosen = {"reward": {"backend": "transformers", "options": options}}
        functions_of = ["toy_rewards:length"] if functions else []
        reward = {"model": str(folder / name), "functions": functions_of}
        return {"what": "score", "config": {**WITH_REWARD_RANKS, "roles": chosen, "reward": reward}}

    def teacher(role: str, **parallel: int) -> dict[str, Any]:
        worker = {"worker": "megarl.workers.actor:TeacherWorker"} if role != "teacher" else {}
        chosen = {role: {"model": str(folder / "teacher"), "parallel": parallel, **worker}}
        return {"what": "teach", "config": {"placement": {**PLACEMENT["placement"], role: "1-2"}, "roles": chosen}}

    small = teacher("teacher")
    small["config"]["roles"]["teacher"]["model"] = str(folder / "small")
    service = {"reward": {"backend": "http", "options": {"url": server.url, "batch": 2, "private": True}}}
    unreachable = {
        "reward": {
            "backend": "http",
            "options": {"url": server.unreachable_url, "tries": 2, "pause": 0, "private": True},
        }
    }
    functions_of_role = {"functions": ["toy_rewards:length"]}
    judge_options = {"url": server.address, "model": "m", "prompt": "{answer}", "private": True}
    judging = {"reward": {"backend": "judge", "options": judge_options}}
    narrow = {"reward": {"backend": "judge", "options": {**judge_options, "max_score": 5}}}
    named = {
        "words": {"backend": "http", **service["reward"]["options"]},
        "fenced": {"backend": "judge", **judge_options, "prompt": "{answer} {fence}"},
    }
    several = {"reward": {**judging["reward"], "options": {**judge_options, "services": named}}}
    several_weights = {**functions_of_role, "weights": {"judge": 0.5, "words": 0.25, "fenced": 0.0}}
    down = {"worse": {"backend": "http", **unreachable["reward"]["options"]}}
    local = judge("own", functions=True, **service["reward"]["options"])
    local["config"]["roles"]["reward"]["backend"] = ["transformers", "http"]
    local["config"]["reward"]["weights"] = {"length": 0.4, "model": 0.5, "service": 0.1}
    jobs = {
        "all": local,
        "own": judge("own", functions=True),
        "bare": judge("bare"),
        "bert": judge("bert", label="good"),
        "short": judge("short"),
        "cut": judge("short", on_overlong="truncate"),
        "strict": judge("strict"),
        "other_tokenizer": judge("other_tokenizer"),
        "labels": judge("bert"),
        "policy": judge("policy"),
        "headless": judge("headless"),
        "nan": judge("nan"),
        "service": {"what": "score", "config": {**PLACEMENT, "roles": service, "reward": functions_of_role}},
        "unreachable": {"what": "score", "config": {**PLACEMENT, "roles": unreachable}},
        "judge": {"what": "score", "config": {**PLACEMENT, "roles": judging, "reward": functions_of_role}},
        "several": {"what": "score", "config": {**PLACEMENT, "roles": several, "reward": several_weights}},
        "one down": {"what": "score", "config": {**PLACEMENT, "roles": {"reward": {"options": {"services": down}}}}},
        "too good": {"what": "score", "config": {**PLACEMENT, "roles": narrow}},
        "pool": {
            "what": "score",
            "config": {**PLACEMENT, "roles": {"reward": {"backend": "pool"}}, "reward": functions_of_role},
        },
        "teacher": teacher("teacher", tp=2),
        "tutor": teacher("tutor", pp=2),
        "small": small,
    }
    (folder / "jobs.json").write_text(json.dumps({"rollouts": conversations, "jobs": jobs}))
    results = run_ranks(3, "tests/workers/ranks_reward_backends.py", str(folder), timeout=400.0)
    return {"ranks": results, "models": models, "conversations": conversations, "another": other_tokenizer}


SCORED = [number for number in range(len(RESPONSES)) if number != 4]  # aborted


def reference_scores(results: dict[str, Any], name: str, label: int = 0, last_tokens: int = 64) -> list[float]:
    """Score one by one, without padding; aborted rollouts have 0."""
    expected = [0.0] * len(RESPONSES)
    for number in SCORED:
        conversation = results["conversations"][number]
        ids = conversation["ids"]
        if name == "bert":
            text = results["another"].apply_chat_template(conversation["messages"], tokenize=False)
            ids = results["another"].encode(text, add_special_tokens=False)
        with torch.no_grad():
            expected[number] = float(results["models"][name](torch.tensor([ids[-last_tokens:]])).logits[0, label])
    assert len(set(expected)) >= len(SCORED)
    return expected


def global_result(results: dict[str, Any], job: str) -> Any:
    """Return a job's result, after checking that all ranks agree and have their own rollouts."""
    first, *others = (dict(rank[job]) for rank in results["ranks"])
    local = [result.pop("local") for result in (first, *others)]
    assert all(other == first for other in others)
    assert [[number for number, _ in rewards_of_rank] for rewards_of_rank in local] == [[0, 1, 3, 4, 6], [], [2, 5]]
    assert all(reward == first["reward"][number] for rewards_of_rank in local for number, reward in rewards_of_rank)
    return first


def test_classifier_scores_policy_token_ids_besides_a_function(results: dict[str, Any]) -> None:
    expected = reference_scores(results, "own")
    result = global_result(results, "own")
    assert result["parts"]["model"] == pytest.approx(expected, abs=1e-5)
    (overlap,) = result["metrics"].items()  # timing decides how much overlaps
    assert overlap[0] == "perf/reward_overlap_frac" and 0.0 <= overlap[1] <= 1.0
    lengths = [len(conversation["ids"]) for conversation in results["conversations"]]
    lengths[4] = 0
    assert result["parts"]["length"] == lengths
    assert result["reward"] == pytest.approx([a + b for a, b in zip(lengths, expected, strict=True)], abs=1e-5)


def test_classifier_without_pad_token_scores_one_at_a_time(results: dict[str, Any]) -> None:
    assert global_result(results, "bare")["reward"] == pytest.approx(reference_scores(results, "bare"), abs=1e-5)


def test_other_tokenizer_renders_with_its_own_template(results: dict[str, Any]) -> None:
    result = global_result(results, "bert")
    assert result["parts"] == {"model": pytest.approx(reference_scores(results, "bert", label=1), abs=1e-5)}


def test_overlong_conversations_raise_or_are_truncated(results: dict[str, Any]) -> None:
    """The context is 9; the last rank's third and sixth conversations have 10 and 12 tokens."""
    (message,) = {rank["short"] for rank in results["ranks"]}
    assert (
        message.startswith("the sample '2' is 10 tokens for reward.model=") and "whose context is 9: lower" in message
    )
    result = global_result(results, "cut")
    assert result["metrics"] == {"reward/truncated_frac": pytest.approx(2 / 6)}
    assert result["reward"] == pytest.approx(reference_scores(results, "short", last_tokens=9), abs=1e-5)


@pytest.mark.parametrize(
    ("job", "message"),
    [
        ("strict", "cannot render the sample '0': TemplateError: no system prompts"),
        ("other_tokenizer", "has another tokenizer than the policy, and no chat template by which"),
        ("labels", "has 3 labels, and a score is one number: set roles.reward.options.label to the one whose logit"),
        ("policy", "is not a sequence classifier: its architecture in config.json is LlamaForCausalLM"),
        ("headless", "headless: score.weight is missing; it is not a whole classifier"),
        (
            "nan",
            "6 of 6 rollouts have no reward, more than reward.max_failed_frac=0.1 allows: 6 x model: "
            "the model returned",
        ),
        ("too good", "/v1: its score 7 is not from 0 to 5"),
        ("unreachable", "(2 tries); check that it runs, or set roles.reward.options.url"),
        ("one down", "(2 tries); check that it runs, or set roles.reward.options.services.worse.url"),
    ],
)
def test_errors_are_the_same_on_all_ranks(results: dict[str, Any], job: str, message: str) -> None:
    errors = {rank[job] for rank in results["ranks"]}
    assert len(errors) == 1 and message in next(iter(errors)), errors


def test_reward_service_is_called_by_ranks_with_rollouts(results: dict[str, Any], server: RewardServer) -> None:
    result = global_result(results, "service")
    words = [0 if number == 4 else len(answer.split()) for number, answer in enumerate(RESPONSES)]
    lengths = global_result(results, "pool")["reward"]
    assert result["parts"] == {"length": lengths, "service": words, "service/style": [0.5 * bool(n) for n in words]}
    assert result["reward"] == [a + b for a, b in zip(lengths, words, strict=True)]
    assert sorted(len(batch) for batch in server.batches()) == [2] * 9  # for three jobs


def test_function_classifier_and_service_combine(results: dict[str, Any]) -> None:
    result = global_result(results, "all")
    words = [0 if number == 4 else len(answer.split()) for number, answer in enumerate(RESPONSES)]
    lengths, model = global_result(results, "pool")["reward"], reference_scores(results, "own")
    assert result["parts"].keys() == {"length", "model", "service", "service/style"}
    assert (result["parts"]["length"], result["parts"]["service"]) == (lengths, words)
    assert result["parts"]["model"] == pytest.approx(model, abs=1e-5)
    full = [
        0.4 * length_score + 0.5 * model_score + 0.1 * word_score
        for length_score, model_score, word_score in zip(lengths, model, words, strict=True)
    ]
    assert result["reward"] == pytest.approx(full, abs=1e-5)
    weights = {"reward/length_weight": 0.4, "reward/model_weight": 0.5, "reward/service_weight": 0.1}
    assert weights.items() <= result["metrics"].items()


def test_judge_is_called_by_ranks_with_rollouts(results: dict[str, Any]) -> None:
    result = global_result(results, "judge")
    words = [0 if number == 4 else len(answer.split()) for number, answer in enumerate(RESPONSES)]
    lengths = global_result(results, "pool")["reward"]
    assert result["parts"] == {"length": lengths, "judge": words}
    assert result["reward"] == [a + b for a, b in zip(lengths, words, strict=True)]


def test_services_and_judges_combine_by_name(results: dict[str, Any]) -> None:
    """Two judges and a service; the second judge's prompt has one more word, the fence."""
    result = global_result(results, "several")
    words = [0 if number == 4 else len(answer.split()) for number, answer in enumerate(RESPONSES)]
    lengths = global_result(results, "pool")["reward"]
    assert {name: result["parts"][name] for name in ("length", "judge", "words", "fenced")} == {
        "length": lengths,
        "judge": words,
        "words": words,
        "fenced": [0 if number == 4 else count + 1 for number, count in enumerate(words)],
    }
    assert result["reward"] == pytest.approx([a + 0.75 * b for a, b in zip(lengths, words, strict=True)])


@pytest.mark.parametrize("role", ["teacher", "tutor"])
def test_teacher_logprobs_match_transformers(results: dict[str, Any], role: str) -> None:
    """Two layouts and role names; each rank gets its own sequences, also the rank without the teacher."""
    for temperature, name in ((0.7, "as sampled"), (1.0, "at 1")):
        merged: dict[int, list[float]] = {}
        for rank in results["ranks"]:
            merged |= {int(number): values for number, values in rank[role][name].items()}
        assert sorted(merged) == list(range(len(RESPONSES)))
        for number, values in merged.items():
            ids = torch.tensor(results["conversations"][number]["ids"])
            with torch.no_grad():
                logits = results["models"]["teacher"](ids[None]).logits[0] / temperature
            expected = logits.log_softmax(-1)[:-1].gather(1, ids[1:, None])[:, 0].tolist()
            assert values[1:] == pytest.approx(expected, abs=1e-5)
    assert all(f"{role}_logprobs" in rank[role]["spans"] for rank in results["ranks"])


def test_log_probs_are_nan_from_a_token_that_the_model_lacks(results: dict[str, Any]) -> None:
    """The small teacher has no row for `six`, the last id, as a smaller model may lack padding rows of a larger one."""
    merged: dict[int, list[float]] = {}
    for rank in results["ranks"]:
        merged |= {int(number): values for number, values in rank["small"]["at 1"].items()}
    for number, values in merged.items():
        ids = results["conversations"][number]["ids"]
        end = ids.index(WORDS.index("six")) if WORDS.index("six") in ids else len(ids)
        with torch.no_grad():
            logprobs = results["models"]["small"](torch.tensor([ids[:end]])).logits[0].log_softmax(-1)
        expected = logprobs[:-1].gather(1, torch.tensor(ids[1:end])[:, None])[:, 0].tolist()
        assert values[1:end] == pytest.approx(expected, abs=1e-5)
        assert all(map(math.isnan, values[end:])) and len(values) == len(ids)
    assert sorted(number for number in merged if any(map(math.isnan, merged[number][1:]))) == [2, 4, 5]
