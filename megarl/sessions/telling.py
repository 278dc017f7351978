"""What a client of a stream hears while the policy still writes: only what will stand in the whole answer, too."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Literal

from megarl.rollout.chat import Chat
from megarl.sessions.asked import Asked
from megarl.types import Ids, Message

Field = Literal["reasoning_content", "content"]

_CALLS = re.compile(r"[<\[{`｜◁]")
"""Whatever a call of a tool may begin with, in any family."""
_HALF = "\ufffd"
"""What half of a character is read as."""


class Telling:
    """Of one answer. after: role of the message that it answers. say: is told of each piece, in order.

    Kept back are half characters, space at the end, what may become a stop string or a mark of reasoning, and where the
    client has tools, all from the first character on that a call may begin with. Where a policy that reasons has begun
    without a mark, only its end says whether that was reasoning; log-probs go with the whole: nothing is told then.
    """

    def __init__(self, chat: Chat, asked: Asked, after: str, say: Callable[[Field, str], None]) -> None:
        self._chat, self._asked, self._after, self._say = chat, asked, after, say
        self._ids: list[int] = []
        self._text = ""
        self._begin = self._read = 0
        self.sent: dict[Field, str] = {"reasoning_content": "", "content": ""}

    def hear(self, ids: Ids) -> None:
        """The next tokens of the answer."""
        if self._asked.logprobs:
            return
        self._ids += [token for token in ids.tolist() if token not in self._chat.ends]
        # As far as a character is whole, by a few tokens before it: how one is written depends on these.
        before = self._chat.text(self._ids[self._begin : self._read])
        now = self._chat.text(self._ids[self._begin :])
        if now.endswith(_HALF) or len(now) <= len(before):
            return
        self._text += now[len(before) :]
        self._begin, self._read = self._read, len(self._ids)
        thoughts, content = self._sure()
        self._tell("reasoning_content", thoughts)
        self._tell("content", content)

    def fits(self, message: Message) -> bool:
        """Whether what was told is the beginning of what the answer is now that it is whole."""
        return all(str(message.get(name) or "").startswith(sent) for name, sent in self.sent.items())

    def _tell(self, name: Field, text: str) -> None:
        more = text[len(self.sent[name]) :]
        if more:
            self.sent[name] = text
            self._say(name, more)

    def _sure(self) -> tuple[str, str]:
        """Of reasoning and content, what can become nothing else."""
        text, chat, asked = self._text, self._chat, self._asked
        found = [text.find(stop) for stop in asked.stops if stop in text]
        text = text[: min(found)] if found else _without_begun(text, asked.stops)
        if chat.marks is not None:
            text = _without_begun(text, chat.marks)
            if not chat.content_begins(text, self._after):
                return "", ""
        thoughts, content = chat.reasoned(text, self._after)
        if asked.schemas:
            if content != content.lstrip():  # a parser may leave it out
                return thoughts, ""
            called = _CALLS.search(content)
            content = content[: called.start()] if called else content
        return thoughts, content.rstrip()


def _without_begun(text: str, words: tuple[str, ...]) -> str:
    """The text without what one of the words may begin with at its end."""
    most = max((n for word in words for n in range(1, len(word)) if text.endswith(word[:n])), default=0)
    return text[: len(text) - most]
