"""Parse the columns of a row to OpenAI-style messages and tools: prompts, conversations and preference answers.

`README.md` has the table of the columns in common use. Anything else is a ConfigError that names the row, the column
and a remedy."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megarl.config import ConfigError
from megarl.types import IMAGE_PLACEHOLDER, Message
from megarl.utils.text import replace_surrogates

ROLES = ("system", "developer", "user", "assistant", "tool")


def parse_chat_messages(
    value: Any, location: str, key: str, role: str = "user", images: list[bytes | None] | None = None
) -> tuple[Message, ...]:
    """Parse the messages of a column: a list or its JSON; other text becomes one message of `role`.

    A message has a role and a content: text, or a list of text parts, which are joined. Only an assistant message with
    tool calls may lack content.

    images: gets the files of image parts, in order, which `IMAGE_PLACEHOLDER` replaces in the text, and None for a part
        that stands for an image of the column `images`, as in TRL; None rejects such parts.
    """
    if isinstance(value, str):
        if not value.strip() and role == "user":
            raise ConfigError(f"{location}: {key!r} is empty text; write a prompt or drop the row")
        messages = _parse_json(value) if value.lstrip().startswith("[") else None
        is_chat = isinstance(messages, list) and all(isinstance(item, dict) and "role" in item for item in messages)
        if not messages or not is_chat:
            return ({"role": role, "content": value},)
        value = messages
    if not isinstance(value, list) or not value:
        raise ConfigError(f"{location}: {key!r} must be text or a list of chat messages, not {_short(value)}")
    return tuple(
        _message(item, f"{location}: message {number} of {key!r}", images) for number, item in enumerate(value)
    )


def _parse_json(text: str) -> Any:
    """Parse a column of JSON text, as in tables without nested columns; None if it is not JSON."""
    try:
        return replace_surrogates(json.loads(text))
    except (ValueError, RecursionError):
        return None


def _message(value: Any, location: str, images: list[bytes | None] | None) -> Message:
    if not isinstance(value, dict) or not isinstance(value.get("role"), str):
        raise ConfigError(f"{location} is {_short(value)}, not a message with role and content")
    message = {name: item for name, item in value.items() if item is not None}
    role, content = message["role"], message.get("content")
    if role not in ROLES:
        raise ConfigError(f"{location} has the unknown role {role[:80]!r}; roles are {', '.join(ROLES)}")
    calls = message.pop("tool_calls", None) or []
    if calls:
        if role != "assistant":
            raise ConfigError(f"{location} has tool_calls, but role {role}; only the assistant calls tools")
        _check_calls(calls, location)
        message["tool_calls"] = calls
    if isinstance(content, list):
        content = content_text(content, location, images)
    if content is not None and not isinstance(content, str):
        raise ConfigError(f"{location} has {_short(content)} as content, which must be text")
    if not calls and (content is None or (role == "user" and not content.strip())):
        raise ConfigError(f"{location}, of role {role}, has no content; write it or drop the row")
    message["content"] = content
    return message


def content_text(parts: list[Any], location: str, images: list[bytes | None] | None = None) -> str:
    """Join text parts. Raises ConfigError, naming the kind, for a part of another kind.

    images: as for `parse_chat_messages`.
    """
    texts = []
    for part in parts:
        if images is not None and (is_image_part(part) or _is_bare_image_part(part)):
            images.append(read_image(part, location) if is_image_part(part) else None)
            texts.append(IMAGE_PLACEHOLDER)
            continue
        kind = part.get("type") if isinstance(part, dict) else None
        text = part["text"] if kind == "text" and isinstance(part.get("text"), str) else part
        if not isinstance(text, str):
            what = f"a part of type {str(kind)[:80]!r}" if kind not in (None, "text") else f"the part {_short(part)}"
            raise ConfigError(f"{location} holds {what}; only text can be trained on, {{'type': 'text', 'text': ...}}")
        texts.append(text)
    return "".join(texts)


def _check_calls(calls: Any, location: str) -> None:
    for call in calls if isinstance(calls, list) else [calls]:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
            raise ConfigError(f"{location} calls {_short(call)}, not {{'function': {{'name': ..., 'arguments': ...}}}}")
        if not isinstance(function.get("arguments", {}), str | dict):
            raise ConfigError(
                f"{location} calls {function['name'][:80]} with {_short(function['arguments'])}; arguments are an "
                "object, or its JSON as text"
            )
    if not isinstance(calls, list):
        raise ConfigError(f"{location} has tool_calls that are not a list")


def parse_tool_names(value: Any, location: str) -> tuple[str, ...]:
    """Parse the column `tools` of a prompt: names or schemas (only names count); a list, a single one, or its JSON."""
    names = []
    for tool in _list_of_tools(value):
        function = tool.get("function", tool) if isinstance(tool, dict) else {"name": tool}
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(name, str) or not name:
            raise ConfigError(f"{location}: 'tools' holds {_short(tool)}, neither a name nor a tool schema")
        names.append(name)
    return _check_unique(names, location)


def parse_tool_schemas(value: Any, location: str) -> list[dict[str, Any]]:
    """Parse the column `tools` of a conversation: OpenAI schemas, with or without the enclosing `function`."""
    schemas = []
    for tool in _list_of_tools(value):
        schema = tool if isinstance(tool, dict) and "function" in tool else {"type": "function", "function": tool}
        function = schema["function"]
        if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
            raise ConfigError(
                f"{location}: 'tools' holds {_short(tool)}, not a tool schema such as {{'type': 'function', "
                "'function': {'name': ..., 'parameters': {...}}}"
            )
        if not isinstance(function.get("parameters", {}), dict):
            raise ConfigError(f"{location}: the tool {function['name'][:80]} has parameters that are not an object")
        schemas.append(schema)
    _check_unique([schema["function"]["name"] for schema in schemas], location)
    return schemas


def _list_of_tools(value: Any) -> list[Any]:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            value = [value]
    return [] if value is None else value if isinstance(value, list) else [value]


def _check_unique(names: list[str], location: str) -> tuple[str, ...]:
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"{location}: 'tools' has {name[:80]!r} twice")
    return tuple(names)


def _short(value: Any) -> str:
    return repr(str(value)[:80])


RESPONSE_COLUMNS = ("response", "completion")
"""Columns of the assistant's answer to a prompt, as in verl and TRL."""
CALL_SPEAKERS = ("function_call", "tool_call")
SHAREGPT_ROLES = {
    "system": "system",
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "assistant", "model", *CALL_SPEAKERS), "assistant"),
    **dict.fromkeys(("observation", "function_response", "tool_response", "tool"), "tool"),
}
"""Role of each speaker in ShareGPT's `from`."""
_HH = re.compile(r"\n\n(Human|Assistant): ?")


