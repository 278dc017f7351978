"""Parse tool calls with SGLang's parser for the model's format, and explain to the policy what could not be parsed.

`escape_text` prevents SGLang's parsers from losing or misreading calls. Formats with tags (GLM, Qwen3-Coder, MiniMax,
...) write an argument as bare text, whose type only the tool's schema knows. Some parsers guess the type, so that the
text 1e5 for a string becomes 100000.0. `escape_text` replaces such texts by placeholders before parsing; they are
converted according to the schema afterwards. In JSON formats it escapes markers within strings, so that neither the
parser nor the call counter mistakes them for calls.
"""

from __future__ import annotations

import ast
import asyncio
import json
import re
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from megarl.chat_format import harmony
from megarl.chat_format.chat_template import ChatTemplate
from megarl.config import ConfigError
from megarl.config.strict import closest_match
from megarl.engine.sglang.server_args import tool_call_parsers
from megarl.environments.tools import coerce_argument
from megarl.models.family import HFConfig
from megarl.models.registry import family_of
from megarl.utils.text import replace_surrogates

_ARG_VALUE = r"<arg_value[^>\n]*>", r"</arg_value[^>\n]*>"
_PARAMETER_IS = r"<parameter=[^>\n]*>\n?", r"\n?</parameter>"
_PARAMETER = r"<parameter\s+name\s*=[^>\n]*>", r"</parameter>"
_DSML = r'<｜DSML｜ ?parameter\s[^>\n]*string="true"\s*>', r"</｜DSML｜ ?parameter>"
_TAGS: dict[str, tuple[str, str]] = {
    **dict.fromkeys(("glm", "glm45", "glm47", "hunyuan", "iquest_q1", "ling3", "poolside_v1", "spark25"), _ARG_VALUE),
    **dict.fromkeys(("qwen3_coder", "step3p5", "nanbeige", "mimo"), _PARAMETER_IS),
    **dict.fromkeys(("minimax-m2", "dots"), _PARAMETER),
    "step3": (r"<steptml:parameter\s[^>\n]*>", r"</steptml:parameter>"),
    **dict.fromkeys(("deepseekv32", "deepseekv4", "deepseekv41"), _DSML),
    "minicpm5": (r"<param\s[^>\n]*><!\[CDATA\[", r"\]\]></param>"),
    "k2_horizon": (r"</ifm\|arg_key>\s*<ifm\|arg_value>", r"</ifm\|arg_value>"),
}
"""Opening and closing pattern of an argument's text, for each parser of bare texts. DeepSeek's later formats use
them for strings only."""
_CALL_OPENINGS: dict[str, str] = {
    **dict.fromkeys(("deepseekv3", "deepseekv31"), "<｜tool▁call▁begin｜>"),
    **dict.fromkeys(("qwen3_coder", "step3p5", "nanbeige", "mimo"), "<function="),
    **dict.fromkeys(("minimax-m2", "minimax-m3", "dots"), "<invoke "),
    **dict.fromkeys(("deepseekv32", "deepseekv4"), "<｜DSML｜invoke "),
    "deepseekv41": "<｜DSML｜ invoke ",
    "gigachat35": "<｜GCML｜invoke ",
    "kimi_k3": "<|open|>call ",
    "step3": "<｜tool_call_begin｜>",
}
"""Marker of each call, for parsers whose own marker covers a section of several calls, or that have none."""
_PYTHONIC = ("pythonic", "lfm2")
_LITERAL = re.compile(
    r"""(?P<quoted>"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*')|(?<=[=\[,:(\s])(?:"""
    r"""(?P<number>[-+]\s?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)|(?P<name>true|false|null))(?=\s*[,)\]}])"""
)
_JSON_LITERALS: dict[str, Any] = {"true": True, "false": False, "null": None}
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
_MAX_JSON_ATTEMPTS = 50
"""Limit on the attempts to decode JSON in one text, each of which may scan it to the end."""


