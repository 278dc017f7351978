"""What the policy asked for: SGLang's own parser for the model's format, and what to say where it finds nothing."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from megarl.rollout.client import Client


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


def parser(client: Client, name: str, marker: str) -> Parse:
    """SGLang's parser `name`, run by the engine. Text without `marker` holds no call and is not sent at all."""

    async def parse(text: str, schemas: Sequence[dict[str, Any]]) -> Reply:
        if not schemas or (marker and marker not in text):
            return Reply(text)
        return judge(text, marker, await client.parse_tool_calls(text, schemas, name))

    return parse


def judge(text: str, marker: str, answer: tuple[str, Sequence[dict[str, Any]]] | None) -> Reply:
    """The Reply to SGLang's answer, None where its parser choked.

    SGLang leaves out a call whose JSON is broken without a word, so what is marked as a call and not among those
    parsed is an error.
    """
    malformed = Reply(text, error="the tool call is malformed: it must be valid JSON in the format of the instructions")
    if answer is None:
        return malformed
    rest, found = answer
    try:
        calls = tuple(Call(str(call["name"]), json.loads(call["parameters"] or "{}")) for call in found)
    except ValueError:
        return malformed
    if marker and text.count(marker) > len(calls):
        return Reply(malformed.text, calls, malformed.error)
    return Reply(rest if calls else text, calls)
