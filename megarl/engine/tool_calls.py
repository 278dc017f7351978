"""Parse tool calls with SGLang's parser for the model's format, and explain to the policy what could not be parsed.

`escape_text` prevents SGLang's parsers from losing or misreading calls. Formats with tags (GLM, Qwen3-Coder, MiniMax, ...)
write an argument as bare text, whose type only the tool's schema knows; some parsers guess it, so that the text 1e5 for
a string becomes 100000.0. Such texts are replaced by placeholders before parsing, and converted by the schema
afterwards. In JSON formats, markers within strings are escaped, so that neither the parser nor the call counter
mistakes them for calls.
"""

from __future__ import annotations

import ast
import asyncio
import json
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from megarl.chat_format.chat_template import ChatTemplate
from megarl.config import ConfigError
from megarl.config.server_args import tool_call_parsers
from megarl.config.strict import closest_match
from megarl.engine.client import Client
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
"""Of each parser of bare texts: what opens an argument's text, and what closes it. DeepSeek's later formats have them
for strings alone."""
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
"""What begins each call, of parsers whose own word is for a section of several calls, or that have none."""
_PYTHONIC = ("pythonic", "lfm2")
_LITERAL = re.compile(
    r"""(?P<quoted>"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*')|(?<=[=\[,:(\s])(?:"""
    r"""(?P<number>[-+]\s?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)|(?P<name>true|false|null))(?=\s*[,)\]}])"""
)
_JSON_LITERALS: dict[str, Any] = {"true": True, "false": False, "null": None}
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
_MAX_JSON_ATTEMPTS = 50
"""So often at most JSON is looked for in a text, each time from end to end."""


@dataclass(frozen=True)
class EscapedText:
    """A text of the policy's that a parser may be given, and what it takes to read the calls that come of it.

    text, schemas: for the parser. calls: how many the text begins, as far as that can be seen. texts: by word, what an
    argument's text was; values: by word, what a literal stands for; sources: what is to be put back into text that is
    in no call.
    """

    text: str
    schemas: list[dict[str, Any]]
    num_calls: int = 0
    argument_texts: dict[str, str] = field(default_factory=dict)
    literal_values: dict[str, Any] = field(default_factory=dict)
    originals: dict[str, str] = field(default_factory=dict)

    def restore_text(self, text: str) -> str:
        """What a parser left of the text, in the policy's words."""
        for word, source in self.originals.items():
            text = text.replace(word, source)
        return text

    def restore_arguments(self, parsed: Any, schema: dict[str, Any] | None) -> Any:
        """What a parser read, with the policy's texts as the tool's schema declares them."""
        if not isinstance(parsed, dict):
            return parsed
        properties = ((schema or {}).get("function", {}).get("parameters") or {}).get("properties") or {}
        return {name: self._restore_argument(value, properties.get(name)) for name, value in parsed.items()}

    def _restore_argument(self, value: Any, declared: dict[str, Any] | None) -> Any:
        if isinstance(value, str) and value.strip() in self.argument_texts:
            text = self.argument_texts[value.strip()]
            return text if declared is None else coerce_argument(text, declared)
        return self._restore_literals(value)

    def _restore_literals(self, value: Any) -> Any:
        if isinstance(value, str):
            return self.literal_values.get(value, value)
        if isinstance(value, list):
            return [self._restore_literals(item) for item in value]
        if isinstance(value, dict):
            return {name: self._restore_literals(item) for name, item in value.items()}
        return value


def escape_text(text: str, schemas: Sequence[dict[str, Any]], parser: str, marker: str = "") -> EscapedText:
    """marker: SGLang's word for a call; empty where there is none."""
    if tags := _TAGS.get(parser):
        found = _escape_argument_texts(text, schemas, *tags)
    elif parser in _PYTHONIC:
        found = _escape_literals(text, schemas)
    else:
        found = _escape_json_strings(text, schemas, marker)
    names = "|".join(re.escape(schema["function"]["name"]) for schema in schemas)
    begun = [found.text.count(word) for word in (marker, _CALL_OPENINGS.get(parser, "")) if word]
    if parser in _PYTHONIC and names:
        begun.append(len(re.findall(rf"[\[,]\s*(?:{names})\(", found.text)))
    elif not begun and names:
        begun.append(int(bool(re.search(rf'\{{\s*"name"\s*:\s*"(?:{names})"', found.text))))
    return EscapedText(
        found.text, found.schemas, max(begun, default=0), found.argument_texts, found.literal_values, found.originals
    )


