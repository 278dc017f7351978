"""A tokenizer's library alone spells as the tokenizer does, and is not asked alone where it would not."""

from __future__ import annotations

from typing import Any

import pytest
import tiny_models
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from megarl.chat_format.chat_template import ChatTemplate

TOKENIZER = tiny_models.tokenizer()
WORDS = st.text() | st.sampled_from(["<|im_end|>", " <|im_start|>user\n", "<tool_call>", "  ", "\ud83d"])


@given(st.lists(WORDS).map("".join))
def test_it_spells_as_the_tokenizer_does(text: str) -> None:
    local = ChatTemplate(TOKENIZER)
    full = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    ids = local.encode(text)
    assert ids == TOKENIZER.encode(full, add_special_tokens=False)
    assert local.decode(ids) == TOKENIZER.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def test_settings_that_others_have_left_do_not_count() -> None:
    tokenizer = tiny_models.tokenizer()
    local, text = ChatTemplate(tokenizer), "one two three four"
    full = local.encode(text)
    tokenizer(text, truncation=True, max_length=2, padding="max_length")
    assert local.encode(text) == full


class _Reversed(PreTrainedTokenizerFast):  # type: ignore[misc]
    def _encode_plus(self, text: Any, **settings: Any) -> Any:
        return super()._encode_plus(text[::-1], **settings)


@pytest.mark.parametrize("settings", [{}, {"split_special_tokens": True}])
def test_a_tokenizer_that_does_more_is_asked_itself(settings: dict[str, Any]) -> None:
    kind = PreTrainedTokenizerFast if settings else _Reversed
    tokenizer = kind(tokenizer_object=tiny_models.tokenizer().backend_tokenizer, chat_template="x", **settings)
    text = "<|im_end|>abc"
    assert ChatTemplate(tokenizer).encode(text) == list(tokenizer.encode(text, add_special_tokens=False))
    assert ChatTemplate(tokenizer).encode(text) != ChatTemplate(TOKENIZER).encode(text)
