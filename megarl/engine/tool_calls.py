"""Parse tool calls with SGLang's parser for the model's format, and explain to the policy what could not be parsed.

`guard` prevents SGLang's parsers from losing or misreading calls. Formats with tags (GLM, Qwen3-Coder, MiniMax, ...)
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

from megarl.chat_format.chat_template import Chat
from megarl.config import ConfigError
from megarl.config.server_args import parsers
from megarl.config.strict import nearest
from megarl.engine.client import Client
from megarl.environments.tools import coerced
from megarl.models.family import HFConfig
from megarl.models.registry import family_of
from megarl.utils.text import encodable

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
_BEGINS: dict[str, str] = {
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
_NAMES: dict[str, Any] = {"true": True, "false": False, "null": None}
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
_MOST_TRIES = 50
"""So often at most JSON is looked for in a text, each time from end to end."""


@dataclass(frozen=True)
class Guarded:
    """A text of the policy's that a parser may be given, and what it takes to read the calls that come of it.

    text, schemas: for the parser. calls: how many the text begins, as far as that can be seen. texts: by word, what an
    argument's text was; values: by word, what a literal stands for; sources: what is to be put back into text that is
    in no call.
    """

    text: str
    schemas: list[dict[str, Any]]
    calls: int = 0
    texts: dict[str, str] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)

    def rest(self, text: str) -> str:
        """What a parser left of the text, in the policy's words."""
        for word, source in self.sources.items():
            text = text.replace(word, source)
        return text

    def arguments(self, parsed: Any, schema: dict[str, Any] | None) -> Any:
        """What a parser read, with the policy's texts as the tool's schema declares them."""
        if not isinstance(parsed, dict):
            return parsed
        properties = ((schema or {}).get("function", {}).get("parameters") or {}).get("properties") or {}
        return {name: self._argument(value, properties.get(name)) for name, value in parsed.items()}

    def _argument(self, value: Any, declared: dict[str, Any] | None) -> Any:
        if isinstance(value, str) and value.strip() in self.texts:
            text = self.texts[value.strip()]
            return text if declared is None else coerced(text, declared)
        return self._valued(value)

    def _valued(self, value: Any) -> Any:
        if isinstance(value, str):
            return self.values.get(value, value)
        if isinstance(value, list):
            return [self._valued(item) for item in value]
        if isinstance(value, dict):
            return {name: self._valued(item) for name, item in value.items()}
        return value


def guard(text: str, schemas: Sequence[dict[str, Any]], parser: str, marker: str = "") -> Guarded:
    """marker: SGLang's word for a call; empty where there is none."""
    if tags := _TAGS.get(parser):
        found = _guard_texts(text, schemas, *tags)
    elif parser in _PYTHONIC:
        found = _guard_literals(text, schemas)
    else:
        found = _guard_json(text, schemas, marker)
    names = "|".join(re.escape(schema["function"]["name"]) for schema in schemas)
    begun = [found.text.count(word) for word in (marker, _BEGINS.get(parser, "")) if word]
    if parser in _PYTHONIC and names:
        begun.append(len(re.findall(rf"[\[,]\s*(?:{names})\(", found.text)))
    elif not begun and names:
        begun.append(int(bool(re.search(rf'\{{\s*"name"\s*:\s*"(?:{names})"', found.text))))
    return Guarded(found.text, found.schemas, max(begun, default=0), found.texts, found.values, found.sources)


def _guard_texts(text: str, schemas: Sequence[dict[str, Any]], opening: str, closing: str) -> Guarded:
    """Argument texts become words, of which the schemas say that they are strings."""
    texts: dict[str, str] = {}
    word = _unused(text)

    def put(found: re.Match[str]) -> str:
        texts[name := f"{word}{len(texts)}X"] = found[2]
        return f"{found[1]}{name}{found[3]}"

    pattern = re.compile(f"({opening})((?:(?!{opening}).)*?)({closing})", re.DOTALL)
    return Guarded(pattern.sub(put, text), [_of_strings(schema) for schema in schemas], texts=texts, sources=texts)


def _guard_literals(text: str, schemas: Sequence[dict[str, Any]]) -> Guarded:
    """Python's numbers with a sign, and JSON's names, become strings."""
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    word = _unused(text)

    def put(found: re.Match[str]) -> str:
        if found["quoted"]:
            return found[0]
        name = f"{word}{len(values)}X"
        values[name] = _NAMES[found["name"]] if found["name"] else ast.literal_eval(found["number"].replace(" ", ""))
        sources[f'"{name}"'] = found[0]
        return f'"{name}"'

    return Guarded(_LITERAL.sub(put, text), list(schemas), values=values, sources=sources)


def _guard_json(text: str, schemas: Sequence[dict[str, Any]], marker: str) -> Guarded:
    """In strings of the JSON behind a marker, `<` and `[` are written as escapes."""
    place = text.find(marker) if marker else -1
    if place < 0:
        return Guarded(text, list(schemas))
    done, sources, decoder = [text[:place]], {}, json.JSONDecoder()
    for _ in range(_MOST_TRIES):
        opening = re.compile(r"[{\[]").search(text, place)
        if opening is None:
            break
        start = opening.start()
        try:
            _, end = decoder.raw_decode(text, start)
        except (ValueError, RecursionError):
            end = start + 1
        source = text[start:end]
        escaped = source if end == start + 1 else _STRING.sub(_escaped, source)
        if escaped != source:
            sources[escaped] = source
        done += [text[place:start], escaped]
        place = end
    return Guarded("".join([*done, text[place:]]), list(schemas), sources=sources)


