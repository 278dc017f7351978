"""What the policy asked for: SGLang's own parser for the model's format, and what to say where it finds nothing."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from megarl.config import ConfigError
from megarl.data.text import encodable
from megarl.models.family import HFConfig
from megarl.models.registry import family_of
from megarl.rollout.call_formats import Guarded, guard
from megarl.rollout.chat import Chat
from megarl.rollout.client import Client
from megarl.rollout.server_args import parsers
from megarl.strict import nearest


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