def list_columns(row: dict[str, Any]) -> str:
    """List the columns of a row, for error messages."""
    return ", ".join(name for name, value in row.items() if value is not None) or "none"


IMAGE_PARTS = ("image", "image_url", "input_image")
"""Types of message parts that hold an image."""


def is_image_part(part: Any) -> bool:
    """Return whether a part of a message holds an image."""
    keys = ("image_url", "url", "image", "path", "bytes")
    return isinstance(part, dict) and part.get("type") in IMAGE_PARTS and any(part.get(key) for key in keys)


def _is_bare_image_part(part: Any) -> bool:
    """Return whether a part of a message stands for an image of the column `images`: it has nothing but its type."""
    return (
        isinstance(part, dict)
        and part.get("type") in IMAGE_PARTS
        and not any(part[key] for key in part if key != "type")
    )


def take_images(row: dict[str, Any], location: str) -> list[bytes]:
    """Remove the column `images`, as in verl and TRL, and return the files that it holds."""
    column = row.pop("images", None)
    if column is None or column == []:
        return []
    if isinstance(column, dict | str):
        column = [column]
    if not isinstance(column, list):
        raise ConfigError(f"{location}: 'images' is {_short(column)}, not a list of images")
    return [read_image(image, f"{location}: image {number} of 'images'") for number, image in enumerate(column)]


