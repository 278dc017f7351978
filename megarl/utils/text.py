"""Text that can be encoded: what comes from a file, a tool or a policy's JSON may hold halves of a character."""

from __future__ import annotations

from typing import Any

MAX_DEPTH = 100
"""Of lists and objects inside of each other. Python's own JSON stops near a thousand, depending on who asks."""

_MEDIA_TYPES = ("image_url", "image", "input_audio", "audio", "video_url", "video", "file")


def find_media_type(value: Any) -> str:
    """The kind of the first part of what a tool returned that is no text, in OpenAI's or MCP's form; "" if all are."""
    for part in value if isinstance(value, list) else [value]:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind in _MEDIA_TYPES and {kind, "data", "source"} & part.keys():
            return str(kind)
    return ""


def replace_surrogates(value: Any, levels: int = MAX_DEPTH) -> Any:
    """The value, as of JSON, with U+FFFD for every lone surrogate in its texts, such as of an emoji cut in half, which
    neither a tokenizer nor a file can take. Surrogates that make a pair become the character that they mean.

    Raises ValueError for what is nested more than `levels` deep.
    """
    if isinstance(value, str):
        if value.isascii():
            return value
        try:
            value.encode()
            return value
        except UnicodeEncodeError:
            return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if not isinstance(value, dict | list | tuple):
        return value
    if levels == 0:
        raise ValueError(f"it is nested more than {MAX_DEPTH} levels deep")
    if isinstance(value, dict):
        return {
            replace_surrogates(key, levels - 1): replace_surrogates(item, levels - 1) for key, item in value.items()
        }
    return type(value)([replace_surrogates(item, levels - 1) for item in value])