def _escape_argument_texts(text: str, schemas: Sequence[dict[str, Any]], opening: str, closing: str) -> EscapedText:
    """Argument texts become words, of which the schemas say that they are strings."""
    texts: dict[str, str] = {}
    word = _unused_placeholder(text)

    def put(found: re.Match[str]) -> str:
        texts[name := f"{word}{len(texts)}X"] = found[2]
        return f"{found[1]}{name}{found[3]}"

    pattern = re.compile(f"({opening})((?:(?!{opening}).)*?)({closing})", re.DOTALL)
    return EscapedText(
        pattern.sub(put, text),
        [_with_string_arguments(schema) for schema in schemas],
        argument_texts=texts,
        originals=texts,
    )


def _escape_literals(text: str, schemas: Sequence[dict[str, Any]]) -> EscapedText:
    """Python's numbers with a sign, and JSON's names, become strings."""
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    word = _unused_placeholder(text)

    def put(found: re.Match[str]) -> str:
        if found["quoted"]:
            return found[0]
        name = f"{word}{len(values)}X"
        values[name] = (
            _JSON_LITERALS[found["name"]] if found["name"] else ast.literal_eval(found["number"].replace(" ", ""))
        )
        sources[f'"{name}"'] = found[0]
        return f'"{name}"'

    return EscapedText(_LITERAL.sub(put, text), list(schemas), literal_values=values, originals=sources)


def _escape_json_strings(text: str, schemas: Sequence[dict[str, Any]], marker: str) -> EscapedText:
    """In strings of the JSON behind a marker, `<` and `[` are written as escapes."""
    place = text.find(marker) if marker else -1
    if place < 0:
        return EscapedText(text, list(schemas))
    done, sources, decoder = [text[:place]], {}, json.JSONDecoder()
    for _ in range(_MAX_JSON_ATTEMPTS):
        opening = re.compile(r"[{\[]").search(text, place)
        if opening is None:
            break
        start = opening.start()
        try:
            _, end = decoder.raw_decode(text, start)
        except (ValueError, RecursionError):
            end = start + 1
        source = text[start:end]
        escaped = source if end == start + 1 else _STRING.sub(_escape_string, source)
        if escaped != source:
            sources[escaped] = source
        done += [text[place:start], escaped]
        place = end
    return EscapedText("".join([*done, text[place:]]), list(schemas), originals=sources)


def _escape_string(string: re.Match[str]) -> str:
    return string[0].replace("<", "\\u003c").replace("[", "\\u005b")


def _with_string_arguments(schema: dict[str, Any]) -> dict[str, Any]:
    """The same tool, all of whose arguments are strings."""
    function = schema["function"]
    parameters = function.get("parameters") or {}
    names = parameters.get("properties") or {}
    strings = {**parameters, "properties": {name: {"type": "string"} for name in names}}
    return {**schema, "function": {**function, "parameters": strings}}


def _unused_placeholder(text: str) -> str:
    """The beginning of words that are not in the text."""
    word = "ARGUMENT"
    while word in text:
        word += "Q"
    return word


@dataclass(frozen=True)
class ToolCall:
    """name: of the tool; arguments: as parsed from JSON, usually a dict."""

    name: str
    arguments: Any


@dataclass(frozen=True)
class ParsedResponse:
    """A turn of the policy, taken apart. `error` says what is wrong with a call that could not be read."""

    text: str
    calls: tuple[ToolCall, ...] = ()
    error: str = ""


ParseFunction = Callable[[str, Sequence[dict[str, Any]]], Awaitable[ParsedResponse]]
"""(text, tool schemas) -> Reply"""


class ToolCallParser(Protocol):
    """An engine's `Client`, or `parsing.ParserProcess`."""

    async def parse_tool_calls(
        self, text: str, tools: Sequence[dict[str, Any]], parser: str
    ) -> tuple[str, list[Any]] | None:
        """(text outside the calls, calls with `name` and `parameters`), or None where SGLang's parser choked."""
        ...