def _escaped(string: re.Match[str]) -> str:
    return string[0].replace("<", "\\u003c").replace("[", "\\u005b")


def _of_strings(schema: dict[str, Any]) -> dict[str, Any]:
    """The same tool, all of whose arguments are strings."""
    function = schema["function"]
    parameters = function.get("parameters") or {}
    names = parameters.get("properties") or {}
    strings = {**parameters, "properties": {name: {"type": "string"} for name in names}}
    return {**schema, "function": {**function, "parameters": strings}}


def _unused(text: str) -> str:
    """The beginning of words that are not in the text."""
    word = "ARGUMENT"
    while word in text:
        word += "Q"
    return word


@dataclass(frozen=True)
class Call:
    """name: of the tool; arguments: as parsed from JSON, usually a dict."""

    name: str
    arguments: Any


@dataclass(frozen=True)
class Reply:
    """A turn of the policy, taken apart. `error` says what is wrong with a call that could not be read."""

    text: str
    calls: tuple[Call, ...] = ()
    error: str = ""


Parse = Callable[[str, Sequence[dict[str, Any]]], Awaitable[Reply]]
"""(text, tool schemas) -> Reply"""


class Parser(Protocol):
    """An engine's `Client`, or `parsing.Parsing`."""

    async def parse_tool_calls(
        self, text: str, tools: Sequence[dict[str, Any]], parser: str
    ) -> tuple[str, list[Any]] | None:
        """(text outside the calls, calls with `name` and `parameters`), or None where SGLang's parser choked."""
        ...


def parser(client: Parser, name: str, marker: str) -> Parse:
    """SGLang's parser `name`, run by the engine. Text without `marker` holds no call and is not sent at all."""

    async def parse(text: str, schemas: Sequence[dict[str, Any]]) -> Reply:
        if not schemas or (marker and marker not in text):
            return Reply(text)
        return await _ask(client, name, text, schemas, marker)

    return parse


async def _ask(client: Parser, parser: str, text: str, schemas: Sequence[dict[str, Any]], marker: str) -> Reply:
    guarded = guard(text, schemas, parser, marker)
    return judge(text, schemas, guarded, await client.parse_tool_calls(guarded.text, guarded.schemas, parser))


def judge(
    text: str,
    schemas: Sequence[dict[str, Any]],
    guarded: Guarded,
    answer: tuple[str, Sequence[dict[str, Any]]] | None,
) -> Reply:
    """The Reply to what SGLang says of the guarded text, None where its parser choked.

    SGLang leaves out a call that it cannot read without a word, so what begins like a call and is not among those
    parsed is an error.
    """
    malformed = Reply(text, error="the tool call is malformed: it must be in the format of the instructions")
    if answer is None:
        return malformed
    rest, found = answer
    known = {schema["function"]["name"]: schema for schema in schemas}
    try:
        calls = tuple(_call(call["name"], call["parameters"], guarded, known) for call in found)
    except (ValueError, RecursionError):  # broken, or nested too deeply
        return malformed
    if guarded.calls > len(calls):
        return Reply(malformed.text, calls, malformed.error)
    return Reply(guarded.rest(rest) if calls else text, calls)


def _call(name: Any, parameters: str, guarded: Guarded, known: Mapping[str, dict[str, Any]]) -> Call:
    called = encodable(str(name))
    return Call(called, encodable(guarded.arguments(json.loads(parameters or "{}"), known.get(called))))


def parser_name(setting: str, hf: HFConfig) -> str:
    """The parser that `rollout.tool_call_parser` names, or the family's where it is empty. Raises ConfigError for one
    that SGLang does not have."""
    if setting and parsers() and setting not in parsers():
        near = nearest(setting, parsers())
        hint = f"did you mean {near}? Leave it empty" if near else "leave it empty"
        raise ConfigError(
            f"rollout.tool_call_parser={setting} is no parser of SGLang's; {hint} for that of the model's family"
        )
    return setting or family_of(hf).parser(hf)


def rehearse(
    chat: Chat, url: str, api_key: str, name: str, marker: str, timeout: float, of_family: bool = False
) -> str:
    """What is wrong with calls of the tools between this model's template and the engine's parser `name`, in one line;
    empty if nothing is. Each tool is called once as the template writes it: the parser must read the same call.
    of_family: it is the parser of the model's family, for nobody has set another."""

    async def ask() -> str:
        async with Client(url, api_key, timeout) as client:
            return await misread(chat, client, name, marker, of_family)

    try:
        return asyncio.run(ask())
    except (ConfigError, RuntimeError) as error:
        return str(error)


async def misread(chat: Chat, client: Parser, name: str, marker: str, of_family: bool) -> str:
    """As `rehearse`. Raises ConfigError as `Chat.calls` does, and what the client raises."""

    async def reads(parser: str, tool: str) -> bool:
        for text, arguments in chat.calls(tool):
            schemas = [chat.tools[tool].schema]
            found = await _ask(client, parser, text, schemas, "")
            marked = parser != name or not marker or marker in text
            if found.calls == (Call(tool, arguments),) and marked:
                return True
        return False

    for tool in chat.tools:
        if await reads(name, tool):
            continue
        others = [parser for parser in parsers() if await reads(parser, tool)]
        which = f"{name}, the parser of the model's family," if of_family else f"rollout.tool_call_parser={name}"
        advice = f"set rollout.tool_call_parser to {' or '.join(others)}"
        return (
            f"{which} does not read how the chat template of model.path calls the tool {tool}, "
            f"{chat.calls(tool)[0][0][:200]!r}; "
            + (advice if others else "no other of SGLang's parsers does either: use the template of the model")
        )
    return ""
