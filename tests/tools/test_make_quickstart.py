"""`make_quickstart`: model folder, data sets and tokenizer."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from megarl.chat_format.chat_template import ChatTemplate
from megarl.config import ConfigError
from megarl.data.datasets import read_conversations
from megarl.environments.ready.calculator import calculator
from megarl.types import Prompt

pytestmark = [pytest.mark.alone, pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[2]


def make_quickstart(out: Path, *arguments: str) -> Path:
    command = [sys.executable, str(ROOT / "tools/make_quickstart.py"), str(out), *arguments]
    process = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert process.returncode == 0, process.stderr[-3000:]
    return out


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_quickstart(tmp_path_factory.mktemp("quickstart") / "qs", "--demonstrations", "2000", "--train", "500")


@pytest.fixture(scope="module")
def tokenizer(quickstart: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(quickstart / "model")


def rows(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def expression_of(message: dict[str, Any]) -> str:
    return message["content"].removeprefix("What is ").removesuffix("?")


def test_held_out_problems_are_disjoint(quickstart: Path) -> None:
    held_out = {expression_of(row["prompt"][0]) for row in rows(quickstart / "eval.jsonl")}
    train = {expression_of(row["prompt"][0]) for row in rows(quickstart / "train.jsonl")}
    demonstrated = {expression_of(row["messages"][0]) for row in rows(quickstart / "sft.jsonl")}
    assert len(held_out) == 256 and len(train) == 500 and len(demonstrated) == 2000  # also unique within each file
    assert not held_out & (train | demonstrated)


def test_ground_truth_is_the_value_of_the_expression(quickstart: Path) -> None:
    for row in rows(quickstart / "eval.jsonl"):
        assert row["tools"] == ["calculator"]
        assert str(row["ground_truth"]) == calculator.function(expression=expression_of(row["prompt"][0]))


def test_a_third_of_demonstrations_use_the_tool_and_the_rest_guess(quickstart: Path) -> None:
    with_tool = 0
    lucky = 0
    for row in rows(quickstart / "sft.jsonl"):
        expected = calculator.function(expression=expression_of(row["messages"][0]))
        is_correct = row["messages"][-1]["content"] == f"The answer is {expected}."
        if len(row["messages"]) == 2:
            lucky += is_correct
            continue
        with_tool += 1
        call = row["messages"][1]["tool_calls"][0]["function"]
        assert json.loads(call["arguments"]) == {"expression": expression_of(row["messages"][0])}
        assert row["messages"][2] == {"role": "tool", "content": expected}
        assert is_correct
    assert 0.30 < with_tool / 2000 < 0.40
    assert lucky / (2000 - with_tool) < 0.01


def test_digits_and_operators_are_single_tokens(tokenizer: Any) -> None:
    single = set("0123456789+-*")
    text = 'What is 12+34*5-6? The answer is -170. {"expression": "12+34"} a-b 1,000 *bold* x2'
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids) == text
    decoded = [tokenizer.decode([token]) for token in ids]
    assert [token_text for token_text in decoded if set(token_text) & single] == [
        char for char in text if char in single
    ]


def test_tokenizer_round_trips_text_and_uses_every_id(tokenizer: Any) -> None:
    text = "Grüße, 世界 🚀\n\t\x00 \\ <tools> naïve"
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text
    assert len(tokenizer) == 1024
    assert sorted(tokenizer.get_vocab().values()) == list(range(1024))


def test_template_text_takes_few_tokens(quickstart: Path, tokenizer: Any) -> None:
    prompt = Prompt(id="1", messages=({"role": "user", "content": "What is 1?"},))
    assert len(ChatTemplate(tokenizer, {"calculator": calculator}).encode_prompt(prompt)) <= 40
    row = next(row for row in rows(quickstart / "sft.jsonl") if len(row["messages"]) > 2)
    call = tokenizer.apply_chat_template(row["messages"][:2], tokenize=False).partition("<tool_call>")[2]
    assert len(tokenizer.encode("<tool_call>" + call)) - len(expression_of(row["messages"][0])) <= 6


def test_demonstrations_tokenize_like_rollouts(quickstart: Path, tokenizer: Any) -> None:
    chat = ChatTemplate(tokenizer, {"calculator": calculator})
    conversations = read_conversations(quickstart / "sft.jsonl", tokenizer)
    assert {len(rollout.turns) for rollout in conversations[:50]} == {2, 4}
    for rollout, row in zip(conversations[:200], rows(quickstart / "sft.jsonl"), strict=False):
        assert rollout.prompt.token_ids is rollout.turns[0].token_ids
        assert list(rollout.turns[0].token_ids) == chat.encode_prompt(rollout.prompt)
        for turn, message in zip(rollout.turns[2::2], row["messages"][2::2], strict=True):
            assert list(turn.token_ids) == chat.encode_continuation([message], [calculator.schema])
        for turn in rollout.turns[1::2]:
            assert turn.is_action and turn.token_ids[-1] == chat.end_of_turn == tokenizer.eos_token_id
        assert chat.decode(rollout.turns[-1].token_ids) == row["messages"][-1]["content"] + "<|im_end|>"
        # Tokenizing the full text at once differs only in the final line feed of the template.
        full_text = tokenizer.apply_chat_template(row["messages"], tools=[calculator.schema], tokenize=False)
        assert full_text.endswith("<|im_end|>\n")
        assert tokenizer.encode(full_text.removesuffix("\n"), add_special_tokens=False) == rollout.token_ids.tolist()


def test_template_renders_system_message_and_two_calls(tokenizer: Any) -> None:
    def call(expression: str) -> dict[str, Any]:
        return {"type": "function", "function": {"name": "calculator", "arguments": {"expression": expression}}}

    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "1+1, 2+2?"},
        {"role": "assistant", "content": "Both:", "tool_calls": [call("1+1"), call("2+2")]},
        {"role": "tool", "content": "2"},
        {"role": "tool", "content": "4"},
    ]
    assert tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\n1+1, 2+2?<|im_end|>\n"
        "<|im_start|>assistant\nBoth:\n"
        '<tool_call>\n{"name": "calculator", "arguments": {"expression": "1+1"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "calculator", "arguments": {"expression": "2+2"}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\n2\n</tool_response>\n<tool_response>\n4\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    with_tools = tokenizer.apply_chat_template(messages[:2], tools=[calculator.schema], tokenize=False)
    assert with_tools.startswith("<|im_start|>system\nBe brief.\n\n")
    assert f"<tools>\n{json.dumps(calculator.schema)}\n</tools>\n" in with_tools


def test_model_folder_has_the_published_tensor_names(quickstart: Path) -> None:
    config = json.loads((quickstart / "model/config.json").read_text())
    assert config["architectures"] == ["Qwen3MoeForCausalLM"]
    assert (config["num_experts"], config["num_experts_per_tok"], config["rope_theta"]) == (8, 2, 10000.0)
    assert config["vocab_size"] == 1024 and config["tie_word_embeddings"] is False
    generation = json.loads((quickstart / "model/generation_config.json").read_text())
    assert generation["eos_token_id"] == config["eos_token_id"] == 2
    with safe_open(quickstart / "model/model.safetensors", "pt") as weights:
        names = set(weights.keys())
        assert {str(weights.get_slice(name).get_dtype()) for name in names} == {"F32"}
    assert "model.layers.3.mlp.experts.7.gate_proj.weight" in names and "lm_head.weight" in names
    assert len(names) == 3 + 4 * (2 + 4 + 2 + 1 + 8 * 3)


def test_deepseek_folder_shares_data_for_equal_seeds(quickstart: Path, tmp_path: Path) -> None:
    sizes = ("--demonstrations", "2000", "--train", "500")
    deepseek = make_quickstart(tmp_path / "ds", "--family", "deepseek_v3", *sizes)
    config = json.loads((deepseek / "model/config.json").read_text())
    assert config["scoring_func"] == "sigmoid" and config["topk_method"] == "noaux_tc" and config["moe_layer_freq"] == 1
    assert config["rope_scaling"]["type"] == "yarn" and config["first_k_dense_replace"] == 1
    with safe_open(deepseek / "model/model.safetensors", "pt") as weights:
        names = set(weights.keys())
    assert "model.layers.1.mlp.gate.e_score_correction_bias" in names
    assert "model.layers.0.mlp.gate_proj.weight" in names
    assert "model.layers.1.mlp.shared_experts.up_proj.weight" in names
    for name in ("eval.jsonl", "train.jsonl", "sft.jsonl", "model/tokenizer.json", "model/chat_template.jinja"):
        assert (deepseek / name).read_bytes() == (quickstart / name).read_bytes(), name


def test_model_for_other_conversations_knows_their_words(tmp_path: Path) -> None:
    """The constant text of a call is few tokens, and no data is written."""
    from transformers import AutoTokenizer

    call = {"type": "function", "function": {"name": "guess", "arguments": '{"number": 7}'}}
    messages = [{"role": "user", "content": "Guess!"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    (tmp_path / "sft.jsonl").write_text(json.dumps({"messages": messages, "tools": []}) + "\n")
    out = make_quickstart(tmp_path / "out", "--conversations", str(tmp_path / "sft.jsonl"))
    assert [file.name for file in out.iterdir()] == ["model"]
    tokenizer = AutoTokenizer.from_pretrained(out / "model")
    assert len(tokenizer.encode('<tool_call>\n{"name": "guess", "arguments": {"number": 7}}\n</tool_call>')) <= 5


@pytest.mark.parametrize("text", ["", "{}\n", "[1]\n", "nonsense\n"])
def test_rejects_files_without_conversations(text: str, tmp_path: Path) -> None:
    sys.path.insert(0, str(ROOT / "tools"))
    import make_quickstart as tool

    (tmp_path / "sft.jsonl").write_text(text)
    with pytest.raises(ConfigError, match="--conversations .*sft.jsonl: .*with messages"):
        tool.read_conversations(tmp_path / "sft.jsonl")
