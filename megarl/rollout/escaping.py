"""Messages of others as ids in which only the template has written control tokens."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

from megarl.rollout.controls import Controls
from megarl.rollout.messages import hollow, plain, safe, withheld
from megarl.types import Message

_MOST_FRAMES = 1000

Make = Callable[[Sequence[Message]], str]
"""What a template writes of messages."""


class Escaping:
    """tokenise: of a text, with whatever control tokens it spells."""

    def __init__(self, controls: Controls, tokenise: Callable[[str], list[int]]) -> None:
        self._controls, self._tokenise = controls, tokenise
        self._frames: dict[Hashable, list[int]] = {}
        """Control tokens that the template itself writes around so many results."""

    def ids(self, messages: Sequence[Message], make: Make, way: Callable[[], Hashable] | None = None) -> list[int]:
        """Some tokenizers read control tokens where their text is not: what others say is withheld then. way: all that
        `make` depends on besides the messages, where what it makes of so many results alone is asked for again."""
        controls = self._controls
        ready = [safe(plain(message, number), controls) for number, message in enumerate(messages)]
        text = make(ready)
        ids = self._tokenise(text)
        if controls.among(ids) != controls.spelled(text):
            ready = [withheld(one) if one["role"] != "tool" and self._forges(one["content"]) else one for one in ready]
            ids = self._tokenise(make(ready))
        results = sum(message["role"] == "tool" for message in ready)
        if results:
            key = None if way is None or results < len(ready) else (results, way())
            if controls.among(ids) != self._frame(ready, make, key):
                ready = [withheld(message) if message["role"] == "tool" else message for message in ready]
                ids = self._tokenise(make(ready))
        return ids

    def _frame(self, ready: Sequence[Message], make: Make, key: Hashable) -> list[int]:
        frame = self._frames.get(key)
        if frame is None:
            frame = self._controls.among(self._tokenise(make([hollow(message) for message in ready])))
            if key is not None and len(self._frames) < _MOST_FRAMES:
                self._frames[key] = frame
        return frame

    def _forges(self, text: str) -> bool:
        """Whether a text that is escaped has control tokens but for the tags that it spells."""
        tags = [self._tokenise(tag) for tag in self._controls.tags_in(text)]
        return self._controls.among(self._tokenise(text)) != [token for ids in tags for token in ids]