def read_image(value: Any, location: str) -> bytes:
    """Return the encoded file of an image: a path, a data URL, `{"bytes": ...}`, `{"path": ...}`, or a part of
    OpenAI's. Raises ConfigError.
    """
    while isinstance(value, dict):
        keys = ("bytes", "image_url", "url", "image", "path")
        key = next((key for key in keys if value.get(key) is not None), None)
        if key is None:
            raise ConfigError(f"{location} has none of {', '.join(keys)}: {_short(value)}")
        value = value[key]
        if key == "bytes" and isinstance(value, str):  # bytes of parquet become base64 in JSON
            value = f"data:image;base64,{value}"
    if isinstance(value, bytes):
        return value
    if not isinstance(value, str):
        raise ConfigError(f"{location} is {_short(value)}, not a path, a data URL or bytes")
    if value.startswith("data:"):
        head, _, payload = value.partition(",")
        try:
            if not head.endswith(";base64"):
                raise ValueError("it has no base64")
            return base64.b64decode(payload, validate=True)
        except ValueError as error:
            raise ConfigError(f"{location} is a data URL that cannot be decoded: {error}") from None
    if value.startswith(("http://", "https://")):
        raise ConfigError(f"{location} is the URL {value[:80]}; download it, and give its path or bytes")
    path = Path(value.removeprefix("file://"))
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{location}: cannot read {str(path)[:200]}: {error.strerror}") from None


def join_images(
    column: list[bytes], inline: Sequence[bytes | None], messages: Sequence[Message], location: str
) -> list[bytes]:
    """Return the images of messages. Raises ConfigError unless the messages have a placeholder for each of them, not in
    the assistant's words.

    column: of the column `images`. inline: of parts of the messages, see `parse_chat_messages`.
    """
    parts = [image for image in inline if image is not None]
    if column and parts:
        raise ConfigError(f"{location}: there are images in 'images' and in the messages; keep one of them")
    if len(parts) < len(inline) and not column:
        raise ConfigError(
            f"{location}: a part of type 'image' or 'image_url' has no image, and there is no column 'images'; add one"
        )
    images = column or parts
    if not images:
        return []
    num_placeholders = sum(count_placeholders(message) for message in messages)
    if num_placeholders != len(images):
        raise ConfigError(
            f"{location}: there are {len(images)} images, but {IMAGE_PLACEHOLDER} occurs {num_placeholders} times in "
            "the messages"
        )
    if any(message["role"] == "assistant" and count_placeholders(message) for message in messages):
        raise ConfigError(
            f"{location}: the assistant's words hold {IMAGE_PLACEHOLDER}, but the policy writes text alone"
        )
    return images


def count_placeholders(message: Message) -> int:
    return str(message.get("content") or "").count(IMAGE_PLACEHOLDER)


def check_media(row: dict[str, Any], location: str) -> None:
    """Raise ConfigError if a column for videos or audio, as in verl and TRL, is not empty."""
    for name in ("videos", "audios"):
        if row.get(name):
            raise ConfigError(
                f"{location}: there are {name!r}; only text and images can be trained on: drop the row, or describe "
                "them as text and omit the column"
            )


def row_id(row: dict[str, Any], location: str, name: str, default: str) -> str:
    """Return a row's id: its column `id`, or the default.

    The column is prefixed by the data set's name, since ids are unique only within a data set.
    """
    identity = _text_or_number(row, "id", location)
    return default if identity is None else f"{name}-{identity}" if name else str(identity)


def row_source(row: dict[str, Any], location: str, name: str) -> str:
    """Return the source under which metrics count a row: its column `data_source`, or the name of the data set."""
    return str(_text_or_number(row, "data_source", location) or name)


def _text_or_number(row: dict[str, Any], column: str, location: str) -> Any:
    value = row.get(column)
    if isinstance(value, bool | list | dict):
        raise ConfigError(f"{location}: {column!r} must be text or a number, not {_short(value)}")
    return value