@dataclass(frozen=True)
class EscapedText:
    """A response's text and tool schemas, made safe for a parser, and what it takes to restore the parsed calls.

    num_calls: number of calls that the text begins, as far as visible. argument_texts, literal_values: by placeholder,
    the original text of an argument, or the value of a literal. originals: by placeholder, text outside of calls.
    """

    text: str
    schemas: list[dict[str, Any]]
    num_calls: int = 0
    argument_texts: dict[str, str] = field(default_factory=dict)
    literal_values: dict[str, Any] = field(default_factory=dict)
    originals: dict[str, str] = field(default_factory=dict)

    def restore_text(self, text: str) -> str:
        """Replace the placeholders in text outside of calls."""
        for placeholder, original in self.originals.items():
            text = text.replace(placeholder, original)
        return text

    def restore_arguments(self, parsed: Any, schema: dict[str, Any] | None) -> Any:
        """Replace the placeholders in parsed arguments, converted as the tool's schema declares."""
        if not isinstance(parsed, dict):
            return parsed
        properties = ((schema or {}).get("function", {}).get("parameters") or {}).get("properties") or {}
        arguments = {}
        for name, value in parsed.items():
            if isinstance(value, str) and value.strip() in self.argument_texts:
                text = self.argument_texts[value.strip()]
                arguments[name] = coerce_argument(text, properties[name]) if properties.get(name) is not None else text
            else:
                arguments[name] = self._restore_literals(value)
        return arguments

    def _restore_literals(self, value: Any) -> Any:
        if isinstance(value, str):
            return self.literal_values.get(value, value)
        if isinstance(value, list):
            return [self._restore_literals(item) for item in value]
        if isinstance(value, dict):
            return {name: self._restore_literals(item) for name, item in value.items()}
        return value


def escape_text(text: str, schemas: Sequence[dict[str, Any]], parser: str, marker: str = "") -> EscapedText:
    """Escape a response for `parser`. marker: text by which SGLang recognizes a call; empty if there is none."""
    if parser == harmony.PARSER:
        text, marker = harmony.normalize_calls(text), harmony.CALL_OPENING
    if tags := _TAGS.get(parser):
        escaped = _escape_argument_texts(text, schemas, *tags)
    elif parser in _PYTHONIC:
        escaped = _escape_literals(text, schemas)
    else:
        escaped = _escape_json_strings(text, schemas, marker)
    names = "|".join(re.escape(schema["function"]["name"]) for schema in schemas)
    call_counts = [escaped.text.count(word) for word in (marker, _CALL_OPENINGS.get(parser, "")) if word]
    if parser in _PYTHONIC and names:
        call_counts.append(len(re.findall(rf"[\[,]\s*(?:{names})\(", escaped.text)))
    elif not call_counts and names:
        call_counts.append(int(bool(re.search(rf'\{{\s*"name"\s*:\s*"(?:{names})"', escaped.text))))
    return replace(escaped, num_calls=max(call_counts, default=0))


def _escape_argument_texts(text: str, schemas: Sequence[dict[str, Any]], opening: str, closing: str) -> EscapedText:
    """Replace argument texts by placeholders, which the returned schemas declare as strings."""
    originals: dict[str, str] = {}
    prefix = _unused_placeholder(text)

    def escape(match: re.Match[str]) -> str:
        originals[placeholder := f"{prefix}{len(originals)}X"] = match[2]
        return f"{match[1]}{placeholder}{match[3]}"

    pattern = re.compile(f"({opening})((?:(?!{opening}).)*?)({closing})", re.DOTALL)
    return EscapedText(
        pattern.sub(escape, text),
        [_with_string_arguments(schema) for schema in schemas],
        argument_texts=originals,
        originals=originals,
    )


