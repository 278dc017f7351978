"""Tool calls that the templates of all families render, parsed by SGLang's parsers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import templates
from call_writers import TYPED, UNTYPED, WITHOUT_WRITER
from reasoning_templates import OTHER_FORMATS, REASONING, WITHOUT_RESULTS, reasoning_tokenizer
from templates import ChatFormat

from megarl.chat_format.chat_messages import CALL_FORMATS, format_call_id
from megarl.chat_format.chat_template import ChatTemplate
from megarl.config import ConfigError
from megarl.engine.sglang.server_args import tool_call_parsers
from megarl.engine.tool_calls import ParsedResponse, ToolCall, build_response, escape_text
from megarl.environments.ready.calculator import calculator
from megarl.environments.tools import Tool
from megarl.models.registry import FAMILIES

pytestmark = [pytest.mark.alone, pytest.mark.slow]

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
FORMATS: dict[str, ChatFormat] = {
    **templates.PUBLISHED,
    **OTHER_FORMATS,
    **{f"{k}, reasons": v for k, v in REASONING.items()},
}
ONE_CALL = {"llama", "harmony"}
"""Formats whose template takes one call per turn."""

Calls = list[tuple[str, dict[str, Any]]]


def load_chat(name: str) -> ChatTemplate:
    family = FORMATS[name]
    tokenizer = reasoning_tokenizer(family) if family in REASONING.values() else family.tokenizer()
    return ChatTemplate(tokenizer, {"search_in": SEARCH, "calculator": calculator})


def render_calls(chat: ChatTemplate, calls: Calls) -> str:
    """Render a turn with these calls, without its end token."""
    tool_calls = [
        {"id": format_call_id(name, i), "type": "function", "function": {"name": name, "arguments": arguments}}
        for i, (name, arguments) in enumerate(calls)
    ]
    user = {"role": "user", "content": "x"}
    form = next(form for form in CALL_FORMATS if renders_calls(chat, form))
    turn = form({"role": "assistant", "content": "", "tool_calls": tool_calls})
    text = chat.tokenizer.apply_chat_template([user, turn], tools=SCHEMAS, tokenize=False)
    prefixes = [
        chat.tokenizer.apply_chat_template([user], tools=SCHEMAS, tokenize=False, add_generation_prompt=generate)
        for generate in (True, False)
    ]
    text = text.removeprefix(next(head for head in prefixes if text.startswith(head)))
    end = chat.decode([chat.end_of_call or 0])
    return text[: text.rindex(end)] if end in text else text


def renders_calls(chat: ChatTemplate, form: Any) -> bool:
    calculation = {"name": "calculator", "arguments": {"expression": "1"}}
    turn = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": format_call_id("calculator", 0), "type": "function", "function": calculation}],
    }
    try:
        rendered = chat.tokenizer.apply_chat_template([{"role": "user", "content": "x"}, form(turn)], tokenize=False)
    except Exception:
        return False
    return "calculator" in rendered


def make_cases(name: str) -> dict[str, tuple[str, Calls | None]]:
    """Return texts of a turn with the calls in them."""
    chat = load_chat(name)
    nested, lines = ("search_in", NESTED), ("search_in", LINES)
    calculation = ("calculator", {"expression": "1+2"})
    cases: dict[str, tuple[str, Calls | None]] = {
        "nested": (render_calls(chat, [nested]), [nested]),
        "lines": (render_calls(chat, [lines]), [lines]),
        "no arguments": (render_calls(chat, [("search_in", {})]), [("search_in", {})]),
    }
    rendered = render_calls(chat, [calculation])
    if name not in ONE_CALL:
        cases["several"] = (render_calls(chat, [nested, calculation, lines]), [nested, calculation, lines])
        cases["text before"] = ("I look it up.\n" + rendered, [calculation])
        cases["half a character"] = ("\ufffd" + rendered, [calculation])
    return cases


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


HALF_BROKEN: dict[str, tuple[str, str]] = {
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
"""A call, followed by a broken one."""


@pytest.fixture(scope="module")
def parsed() -> dict[str, dict[str, tuple[ParsedResponse, Calls | None]]]:
    """Parse all cases in one process: by format and case, the response and the expected calls."""
    all_cases = {name: make_cases(name) for name in FORMATS}
    all_cases |= {
        f"broken {parser}": {str(i): (text, None) for i, text in enumerate(texts)} for parser, texts in BROKEN.items()
    }
    all_cases |= {f"half {parser}": {"": ("".join(texts), None)} for parser, texts in HALF_BROKEN.items()}
    parsers = {name: FORMATS[name].parser if name in FORMATS else name.split()[1] for name in all_cases}
    requests = [(parsers[name], text) for name, group in all_cases.items() for text, _ in group.values()]
    replies = iter(parse_texts(requests, SCHEMAS))
    return {
        name: {case: (next(replies), expected) for case, (_, expected) in group.items()}
        for name, group in all_cases.items()
    }


def parse_texts(texts: list[tuple[str, str]], schemas: list[dict[str, Any]]) -> list[ParsedResponse]:
    """Return the parsed response of each (parser, text). One process parses all."""
    root = Path(__file__).parents[2]
    program = [sys.executable, str(root / "tests/helpers/sglang_parsers.py")]
    requests = json.dumps([[parser, text, schemas] for parser, text in texts])
    done = subprocess.run(program, input=requests, capture_output=True, text=True, cwd=root, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout.splitlines()[-1])
    return [
        build_response(text, schemas, escape_text(text, schemas, parser, result["markers"][parser]), answer)
        for (parser, text), answer in zip(texts, result["answers"], strict=True)
    ]


def test_formats_cover_all_families() -> None:
    parsers = {family.parser for family in FORMATS.values()}
    for family in FAMILIES.values():
        assert {family.tool_call_parser, *family.parsers_by_type.values()} <= parsers


@pytest.mark.parametrize("name", FORMATS)
def test_parser_reads_rendered_calls(name: str, parsed: Any) -> None:
    for case, (reply, expected) in parsed[name].items():
        assert reply.calls == tuple(ToolCall(*call) for call in expected), (case, reply)
        assert not reply.error, case
        assert ("I look it up." in reply.text) == (case == "text before"), (case, reply.text)


@pytest.mark.parametrize("parser", BROKEN)
def test_broken_call_is_an_error_without_calls(parser: str, parsed: Any) -> None:
    for case, (reply, _) in parsed[f"broken {parser}"].items():
        assert "malformed" in reply.error and not reply.calls, (case, reply)


@pytest.mark.parametrize("parser", HALF_BROKEN)
def test_broken_call_beside_a_valid_one_is_an_error(parser: str, parsed: Any) -> None:
    reply, _ = parsed[f"half {parser}"][""]
    assert "malformed" in reply.error and reply.calls == (ToolCall("calculator", {"expression": "1"}),)


def test_template_that_cannot_render_results_is_a_config_error() -> None:
    chat = ChatTemplate(WITHOUT_RESULTS.tokenizer(), {"calculator": calculator})
    with pytest.raises(ConfigError, match="does not support tool calls .*a result without a call before it") as error:
        chat.check_tools()
    assert "\n" not in str(error.value)


NOTE_SCHEMA = {
    "type": "function",
    "function": {
        "name": "note",
        "description": "Takes a note.",
        "parameters": {
            "type": "object",
            "properties": {
                "text": {"type": "string"},
                "count": {"type": "integer"},
                "share": {"type": "number"},
                "flag": {"type": "boolean"},
                "items": {"type": "array"},
                "options": {"type": "object"},
                "maybe": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
                "either": {"type": ["string", "null"]},
                "choice": {"enum": ["1", "2"]},
            },
            "required": [],
        },
    },
}
STRINGS = [
    "1e5",
    "true",
    "null",
    "007",
    "-5",
    "None",
    "1,080",
    "[1, 2]",
    '{"a": 1}',
    '"quoted"',
    " padded ",
    "two\nlines",
]
STRINGS += ["<b>x</b>", "it's", "x[1] = [TOOL_CALLS] [", "a <tool_call> b", "a <tool_call>{} b </tool_call> c"]
ARGUMENTS: list[dict[str, Any]] = [
    *({"text": text} for text in STRINGS),
    {"count": -5},
    {"count": 12},
    {"share": -0.5},
    {"share": 1e-7},
    {"flag": True},
    {"flag": False},
    {"items": [-1, "a", [True]]},
    {"items": ["007"]},
    {"options": {"k": -2, "n": None, "s": "a"}},
    {"maybe": None},
    {"maybe": -7},
    {"either": None},
    {"either": "x"},
    {"choice": "1"},
    {"text": "null", "count": 0, "flag": True},
]
WRITERS = UNTYPED | TYPED
KNOWN_LOSSES = {"minimax-m3": [" padded ", "items", "options", "maybe"]}
"""Arguments that parsers lose: minimax-m3 nests tags for lists and objects, which are not escaped."""
DROPPED_CALLS: dict[str, str] = {
    "pythonic": "[note(count=1 + 2)]",
    "pythonic, one of two": '[note(count=one), note(text="a")]',
    "lfm2, one of two": '<|tool_call_start|>[note(count=one), note(text="a")]<|tool_call_end|>',
    "llama3": '{"name": "note", "parameters": {"text": }}',
    "deepseekv3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>note\n```json\n{}\n```"
    "<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>note<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "qwen3_coder, one of two": "<tool_call>\n<function=note>\n</function>\n<function=note\n</function>\n</tool_call>",
    "minimax-m2, one of two": '<minimax:tool_call>\n<invoke name="note">\n</invoke>\n<invoke name=note>\n</invoke>\n'
    "</minimax:tool_call>",
    "step3, one of two": "<｜tool_calls_begin｜>\n<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke "
    'name="note"> </steptml:invoke><｜tool_call_end｜>\n'
    "<｜tool_call_begin｜>note<｜tool_call_end｜>\n<｜tool_calls_end｜>",
}


@pytest.fixture(scope="module")
def parsed_notes() -> dict[str, list[ParsedResponse]]:
    texts = {
        parser: [f"I see.\n{write('note', arguments)}" for arguments in ARGUMENTS] for parser, write in WRITERS.items()
    }
    requests = [(parser, text) for parser, texts_of_parser in texts.items() for text in texts_of_parser]
    requests += [(name.partition(",")[0], text) for name, text in DROPPED_CALLS.items()]
    replies = iter(parse_texts(requests, [NOTE_SCHEMA]))
    return {parser: [next(replies) for _ in texts_of_parser] for parser, texts_of_parser in texts.items()} | {
        f"dropped {name}": [next(replies)] for name in DROPPED_CALLS
    }


@pytest.mark.parametrize("parser", WRITERS)
def test_arguments_have_the_types_of_the_schema(parser: str, parsed_notes: Any) -> None:
    """Strings keep their text; values of other types are converted."""
    for arguments, reply in zip(ARGUMENTS, parsed_notes[parser], strict=True):
        if any(loss in (*arguments, *arguments.values()) for loss in KNOWN_LOSSES.get(parser, ())):
            continue
        assert reply.calls == (ToolCall("note", arguments),) and not reply.error, (arguments, reply)
        types = [type(value) for value in reply.calls[0].arguments.values()]
        assert types == [type(value) for value in arguments.values()], (arguments, reply)  # True == 1 in Python
        assert "I see." in reply.text and "ARGUMENT" not in reply.text, reply


@pytest.mark.parametrize("name", DROPPED_CALLS)
def test_dropped_call_is_an_error(name: str, parsed_notes: Any) -> None:
    (reply,) = parsed_notes[f"dropped {name}"]
    assert "malformed" in reply.error, reply
    assert len(reply.calls) == ("one of two" in name), reply


def test_writers_cover_all_parsers_of_sglang() -> None:
    assert set(tool_call_parsers()) - set(WRITERS) == WITHOUT_WRITER