def make_parser(client: ToolCallParser, name: str, marker: str) -> ParseFunction:
    """SGLang's parser `name`, run by the engine. Text without `marker` holds no call and is not sent at all."""

    async def parse(text: str, schemas: Sequence[dict[str, Any]]) -> ParsedResponse:
        if not schemas or (marker and marker not in text):
            return ParsedResponse(text)
        return await _parse(client, name, text, schemas, marker)

    return parse


async def _parse(
    client: ToolCallParser, parser: str, text: str, schemas: Sequence[dict[str, Any]], marker: str
) -> ParsedResponse:
    guarded = escape_text(text, schemas, parser, marker)
    return build_response(text, schemas, guarded, await client.parse_tool_calls(guarded.text, guarded.schemas, parser))


def build_response(
    text: str,
    schemas: Sequence[dict[str, Any]],
    guarded: EscapedText,
    answer: tuple[str, Sequence[dict[str, Any]]] | None,
) -> ParsedResponse:
    """The Reply to what SGLang says of the guarded text, None where its parser choked.

    SGLang leaves out a call that it cannot read without a word, so what begins like a call and is not among those
    parsed is an error.
    """
    malformed = ParsedResponse(text, error="the tool call is malformed: it must be in the format of the instructions")
    if answer is None:
        return malformed
    rest, found = answer
    known = {schema["function"]["name"]: schema for schema in schemas}
    try:
        calls = tuple(_restore_call(call["name"], call["parameters"], guarded, known) for call in found)
    except (ValueError, RecursionError):  # broken, or nested too deeply
        return malformed
    if guarded.num_calls > len(calls):
        return ParsedResponse(malformed.text, calls, malformed.error)
    return ParsedResponse(guarded.restore_text(rest) if calls else text, calls)


def _restore_call(name: Any, parameters: str, guarded: EscapedText, known: Mapping[str, dict[str, Any]]) -> ToolCall:
    called = replace_surrogates(str(name))
    return ToolCall(
        called, replace_surrogates(guarded.restore_arguments(json.loads(parameters or "{}"), known.get(called)))
    )


def parser_name(setting: str, hf: HFConfig) -> str:
    """The parser that `rollout.tool_call_parser` names, or the family's where it is empty. Raises ConfigError for one
    that SGLang does not have."""
    if setting and tool_call_parsers() and setting not in tool_call_parsers():
        near = closest_match(setting, tool_call_parsers())
        hint = f"did you mean {near}? Leave it empty" if near else "leave it empty"
        raise ConfigError(
            f"rollout.tool_call_parser={setting} is no parser of SGLang's; {hint} for that of the model's family"
        )
    return setting or family_of(hf).parser(hf)


def check_parser(
    chat: ChatTemplate, url: str, api_key: str, name: str, marker: str, timeout: float, of_family: bool = False
) -> str:
    """What is wrong with calls of the tools between this model's template and the engine's parser `name`, in one line;
    empty if nothing is. Each tool is called once as the template writes it: the parser must read the same call.
    of_family: it is the parser of the model's family, for nobody has set another."""

    async def ask() -> str:
        async with Client(url, api_key, timeout) as client:
            return await find_misread_tool(chat, client, name, marker, of_family)

    try:
        return asyncio.run(ask())
    except (ConfigError, RuntimeError) as error:
        return str(error)


async def find_misread_tool(chat: ChatTemplate, client: ToolCallParser, name: str, marker: str, of_family: bool) -> str:
    """As `check_parser`. Raises ConfigError as `ChatTemplate.render_calls` does, and what the client raises."""

    async def reads(parser: str, tool: str) -> bool:
        for text, arguments in chat.render_calls(tool):
            schemas = [chat.tools[tool].schema]
            found = await _parse(client, parser, text, schemas, "")
            marked = parser != name or not marker or marker in text
            if found.calls == (ToolCall(tool, arguments),) and marked:
                return True
        return False

    for tool in chat.tools:
        if await reads(name, tool):
            continue
        others = [make_parser for make_parser in tool_call_parsers() if await reads(make_parser, tool)]
        which = f"{name}, the parser of the model's family," if of_family else f"rollout.tool_call_parser={name}"
        advice = f"set rollout.tool_call_parser to {' or '.join(others)}"
        return (
            f"{which} does not read how the chat template of model.path calls the tool {tool}, "
            f"{chat.render_calls(tool)[0][0][:200]!r}; "
            + (advice if others else "no other of SGLang's parsers does either: use the template of the model")
        )
    return ""