def _escape_literals(text: str, schemas: Sequence[dict[str, Any]]) -> EscapedText:
    """Replace signed Python numbers and JSON's literal names by string placeholders."""
    values: dict[str, Any] = {}
    originals: dict[str, str] = {}
    prefix = _unused_placeholder(text)

    def escape(match: re.Match[str]) -> str:
        if match["quoted"]:
            return match[0]
        placeholder = f"{prefix}{len(values)}X"
        values[placeholder] = (
            _JSON_LITERALS[match["name"]] if match["name"] else ast.literal_eval(match["number"].replace(" ", ""))
        )
        originals[f'"{placeholder}"'] = match[0]
        return f'"{placeholder}"'

    return EscapedText(_LITERAL.sub(escape, text), list(schemas), literal_values=values, originals=originals)


def _escape_json_strings(text: str, schemas: Sequence[dict[str, Any]], marker: str) -> EscapedText:
    """Write `<` and `[` as escapes in strings of the JSON after a marker."""

    def escape(match: re.Match[str]) -> str:
        return match[0].replace("<", "\\u003c").replace("[", "\\u005b")

    position = text.find(marker) if marker else -1
    if position < 0:
        return EscapedText(text, list(schemas))
    parts, originals, decoder = [text[:position]], {}, json.JSONDecoder()
    for _ in range(_MAX_JSON_ATTEMPTS):
        opening = re.compile(r"[{\[]").search(text, position)
        if opening is None:
            break
        start = opening.start()
        try:
            _, end = decoder.raw_decode(text, start)
        except (ValueError, RecursionError):
            end = start + 1
        segment = text[start:end]
        escaped = segment if end == start + 1 else _STRING.sub(escape, segment)
        if escaped != segment:
            originals[escaped] = segment
        parts += [text[position:start], escaped]
        position = end
    return EscapedText("".join([*parts, text[position:]]), list(schemas), originals=originals)


