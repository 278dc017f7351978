"""OpenAI's harmony format, that of gpt-oss, in which one turn of the policy consists of several messages.

After the head <|start|>assistant a turn may be:

    <|channel|>analysis<|message|>REASONING<|end|><|start|>assistant<|channel|>final<|message|>ANSWER<|return|>
    <|channel|>analysis<|message|>REASONING<|end|><|start|>assistant<|channel|>commentary to=functions.NAME
        <|constrain|>json<|message|>ARGUMENTS<|call|>

So <|end|> ends a message and not the turn, and one turn has one call. The recipient may also precede the channel, as
templates write it, and <|constrain|> may be missing. Source: openai/harmony, docs/format.md.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from megarl.types import Message

PARSER = "gpt-oss"
"""SGLang's tool-call parser of this format."""
END_OF_CALL, END_OF_MESSAGE = "<|call|>", "<|end|>"
REASONING_MARKS = "<|channel|>analysis<|message|>", END_OF_MESSAGE
CALL_OPENING = "<|constrain|>json<|message|>"
"""Text that begins the arguments of each call in the result of `normalize_calls`."""

_TOKENS = {"<|start|>", "<|channel|>", "<|message|>", "<|return|>", END_OF_CALL, END_OF_MESSAGE}
_FINAL = re.compile(r"\s*(?:<\|start\|>assistant)?<\|channel\|>final<\|message\|>")
_HEADER = re.compile(
    r"(?:<\|start\|>assistant)?\s*(?:to=(?P<before>[\w.-]+)\s*)?<\|channel\|>\s*(?:commentary|analysis)\s*"
    r"(?:to=(?P<after>[\w.-]+)\s*)?(?:<\|constrain\|>)?\s*(?:json)?\s*<\|message\|>"
)
_ENDS = re.compile(r"<\|(?:call|end|return)\|>|\Z")


def is_harmony(control_tokens: Iterable[str]) -> bool:
    """Return whether a tokenizer with these control tokens is of this format."""
    return set(control_tokens) >= _TOKENS


def strip_final_header(text: str) -> str:
    """Remove the header of the answer, after a turn's reasoning."""
    return _FINAL.sub("", text, count=1) if _FINAL.match(text) else text


def with_thinking(message: Message) -> Message:
    """Return the message with its reasoning in the field of these templates, which reject it beside text and a call."""
    reasoning = message.get("reasoning_content")
    if not reasoning or (message.get("tool_calls") and message.get("content")):
        return message
    return {**message, "thinking": reasoning}


def is_reasoning_dropped(behind: Iterable[Message]) -> bool:
    """Return whether templates drop the reasoning of a turn that these messages follow: after its answer was read."""
    return any(message["role"] == "user" for message in behind)


def normalize_calls(text: str) -> str:
    """Write each call of a turn's text as SGLang's parser reads it: with a whole header, and with <|call|> behind."""
    parts, position = [], 0
    while (header := _HEADER.search(text, position)) is not None:
        end = _ENDS.search(text, header.end())
        assert end is not None  # it matches the end of the text
        recipient = header["before"] or header["after"]
        if recipient is None:
            parts.append(text[position : end.end()])
        else:
            opening = f"<|start|>assistant<|channel|>commentary to={recipient}{CALL_OPENING}"
            parts += [text[position : header.start()], opening, text[header.end() : end.start()], END_OF_CALL]
        position = end.end()
    return "".join([*parts, text[position:]])