def parse_conversation(
    row: dict[str, Any],
    location: str,
    prompt_key: str = "prompt",
    answer_key: str = "",
    images: list[bytes | None] | None = None,
) -> tuple[Message, ...]:
    """Return the messages of a finished conversation from the columns that the row has.

    answer_key: column of the answer, if it is not one of `RESPONSE_COLUMNS`. images: as for `parse_chat_messages`.
    """
    for key in ("messages", "conversations"):
        if row.get(key) is None:
            continue
        value = row[key]
        if isinstance(value, str):
            value = value if (parsed := _parse_json(value)) is None else parsed
        if not isinstance(value, list):
            raise ConfigError(f"{location} has no list `{key}`, but {_short(row[key])}; write its messages as a list")
        if key == "messages":
            return parse_chat_messages(value, location, key, images=images)
        system = row.get("system")  # as in LLaMA-Factory
        head = ({"role": "system", "content": system},) if isinstance(system, str) and system else ()
        return head + parse_sharegpt(value, location, key, images)
    answers = (answer_key,) if answer_key else RESPONSE_COLUMNS
    answer = next((name for name in answers if row.get(name) is not None), None)
    if row.get(prompt_key) is None or answer is None:
        raise ConfigError(
            f"{location} has no conversation: neither a list `messages` nor `conversations`, nor {prompt_key!r} with "
            f"{' or '.join(map(repr, answers))}; columns here: {list_columns(row)}; rename them, or set "
            "data.prompt_key and data.label_key to those of prompt and answer"
        )
    prompt = parse_chat_messages(row[prompt_key], location, prompt_key, images=images)
    return prompt + parse_chat_messages(row[answer], location, answer, role="assistant", images=images)


def parse_sharegpt(
    value: list[Any], location: str, key: str, images: list[bytes | None] | None = None
) -> tuple[Message, ...]:
    """Convert items with `from` and `value` to messages; other items pass through.

    A call is the JSON of its name and arguments, or of a list of such. images: as for `parse_chat_messages`.
    """
    messages = [_convert_sharegpt(item, f"{location}: message {at} of {key!r}") for at, item in enumerate(value)]
    return parse_chat_messages(messages, location, key, images=images)


def parse_answer(value: Any, location: str, key: str, images: list[bytes | None] | None = None) -> tuple[Message, ...]:
    r"""Parse an answer, or a whole chat that ends with one.

    Accepts messages, ShareGPT's, text, or a dialogue of Anthropic's HH, "\n\nHuman: ...\n\nAssistant: ...".

    images: as for `parse_chat_messages`.
    """
    if isinstance(value, str) and _HH.match(value):
        parts = _HH.split(value)[1:]  # speaker, words, speaker, words ...
        roles = {"Human": "user", "Assistant": "assistant"}
        dialogue = zip(parts[::2], parts[1::2], strict=True)
        value = [{"role": roles[speaker], "content": content.strip()} for speaker, content in dialogue]
        return parse_chat_messages(value, location, key)
    if isinstance(value, dict):  # one message, as in RLHFlow's and LLaMA-Factory's pairs
        value = [value]
    if isinstance(value, list):
        return parse_sharegpt(value, location, key, images) if value else parse_chat_messages(value, location, key)
    return parse_chat_messages(value, location, key, role="assistant", images=images)


def _convert_sharegpt(item: Any, location: str) -> Any:
    if not isinstance(item, dict) or "from" not in item:
        return item
    speaker, value = item["from"], item.get("value")
    if not isinstance(speaker, str) or speaker not in SHAREGPT_ROLES:
        speakers = ", ".join(SHAREGPT_ROLES)
        raise ConfigError(f"{location} is from {_short(speaker)}; must be one of: {speakers}")
    if not isinstance(value, str):
        raise ConfigError(f"{location} has {_short(value)} as value, which must be text")
    if speaker not in CALL_SPEAKERS:
        return {"role": SHAREGPT_ROLES[speaker], "content": value}
    calls = _parse_json(value)
    if isinstance(calls, dict):
        calls = [calls]
    if not isinstance(calls, list) or not calls:
        raise ConfigError(f'{location} calls {value[:80]!r}, not {{"name": ..., "arguments": ...}} or a list of such')
    # A call that is not an object is rejected where calls are checked.
    tool_calls = [
        call if isinstance(call, dict) and "function" in call else {"type": "function", "function": call}
        for call in calls
    ]
    return {"role": "assistant", "content": "", "tool_calls": tool_calls}
