"""Text to ids and back, by a tokenizer's own library where the tokenizer adds nothing to it, at half the cost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megarl.data.text import encodable

_OWN = ("encode", "_encode_plus", "decode", "_decode")


class Spelling:
    """tokenizer: of transformers."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._library = _library_of(tokenizer)

    def ids(self, text: str) -> list[int]:
        """Of a text, with whatever control tokens it spells and none besides."""
        text, library = encodable(text), self._library
        if library is not None and library.truncation is None and library.padding is None:  # others may set these
            return list(library.encode(text, add_special_tokens=False).ids)
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def text(self, ids: Sequence[int]) -> str:
        """What ids say, control tokens included."""
        if self._library is not None:
            return str(self._library.decode(ids, skip_special_tokens=False))
        return str(self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def _library_of(tokenizer: Any) -> Any:
    """The object of `tokenizers` that does all of the tokenizer's work; None where other code has a part in it."""
    from transformers import PreTrainedTokenizerFast

    kind = type(tokenizer)
    if not isinstance(tokenizer, PreTrainedTokenizerFast) or tokenizer.split_special_tokens:
        return None
    if any(getattr(kind, name) is not getattr(PreTrainedTokenizerFast, name) for name in _OWN):
        return None
    library = tokenizer.backend_tokenizer
    return None if library.encode_special_tokens else library