def _with_string_arguments(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the tool's schema with all arguments declared as strings."""
    function = schema["function"]
    parameters = function.get("parameters") or {}
    strings = {**parameters, "properties": {name: {"type": "string"} for name in parameters.get("properties") or {}}}
    return {**schema, "function": {**function, "parameters": strings}}


def _unused_placeholder(text: str) -> str:
    """Return a placeholder prefix that does not occur in the text."""
    prefix = "ARGUMENT"
    while prefix in text:
        prefix += "Q"
    return prefix


@dataclass(frozen=True)
class ToolCall:
    """One call. arguments: as parsed from JSON, usually a dict."""

    name: str
    arguments: Any


@dataclass(frozen=True)
class ParsedResponse:
    """A response split into text and calls. `error` describes a call that could not be parsed."""

    text: str
    calls: tuple[ToolCall, ...] = ()
    error: str = ""


ParseFunction = Callable[[str, Sequence[dict[str, Any]]], Awaitable[ParsedResponse]]
"""(text, tool schemas) -> ParsedResponse"""


class ToolCallParser(Protocol):
    """An `EngineClient`, or a `sglang_parsers.ParserProcess`."""

    async def parse_tool_calls(
        self, text: str, tools: Sequence[dict[str, Any]], parser: str
    ) -> tuple[str, list[Any]] | None:
        """Return (text outside the calls, calls with `name` and `parameters`), or None if SGLang's parser failed."""
        ...


def make_parser(client: ToolCallParser, name: str, marker: str) -> ParseFunction:
    """Return a function that runs SGLang's parser `name` in the engine, on text that contains `marker`."""

    async def parse(text: str, schemas: Sequence[dict[str, Any]]) -> ParsedResponse:
        readable = harmony.normalize_calls(text) if name == harmony.PARSER else text
        if not schemas or (marker and marker not in readable):
            return ParsedResponse(text)
        return await _parse(client, name, text, schemas, marker)

    return parse


async def _parse(
    client: ToolCallParser, parser: str, text: str, schemas: Sequence[dict[str, Any]], marker: str
) -> ParsedResponse:
    escaped = escape_text(text, schemas, parser, marker)
    return build_response(text, schemas, escaped, await client.parse_tool_calls(escaped.text, escaped.schemas, parser))


def build_response(
    text: str,
    schemas: Sequence[dict[str, Any]],
    escaped: EscapedText,
    answer: tuple[str, Sequence[dict[str, Any]]] | None,
) -> ParsedResponse:
    """Build the response from SGLang's `answer` to the escaped text; None means that its parser failed.

    SGLang silently drops a call that it cannot parse, so fewer calls than the text begins are an error.
    """
    malformed = ParsedResponse(text, error="the tool call is malformed: it must be in the format of the instructions")
    if answer is None:
        return malformed
    normal_text, raw_calls = answer
    schema_by_name = {schema["function"]["name"]: schema for schema in schemas}
    calls: tuple[ToolCall, ...] = ()
    try:
        for call in raw_calls:
            name = replace_surrogates(str(call["name"]))
            arguments = escaped.restore_arguments(json.loads(call["parameters"] or "{}"), schema_by_name.get(name))
            calls += (ToolCall(name, replace_surrogates(arguments)),)
    except (ValueError, RecursionError):  # broken, or nested too deeply
        return malformed
    if escaped.num_calls > len(calls):
        return replace(malformed, calls=calls)
    return ParsedResponse(escaped.restore_text(normal_text) if calls else text, calls)


def parser_name(setting: str, hf: HFConfig) -> str:
    """Return the parser named by `rollout.tool_call_parser`, or the model family's if that is empty.

    Raises ConfigError for a parser that SGLang does not have.
    """
    if setting and tool_call_parsers() and setting not in tool_call_parsers():
        closest = closest_match(setting, tool_call_parsers())
        hint = f"did you mean {closest}? Leave it empty" if closest else "leave it empty"
        raise ConfigError(
            f"rollout.tool_call_parser={setting} is not a parser of SGLang; {hint} for that of the model's family"
        )
    return setting or family_of(hf).parser(hf)


def check_parser(
    chat: ChatTemplate,
    connection: AbstractAsyncContextManager[ToolCallParser],
    name: str,
    marker: str,
    is_family_default: bool = False,
) -> str:
    """Check that the engine's parser `name` reads each tool's call as this model's template writes it.

    connection: a client of the engine, not yet entered. is_family_default: the parser is the model family's, since
    none is configured. Returns the problem in one line, empty if there is none.
    """

    async def run_check() -> str:
        async with connection as client:
            return await find_misread_tool(chat, client, name, marker, is_family_default)

    try:
        return asyncio.run(run_check())
    except (ConfigError, RuntimeError) as error:
        return str(error)


async def find_misread_tool(
    chat: ChatTemplate, client: ToolCallParser, name: str, marker: str, is_family_default: bool
) -> str:
    """Run `check_parser` with a given client. Raises what `ChatTemplate.render_calls` and the client raise."""

    async def parses_tool(parser: str, tool: str) -> bool:
        for text, arguments in chat.render_calls(tool):
            schemas = [chat.tools[tool].schema]
            response = await _parse(client, parser, text, schemas, "")
            readable = harmony.normalize_calls(text) if parser == harmony.PARSER else text
            has_marker = parser != name or not marker or marker in readable
            if response.calls == (ToolCall(tool, arguments),) and has_marker:
                return True
        return False

    for tool in chat.tools:
        if await parses_tool(name, tool):
            continue
        alternatives = [other for other in tool_call_parsers() if await parses_tool(other, tool)]
        description = (
            f"{name}, the parser of the model's family," if is_family_default else f"rollout.tool_call_parser={name}"
        )
        advice = f"set rollout.tool_call_parser to {' or '.join(alternatives)}"
        return (
            f"{description} does not parse how the chat template of model.path calls the tool {tool}, "
            f"{chat.render_calls(tool)[0][0][:200]!r}; "
            + (advice if alternatives else "nor does any other parser of SGLang: use the model's own template")
        )
    return ""
