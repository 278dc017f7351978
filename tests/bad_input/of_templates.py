"""Tokenizers and chat templates unfit for conversations with tools, and unknown tool call parsers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from case import Case

TOOLS = ("rollout.tools=[megarl.environments.ready.calculator:calculator]",)
TEMPLATE = "model/chat_template.jinja"


def text(name: str, content: str | bytes) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())

    return write


def changed(old: str, new: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        template = (folder / TEMPLATE).read_text()
        assert old in template, old
        (folder / TEMPLATE).write_text(template.replace(old, new))

    return write


def added_token(token: str, number: int) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        file = folder / "model/tokenizer.json"
        tree: dict[str, Any] = json.loads(file.read_text())
        tree["added_tokens"].append({**tree["added_tokens"][-1], "content": token, "id": number})
        file.write_text(json.dumps(tree))

    return write


def without(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def template(name: str, prepare: Callable[[Path], None], *expected: str) -> Case:
    return Case(f"template: {name}", ("chat template of model.path", *expected), TOOLS, prepare)


def generation(name: str, content: str, *expected: str) -> Case:
    return Case(f"generation_config: {name}", ("generation_config.json", *expected), TOOLS, text(GENERATION, content))


def tokenizer(name: str, prepare: Callable[[Path], None], *expected: str) -> Case:
    return Case(f"tokenizer: {name}", ("model", *expected), TOOLS, prepare)


def parser(name: str, *expected: str) -> Case:
    return Case(f"parser: {name}", ("rollout.tool_call_parser", *expected), (f"rollout.tool_call_parser={name}",))


GENERATION, TOKENIZER = "model/generation_config.json", "model/tokenizer.json"
TURN = "<|im_start|>{{ m.role }}\n{{ m.content or '' }}<|im_end|>\n"
HEAD = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
ALTERNATING = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}" + TURN + "{% endfor %}" + HEAD
)

CASES = [
    template("syntax error", text(TEMPLATE, "{% for m in messages %}"), "cannot render the roles user"),
    template("unknown filter", text(TEMPLATE, "{{ messages | nonsense }}"), "cannot render", "nonsense"),
    template("undefined variable", text(TEMPLATE, "{{ messages[0].a.b.c }}"), "cannot render"),
    template("division by zero", text(TEMPLATE, "{{ 1 / 0 }}"), "cannot render", "division by zero"),
    template(
        "raises an exception", text(TEMPLATE, "{{ raise_exception('not me\nnever') }}"), "cannot render", "not me never"
    ),
    template("renders nothing", text(TEMPLATE, "x"), "does not support tool calls", "leave rollout.tools empty"),
    template(
        "omits tool calls", changed("message.tool_calls or []", "[]"), "does not support tool calls", "omits calls"
    ),
    template(
        "ignores tools",
        text(TEMPLATE, "{% for m in messages %}" + TURN + "{% endfor %}" + HEAD),
        "does not support tool calls",
        "it omits calls",
    ),
    template(
        "alternating user and assistant only",
        text(TEMPLATE, ALTERNATING),
        "does not support tool calls",
        "must alternate",
    ),
    template(
        "rejects the role tool",
        changed("message.role == 'tool'", "message.role == 'tool' and raise_exception('no tools')"),
        "does not support tool calls",
        "no tools",
    ),
    template(
        "omits tool results",
        changed("{{ message.content }}{{ '\\n' }}</tool_response>", "</tool_response>"),
        "does not support tool calls",
    ),
    template(
        "renders text differently after a call",
        changed("<|im_start|>user{%- endif -%}", "<|im_start|>{{ loop.previtem.tool_calls }}{%- endif -%}"),
        "depends on the call",
    ),
    template("drops the policy's text", text(TEMPLATE, "<|im_start|>"), "does not support tool calls"),
    template(
        "reads calls under another key",
        changed("call.function.name", "call.function.names.first"),
        "does not support tool calls",
    ),
    tokenizer("no template", without(TEMPLATE), "has no chat template"),
    tokenizer("an empty template", text(TEMPLATE, ""), "no chat template"),
    tokenizer("not JSON", text(TOKENIZER, "{"), "FOLDER/model/tokenizer"),
    tokenizer("binary", text(TOKENIZER, b"\xff\xfe\x00\x01"), "FOLDER/model/tokenizer"),
    tokenizer("empty", text(TOKENIZER, ""), "FOLDER/model/tokenizer"),
    tokenizer("a list", text(TOKENIZER, "[]"), "FOLDER/model/tokenizer"),
    tokenizer("settings are not JSON", text("model/tokenizer_config.json", "{"), "FOLDER/model/tokenizer"),
    tokenizer("settings are a list", text("model/tokenizer_config.json", "[]"), "FOLDER/model/tokenizer"),
    tokenizer("an added token beyond the vocabulary", added_token("<|more|>", 1024), "vocab_size=1024", "'<|more|>'"),
    generation("not JSON", "{", "is not valid JSON"),
    generation("a list", "[]", "holds a list"),
    generation("a word", '{"eos_token_id": "<|im_end|>"}', "eos_token_id must be a token id"),
    generation("a fraction", '{"eos_token_id": 1.5}', "eos_token_id must be a token id"),
    generation("true", '{"eos_token_id": true}', "eos_token_id must be a token id"),
    generation("negative", '{"eos_token_id": [2, -1]}', "eos_token_id must be a token id"),
    generation("beyond the vocabulary", '{"eos_token_id": [2, 1024]}', "eos_token_id 1024", "vocabulary of 1024"),
    parser("qwen26", "qwen26 is not a parser of SGLang", "did you mean qwen25", "Leave it empty"),
    parser("glm46", "did you mean glm4"),
    parser("deepseek", "is not a parser of SGLang", "deepseek"),
    parser("Qwen25", "did you mean qwen25"),
    parser("HERMES", "did you mean hermes"),
    parser("none", "is not a parser of SGLang", "eave it empty"),
    parser("'../qwen25'", "is not a parser of SGLang"),
]
