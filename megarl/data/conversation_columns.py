"""Parse finished conversations and preference pairs from the columns in common use to OpenAI-style messages.

`README.md` has the table of these columns. Anything else is a ConfigError that names the row, the column and a remedy.
"""

from __future__ import annotations

import json
import re
from typing import Any

from megarl.config import ConfigError
from megarl.data.chat_columns import parse_chat_messages
from megarl.types import Message
from megarl.utils.text import replace_surrogates

RESPONSE_COLUMNS = ("response", "completion")
"""Columns of the assistant's answer to a prompt, as in verl and TRL."""
SHAREGPT_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "tool_call": "assistant",
    "observation": "tool",
    "function_response": "tool",
    "tool_response": "tool",
    "tool": "tool",
}
"""Role of each speaker in ShareGPT's `from`."""
CALL_SPEAKERS = ("function_call", "tool_call")
_HH = re.compile(r"\n\n(Human|Assistant): ?")


def list_columns(row: dict[str, Any]) -> str:
    """List the columns of a row, for error messages."""
    return ", ".join(name for name, value in row.items() if value is not None) or "none"


def check_text_only(row: dict[str, Any], location: str) -> None:
    """Raise ConfigError if a column for images, videos or audio, as in verl and TRL, is not empty."""
    for name in ("images", "videos", "audios"):
        if row.get(name):
            raise ConfigError(
                f"{location}: there are {name!r}; only text can be trained on: drop the row, or say in words what is "
                "in them and leave the column out"
            )


def row_id(row: dict[str, Any], location: str, name: str, default: str) -> str:
    """Return a row's id: its column `id`, or the default.

    The column is prefixed by the data set's name, since ids are unique only within a data set.
    """
    identity = row.get("id")
    if isinstance(identity, bool | list | dict):
        raise ConfigError(f"{location}: 'id' must be text or a number, not {str(identity)[:80]!r}")
    return default if identity is None else f"{name}-{identity}" if name else str(identity)


def row_source(row: dict[str, Any], location: str, name: str) -> str:
    """Return the source under which metrics count a row: its column `data_source`, or the name of the data set."""
    source = row.get("data_source")
    if isinstance(source, bool | list | dict):
        raise ConfigError(f"{location}: 'data_source' must be text or a number, not {str(source)[:80]!r}")
    return str(source or name)


def parse_conversation(
    row: dict[str, Any], location: str, prompt_key: str = "prompt", answer_key: str = ""
) -> tuple[Message, ...]:
    """Return the messages of a finished conversation from the columns that the row has.

    answer_key: column of the answer, if it is not one of `RESPONSE_COLUMNS`.
    """
    if row.get("messages") is not None:
        return parse_chat_messages(_parse_list(row["messages"], location, "messages"), location, "messages")
    if row.get("conversations") is not None:
        conversation = parse_sharegpt(
            _parse_list(row["conversations"], location, "conversations"), location, "conversations"
        )
        system = row.get("system")  # as in LLaMA-Factory
        return (({"role": "system", "content": system},) if isinstance(system, str) and system else ()) + conversation
    answers = (answer_key,) if answer_key else RESPONSE_COLUMNS
    answer = next((name for name in answers if row.get(name) is not None), None)
    if row.get(prompt_key) is None or answer is None:
        raise ConfigError(
            f"{location} has no conversation: neither a list `messages` nor `conversations`, nor {prompt_key!r} with "
            f"{' or '.join(map(repr, answers))}; columns here: {list_columns(row)}; rename them, or set "
            "data.prompt_key and "
            "data.label_key to those of prompt and answer"
        )
    prompt = parse_chat_messages(row[prompt_key], location, prompt_key)
    return prompt + parse_chat_messages(row[answer], location, answer, role="assistant")


def parse_sharegpt(value: list[Any], location: str, key: str) -> tuple[Message, ...]:
    """Convert items with `from` and `value` to messages; other items pass through.

    A call is the JSON of its name and arguments, or of a list of such.
    """
    return parse_chat_messages(
        [_convert_sharegpt(item, f"{location}: message {at} of {key!r}") for at, item in enumerate(value)],
        location,
        key,
    )


def parse_answer(value: Any, location: str, key: str) -> tuple[Message, ...]:
    r"""Parse an answer, or a whole chat that ends with one.

    Accepts messages, ShareGPT's, text, or a dialogue of Anthropic's HH, "\n\nHuman: ...\n\nAssistant: ...".
    """
    if isinstance(value, str) and _HH.match(value):
        return _parse_hh_dialogue(value, location, key)
    if isinstance(value, dict):  # one message, as in RLHFlow's and LLaMA-Factory's pairs
        value = [value]
    if isinstance(value, list):
        return parse_sharegpt(value, location, key) if value else parse_chat_messages(value, location, key)
    return parse_chat_messages(value, location, key, role="assistant")


def _parse_list(value: Any, location: str, key: str) -> list[Any]:
    """Return a list, or parse the JSON of one."""
    if isinstance(value, str):
        try:
            value = replace_surrogates(json.loads(value))
        except (ValueError, RecursionError):
            pass
    if not isinstance(value, list):
        raise ConfigError(f"{location} has no list `{key}`, but {str(value)[:80]!r}; write its messages as a list")
    return value


def _convert_sharegpt(item: Any, location: str) -> Any:
    if not isinstance(item, dict) or "from" not in item:
        return item
    speaker, value = item["from"], item.get("value")
    if not isinstance(speaker, str) or speaker not in SHAREGPT_ROLES:
        speakers = ", ".join(SHAREGPT_ROLES)
        raise ConfigError(f"{location} is from {str(speaker)[:80]!r}; one of these it must be: {speakers}")
    if not isinstance(value, str):
        raise ConfigError(f"{location} has {str(value)[:80]!r} as value, which must be text")
    if speaker not in CALL_SPEAKERS:
        return {"role": SHAREGPT_ROLES[speaker], "content": value}
    try:
        calls = replace_surrogates(json.loads(value))
    except (ValueError, RecursionError):
        calls = None
    if isinstance(calls, dict):
        calls = [calls]
    if not isinstance(calls, list) or not calls:
        raise ConfigError(f'{location} calls {value[:80]!r}, not {{"name": ..., "arguments": ...}} or a list of such')
    tool_calls = [
        call if "function" in call else {"type": "function", "function": call} for call in map(_as_call, calls)
    ]
    return {"role": "assistant", "content": "", "tool_calls": tool_calls}


def _as_call(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {"function": value}  # rejected where calls are checked


def _parse_hh_dialogue(text: str, location: str, key: str) -> tuple[Message, ...]:
    parts = _HH.split(text)[1:]  # speaker, words, speaker, words ...
    roles = {"Human": "user", "Assistant": "assistant"}
    messages = [
        {"role": roles[speaker], "content": content.strip()}
        for speaker, content in zip(parts[::2], parts[1::2], strict=True)
    ]
    return parse_chat_messages(messages, location, key)
