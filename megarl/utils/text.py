"""Text: whole files, messages of one line, and strings that may contain lone surrogates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

MAX_DEPTH = 100
"""Maximum nesting of lists and objects. Python's own JSON fails near a thousand, depending on the caller's stack."""

_MEDIA_TYPES = ("image_url", "image", "input_audio", "audio", "video_url", "video", "file")


def find_media_type(value: Any) -> str:
    """Return the type of the first non-text part of a tool result in OpenAI or MCP format; "" if all parts are text."""
    for part in value if isinstance(value, list) else [value]:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind in _MEDIA_TYPES and {kind, "data", "source"} & part.keys():
            return str(kind)
    return ""


def one_line(error: BaseException, max_chars: int | None = None) -> str:
    """Return an error's message in one line, or its type if it has none."""
    return " ".join(str(error).split())[:max_chars] or type(error).__name__


def write_atomically(file: Path, text: str) -> None:
    """Write a file that appears at once and whole. A file that cannot be written is left as it was."""
    partial = file.with_name(f".{file.name}.tmp")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(file)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


def replace_surrogates(value: Any, max_depth: int = MAX_DEPTH) -> Any:
    """Return a JSON value with U+FFFD for every lone surrogate in its strings, keys included.

    Neither tokenizers nor files accept lone surrogates, such as half of an emoji. Surrogate pairs become the character
    that they encode. Raises ValueError if the value is nested more than `max_depth` deep.
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
    if max_depth == 0:
        raise ValueError(f"it is nested more than {MAX_DEPTH} levels deep")
    if isinstance(value, dict):
        return {
            replace_surrogates(key, max_depth - 1): replace_surrogates(item, max_depth - 1)
            for key, item in value.items()
        }
    return type(value)([replace_surrogates(item, max_depth - 1) for item in value])
