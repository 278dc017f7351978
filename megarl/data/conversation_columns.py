"""Finished conversations and pairs of answers in the columns that people have them in, as messages in the OpenAI form.

`README.md` has the table of these columns. What is not in it is a ConfigError that names the row, the column and what
could be done.
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
"""What the assistant's answer to a prompt is called: by verl, by TRL."""
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
"""Who speaks in ShareGPT's `from`, as a role."""
CALL_SPEAKERS = ("function_call", "tool_call")
_HH = re.compile(r"\n\n(Human|Assistant): ?")


def list_columns(row: dict[str, Any]) -> str:
    """The columns that a row has, for messages."""
    return ", ".join(name for name, value in row.items() if value is not None) or "none"


def check_text_only(row: dict[str, Any], where: str) -> None:
    """Raise ConfigError where the columns that verl, TRL and others have images, videos or sound in hold some."""
    for name in ("images", "videos", "audios"):
        if row.get(name):
            raise ConfigError(
                f"{where}: there are {name!r}; only text can be trained on: drop the row, or say in words what is in "
                "them and leave the column out"
            )


def row_id(row: dict[str, Any], where: str, name: str, default: str) -> str:
    """Of a row, by its column `id`, which is unique in a data set only and so goes after its name; or the default."""
    identity = row.get("id")
    if isinstance(identity, bool | list | dict):
        raise ConfigError(f"{where}: 'id' must be text or a number, not {str(identity)[:80]!r}")
    return default if identity is None else f"{name}-{identity}" if name else str(identity)


def row_source(row: dict[str, Any], where: str, name: str) -> str:
    """What figures of it are counted under: its column `data_source`, or else the name of the data set."""
    source = row.get("data_source")
    if isinstance(source, bool | list | dict):
        raise ConfigError(f"{where}: 'data_source' must be text or a number, not {str(source)[:80]!r}")
    return str(source or name)


def parse_conversation(
    row: dict[str, Any], where: str, prompt_key: str = "prompt", answer_key: str = ""
) -> tuple[Message, ...]:
    """The messages of a finished conversation, of whichever columns there are. answer_key: where it is none of those
    that answers are usually in."""
    if row.get("messages") is not None:
        return parse_chat_messages(_parse_list(row["messages"], where, "messages"), where, "messages")
    if row.get("conversations") is not None:
        talk = parse_sharegpt(_parse_list(row["conversations"], where, "conversations"), where, "conversations")
        system = row.get("system")  # as LLaMA-Factory has it
        return (({"role": "system", "content": system},) if isinstance(system, str) and system else ()) + talk
    answers = (answer_key,) if answer_key else RESPONSE_COLUMNS
    answer = next((name for name in answers if row.get(name) is not None), None)
    if row.get(prompt_key) is None or answer is None:
        raise ConfigError(
            f"{where} has no conversation: neither a list `messages` nor `conversations`, nor {prompt_key!r} with "
            f"{' or '.join(map(repr, answers))}; columns here: {list_columns(row)}; rename them, or set data.prompt_key and "
            "data.label_key to those of prompt and answer"
        )
    prompt = parse_chat_messages(row[prompt_key], where, prompt_key)
    return prompt + parse_chat_messages(row[answer], where, answer, role="assistant")


def parse_sharegpt(value: list[Any], where: str, key: str) -> tuple[Message, ...]:
    """Messages of `from` and `value`; others are let through. A call is the JSON of its name and arguments, or of a
    list of such."""
    return parse_chat_messages(
        [_convert_sharegpt(item, f"{where}: message {at} of {key!r}") for at, item in enumerate(value)], where, key
    )


def parse_answer(value: Any, where: str, key: str) -> tuple[Message, ...]:
    """An answer, or a whole chat that ends with one: messages, ShareGPT's, text, or a dialogue as Anthropic's HH has
    it, "\\n\\nHuman: ...\\n\\nAssistant: ..."."""
    if isinstance(value, str) and _HH.match(value):
        return _parse_hh_dialogue(value, where, key)
    if isinstance(value, dict):  # one message, as in RLHFlow's and LLaMA-Factory's pairs
        value = [value]
    if isinstance(value, list):
        return parse_sharegpt(value, where, key) if value else parse_chat_messages(value, where, key)
    return parse_chat_messages(value, where, key, role="assistant")


def _parse_list(value: Any, where: str, key: str) -> list[Any]:
    """A list, or the JSON of one."""
    if isinstance(value, str):
        try:
            value = replace_surrogates(json.loads(value))
        except (ValueError, RecursionError):
            pass
    if not isinstance(value, list):
        raise ConfigError(f"{where} has no list `{key}`, but {str(value)[:80]!r}; write its messages as a list")
    return value


def _convert_sharegpt(item: Any, where: str) -> Any:
    if not isinstance(item, dict) or "from" not in item:
        return item
    speaker, value = item["from"], item.get("value")
    if not isinstance(speaker, str) or speaker not in SHAREGPT_ROLES:
        known = ", ".join(SHAREGPT_ROLES)
        raise ConfigError(f"{where} is from {str(speaker)[:80]!r}; one of these it must be: {known}")
    if not isinstance(value, str):
        raise ConfigError(f"{where} has {str(value)[:80]!r} as value, which must be text")
    if speaker not in CALL_SPEAKERS:
        return {"role": SHAREGPT_ROLES[speaker], "content": value}
    try:
        calls = replace_surrogates(json.loads(value))
    except (ValueError, RecursionError):
        calls = None
    if isinstance(calls, dict):
        calls = [calls]
    if not isinstance(calls, list) or not calls:
        raise ConfigError(f'{where} calls {value[:80]!r}, not {{"name": ..., "arguments": ...}} or a list of such')
    whole = [call if "function" in call else {"type": "function", "function": call} for call in map(_as_call, calls)]
    return {"role": "assistant", "content": "", "tool_calls": whole}


def _as_call(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {"function": value}  # which is complained of where calls are checked


def _parse_hh_dialogue(text: str, where: str, key: str) -> tuple[Message, ...]:
    parts = _HH.split(text)[1:]  # speaker, words, speaker, words ...
    roles = {"Human": "user", "Assistant": "assistant"}
    messages = [
        {"role": roles[speaker], "content": words.strip()}
        for speaker, words in zip(parts[::2], parts[1::2], strict=True)
    ]
    return parse_chat_messages(messages, where, key)
