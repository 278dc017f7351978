"""Calls as the templates of all families write them, read back by SGLang's own parsers of those families."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import templates
from reasoning_templates import NO_RESULTS, OTHERS, REASONING, reasoning_tokenizer
from templates import Published

from megarl.config import ConfigError
from megarl.models.registry import FAMILIES
from megarl.rollout.chat import Chat
from megarl.rollout.messages import FORMS, call_id
from megarl.rollout.tool_calls import Call, Reply, judge
from megarl.rollout.tools import Tool, calculator

SEARCH = Tool(
    {
        "type": "function",
        "function": {
            "name": "search_in",
            "description": "Looks something up.",
            "parameters": {
                "type": "object",
                "properties": {
                    "query": {"type": "string"},
                    "options": {"type": "object"},
                    "places": {"type": "array", "items": {"type": "string"}},
                    "limit": {"type": "integer"},
                },
                "required": ["query"],
            },
        },
    },
    lambda **_: "",
)
SCHEMAS = [SEARCH.schema, calculator.schema]
NESTED = {
    "query": "naïve 北京 😀, \"quoted\" and 'quoted' \\ back",
    "options": {"depth": 2, "tags": ["a", {"b": "c", "d": [1, [2.5]]}], "note": "x{y}z"},
    "places": ["here", "dort drüben"],
    "limit": 3,
}
LINES = {"query": "first line\nsecond line\n\tindented", "limit": 0}
FORMATS: dict[str, Published] = {**templates.PUBLISHED, **OTHERS, **{f"{k}, reasons": v for k, v in REASONING.items()}}
ONE_CALL = {"llama"}
"""Whose template takes one call a turn."""

Calls = list[tuple[str, dict[str, Any]]]


def chat_of(name: str) -> Chat:
    family = FORMATS[name]
    tokenizer = reasoning_tokenizer(family) if family in REASONING.values() else family.tokenizer()
    return Chat(tokenizer, {"search_in": SEARCH, "calculator": calculator})


def written(chat: Chat, calls: Calls) -> str:
    """What the template makes of a turn with these calls, without what ends it."""
    asked = [
        {"id": call_id(name, i), "type": "function", "function": {"name": name, "arguments": arguments}}
        for i, (name, arguments) in enumerate(calls)
    ]
    user = {"role": "user", "content": "x"}
    form = next(form for form in FORMS if call_written(chat, form))
    turn = form({"role": "assistant", "content": "", "tool_calls": asked})
    text = chat.tokenizer.apply_chat_template([user, turn], tools=SCHEMAS, tokenize=False)
    heads = [
        chat.tokenizer.apply_chat_template([user], tools=SCHEMAS, tokenize=False, add_generation_prompt=generate)
        for generate in (True, False)
    ]
    text = text.removeprefix(next(head for head in heads if text.startswith(head)))
    end = chat.text([chat.end_of_call or 0])
    return text[: text.rindex(end)] if end in text else text


def call_written(chat: Chat, form: Any) -> bool:
    one = {"name": "calculator", "arguments": {"expression": "1"}}
    turn = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": call_id("calculator", 0), "type": "function", "function": one}],
    }
    try:
        found = chat.tokenizer.apply_chat_template([{"role": "user", "content": "x"}, form(turn)], tokenize=False)
    except Exception:
        return False
    return "calculator" in found


def cases(name: str) -> dict[str, tuple[str, Calls | None]]:
    """Texts of a turn, and the calls that are in them; None where they cannot be read."""
    chat = chat_of(name)
    nested, lines = ("search_in", NESTED), ("search_in", LINES)
    one = ("calculator", {"expression": "1+2"})
    found: dict[str, tuple[str, Calls | None]] = {
        "nested": (written(chat, [nested]), [nested]),
        "lines": (written(chat, [lines]), [lines]),
        "no arguments": (written(chat, [("search_in", {})]), [("search_in", {})]),
    }
    plain = written(chat, [one])
    if name not in ONE_CALL:
        found["several"] = (written(chat, [nested, one, lines]), [nested, one, lines])
        found["text before"] = ("I look it up.\n" + plain, [one])
        found["half a character"] = ("\ufffd" + plain, [one])
    return found


BROKEN: dict[str, list[str]] = {
    "qwen25": ['<tool_call>\n{"name": "calculator", "arguments": {"expression": "1}\n</tool_call>'],
    "deepseekv3": [
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>calculator\n```json\n{"expression": 1\n```'
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>calculator\n```json\n{}",
    ],
    "deepseekv31": [
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>calculator<｜tool▁sep｜>{"expression": <｜tool▁call▁end｜>'
        "<｜tool▁calls▁end｜>"
    ],
    "kimi_k2": [
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.calculator:0<|tool_call_argument_begin|>"
        '{"expression": }<|tool_call_end|><|tool_calls_section_end|>',
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.calculator:0<|tool_call_end|>"
        "<|tool_calls_section_end|>",
    ],
    "glm45": ["<tool_call>calculator\n<arg_key>expression</arg_key>\n<arg_value>1"],
    "qwen3_coder": ["<tool_call>\n<function=calculator\n</tool_call>"],
}


HALF: dict[str, tuple[str, str]] = {
    "kimi_k2": (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.calculator:0<|tool_call_argument_begin|>"
        '{"expression": "1"}<|tool_call_end|>',
        "<|tool_call_begin|>functions.calculator:1{}<|tool_call_end|><|tool_calls_section_end|>",
    ),
    "qwen25": (
        '<tool_call>\n{"name": "calculator", "arguments": {"expression": "1"}}\n</tool_call>',
        "\n<tool_call>\n{",
    ),
    "glm45": (
        "<tool_call>calculator\n<arg_key>expression</arg_key>\n<arg_value>1</arg_value>\n</tool_call>",
        "\n<tool_call>calculator\n<arg_key>",
    ),
}
"""A call, and one behind it that is broken."""


@pytest.fixture(scope="module")
def parsed() -> dict[str, dict[str, tuple[Reply, Calls | None]]]:
    """By format and case: what the parser made of it, and the calls that there are. One process for all."""
    told = {name: cases(name) for name in FORMATS}
    told |= {
        f"broken {parser}": {str(i): (text, None) for i, text in enumerate(texts)} for parser, texts in BROKEN.items()
    }
    told |= {f"half {parser}": {"": ("".join(texts), None)} for parser, texts in HALF.items()}
    parsers = {name: FORMATS[name].parser if name in FORMATS else name.split()[1] for name in told}
    orders = [[parsers[name], text, SCHEMAS] for name, group in told.items() for text, _ in group.values()]
    root = Path(__file__).parents[2]
    program = [sys.executable, str(Path(__file__).with_name("sglang_parsers.py"))]
    done = subprocess.run(program, input=json.dumps(orders), capture_output=True, text=True, cwd=root, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout.splitlines()[-1])
    answers = iter(result["answers"])
    return {
        name: {
            case: (judge(text, result["markers"][parsers[name]], next(answers)), expected)
            for case, (text, expected) in group.items()
        }
        for name, group in told.items()
    }


def test_the_formats_are_of_all_families() -> None:
    parsers = {family.parser for family in FORMATS.values()}
    for family in FAMILIES.values():
        assert {family.tool_call_parser, *family.parsers_by_type.values()} <= parsers


@pytest.mark.parametrize("name", FORMATS)
def test_calls_are_read_as_they_were_written(name: str, parsed: Any) -> None:
    for case, (reply, expected) in parsed[name].items():
        assert reply.calls == tuple(Call(*call) for call in expected), (case, reply)
        assert not reply.error, case
        assert ("I look it up." in reply.text) == (case == "text before"), (case, reply.text)


@pytest.mark.parametrize("parser", BROKEN)
def test_a_broken_call_is_an_error_and_no_call(parser: str, parsed: Any) -> None:
    for case, (reply, _) in parsed[f"broken {parser}"].items():
        assert "malformed" in reply.error and not reply.calls, (case, reply)


@pytest.mark.parametrize("parser", HALF)
def test_a_broken_call_beside_a_good_one_is_an_error(parser: str, parsed: Any) -> None:
    reply, _ = parsed[f"half {parser}"][""]
    assert "malformed" in reply.error and reply.calls == (Call("calculator", {"expression": "1"}),)


def test_a_template_that_wants_more_than_a_result_is_one_line() -> None:
    chat = Chat(NO_RESULTS.tokenizer(), {"calculator": calculator})
    with pytest.raises(ConfigError, match="no place for calls of tools .*a result without a call before it") as error:
        chat.check_tools()
    assert "\n" not in str(error.value)
