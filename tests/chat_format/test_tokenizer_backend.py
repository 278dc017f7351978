"""Direct use of a tokenizer's backend equals the tokenizer, and is avoided where it would not."""

from __future__ import annotations

from typing import Any

import pytest
import tiny_models
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from megarl.chat_format.chat_template import ChatTemplate

TOKENIZER = tiny_models.tokenizer()
PIECES = st.text() | st.sampled_from(["<|im_end|>", " <|im_start|>user\n", "<tool_call>", "  ", "\ud83d"])


@given(st.lists(PIECES).map("".join))
def test_backend_encodes_and_decodes_like_the_tokenizer(text: str) -> None:
    chat = ChatTemplate(TOKENIZER)
    full = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    ids = chat.encode(text)
    assert ids == TOKENIZER.encode(full, add_special_tokens=False)
    assert chat.decode(ids) == TOKENIZER.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def test_ignores_truncation_and_padding_set_by_others() -> None:
    tokenizer = tiny_models.tokenizer()
    chat, text = ChatTemplate(tokenizer), "one two three four"
    full = chat.encode(text)
    tokenizer(text, truncation=True, max_length=2, padding="max_length")
    assert chat.encode(text) == full


class _ReversingTokenizer(PreTrainedTokenizerFast):  # type: ignore[misc]
    def _encode_plus(self, text: Any, **settings: Any) -> Any:
        return super()._encode_plus(text[::-1], **settings)


@pytest.mark.parametrize("settings", [{}, {"split_special_tokens": True}])
def test_uses_the_tokenizer_if_it_differs_from_its_backend(settings: dict[str, Any]) -> None:
    kind = PreTrainedTokenizerFast if settings else _ReversingTokenizer
    tokenizer = kind(tokenizer_object=tiny_models.tokenizer().backend_tokenizer, chat_template="x", **settings)
    text = "<|im_end|>abc"
    assert ChatTemplate(tokenizer).encode(text) == list(tokenizer.encode(text, add_special_tokens=False))
    assert ChatTemplate(tokenizer).encode(text) != ChatTemplate(TOKENIZER).encode(text)
