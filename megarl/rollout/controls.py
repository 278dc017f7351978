"""The control tokens of a model: which they are, which end a turn by its own word, and text in which there are none."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from megarl.config import ConfigError

_MARKS = "<>[]|{}｜"  # an added token with one of these is taken for a control token, even if not declared special
_TAG = re.compile(r"</?[A-Za-z][\w:.-]*/?>")


@dataclass(frozen=True)
class Found:
    """A control token in a text, from `start` to before `stop`."""

    id: int
    start: int
    stop: int


class Controls:
    """tokenizer: of transformers.

    Words that a tokenizer merely added are no control tokens. Among these *tags* such as <think> or <tool_call>, which
    look like XML and are not declared special, open and close no turn: formats are described with them.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    @cached_property
    def texts(self) -> list[str]:
        """Longest first."""
        tokens = self._tokenizer.added_tokens_decoder.values()
        texts = {str(token) for token in tokens if token.special or any(mark in str(token) for mark in _MARKS)}
        return sorted((text for text in texts if len(text) > 1), key=lambda text: (-len(text), text))

    @cached_property
    def tags(self) -> frozenset[str]:
        special = {str(token) for token in self._tokenizer.added_tokens_decoder.values() if token.special}
        return frozenset(text for text in self.texts if _TAG.fullmatch(text) and text not in special)

    @cached_property
    def ids(self) -> frozenset[int]:
        texts = set(self.texts)
        return frozenset(index for index, token in self._tokenizer.added_tokens_decoder.items() if str(token) in texts)

    def first(self, text: str) -> Found | None:
        """The first one that a text spells."""
        match = self._any.search(text) if self.texts else None
        return match and Found(int(self._tokenizer.convert_tokens_to_ids(match[0])), *match.span())

    @cached_property
    def _any(self) -> re.Pattern[str]:
        return re.compile("|".join(map(re.escape, self.texts)))

    @cached_property
    def _by_text(self) -> dict[str, int]:
        return {text: int(self._tokenizer.convert_tokens_to_ids(text)) for text in self.texts}

    @cached_property
    def _begin(self) -> re.Pattern[str]:
        """What one of them may begin with: most texts have none of these characters."""
        return re.compile(f"[{re.escape(''.join(sorted({text[0] for text in self.texts})))}]")

    def among(self, ids: Sequence[int]) -> list[int]:
        known = self.ids
        return [token for token in ids if token in known]

    def spelled(self, text: str) -> list[int]:
        """The ids of those that a text spells, in its order."""
        by_text = self._by_text
        return [by_text[found] for found in self._any.findall(text)] if by_text else []

    def escape(self, text: str, tags: bool = True) -> str:
        """The text with a backslash inside whatever the tokenizer would read as a control token. tags: in these too."""
        found = bool(self.texts) and self._begin.search(text) is not None
        while found:
            found = False
            for token in self.texts:
                if token in text and (tags or token not in self.tags):
                    text, found = text.replace(token, f"{token[0]}\\{token[1:]}"), True
        return text

    def tags_in(self, text: str) -> list[str]:
        """The tags of a text, in its order."""
        return self._tag.findall(text) if self.tags else []

    @cached_property
    def _tag(self) -> re.Pattern[str]:
        return re.compile("|".join(re.escape(tag) for tag in self.texts if tag in self.tags))


def generation_eos(file: Path) -> tuple[int, ...]:
    """eos_token_id of a generation_config.json, none where there is no such file. Raises ConfigError for nonsense."""
    if not file.is_file():
        return ()
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        eos = found.get("eos_token_id")
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise ConfigError(f"{file} is not a JSON object: {error}") from None
    ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
    if not all(isinstance(token, int) and not isinstance(token, bool) and token >= 0 for token in ids):
        raise ConfigError(f"{file}: eos_token_id must be a token id or a list of them, not {str(eos)[:80]}")
    return tuple(ids)
