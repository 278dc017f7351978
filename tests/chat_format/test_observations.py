"""Truncation of tool results by tokens."""

from __future__ import annotations

import re

import pytest
import templates
import tiny_models
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.chat_format.chat_template import ChatTemplate
from megarl.chat_format.observations import truncate_observations
from megarl.types import Message

pytestmark = pytest.mark.alone

CHAT = ChatTemplate(tiny_models.tokenizer())
LLAMA = ChatTemplate(templates.PUBLISHED["llama"].tokenizer())  # renders results as JSON, which is longer
KIMI = ChatTemplate(templates.PUBLISHED["kimi"].tokenizer())
UNLIMITED = 100_000


def tool_result(content: str) -> Message:
    return {"role": "tool", "name": "f", "tool_call_id": "functions.f:0", "content": content}


def count_tokens(text: str, chat: ChatTemplate = CHAT) -> int:
    return len(chat.encode(text))


def truncate(
    *contents: str,
    max_tokens: int = 50,
    remaining_tokens: int = UNLIMITED,
    reserved_tokens: int = 0,
    chat: ChatTemplate = CHAT,
) -> list[str] | None:
    result = truncate_observations(
        chat, [tool_result(content) for content in contents], [], max_tokens, remaining_tokens, reserved_tokens
    )
    if result is None:
        return None
    messages, ids = result
    assert ids == chat.encode_continuation(messages) and len(ids) <= remaining_tokens
    return [message["content"] for message in messages]


def test_keeps_results_within_the_limit() -> None:
    for text in ("", "3", "a <|im_end|> b", "x" * 50, "naïve ✓"):
        assert truncate(text) == [text]


def test_keeps_both_ends_and_counts_the_marker() -> None:
    """The result has 1,000 tokens, and the marker states how many are cut."""
    digits = "".join(str(i % 5) for i in range(1000))
    assert count_tokens(digits) == 1000
    (text,) = truncate(digits, max_tokens=60) or []
    prefix, count, suffix = re.fullmatch(r"(\d+)\n... \((\d+) tokens cut\) ...\n(\d+)", text).groups()  # type: ignore[union-attr]
    assert digits.startswith(prefix) and digits.endswith(suffix) and abs(len(prefix) - len(suffix)) <= 1
    assert len(prefix) + len(suffix) + int(count) == 1000
    assert 59 <= count_tokens(text) <= 60  # the marker says 966 and was budgeted for 1000


def test_each_result_has_its_own_limit() -> None:
    texts = truncate("1" * 500, "2", "3" * 40, "4" * 51, max_tokens=50)
    assert texts is not None and texts[1:3] == ["2", "3" * 40]
    assert all("tokens cut" in texts[index] and count_tokens(texts[index]) <= 50 for index in (0, 3))


def test_truncates_the_longest_results_to_equal_length() -> None:
    frame = len(CHAT.encode_continuation([tool_result("")] * 3))
    texts = truncate("1" * 400, "2" * 30, "3" * 300, max_tokens=500, remaining_tokens=frame + 230)
    assert texts is not None and texts[1] == "2" * 30
    assert count_tokens(texts[0]) == count_tokens(texts[2]) and 90 <= count_tokens(texts[0]) <= 100


def test_spares_tokens_for_the_policy_if_possible() -> None:
    frame = len(CHAT.encode_continuation([tool_result("")]))
    texts = truncate("1" * 400, max_tokens=500, remaining_tokens=frame + 100, reserved_tokens=40)
    assert texts is not None and 50 <= count_tokens(texts[0]) <= 60
    marker = "... (400 tokens cut) ..."
    minimum = len(CHAT.encode_continuation([tool_result(marker)]))
    assert truncate("1" * 400, max_tokens=500, remaining_tokens=minimum, reserved_tokens=40) == [marker]
    assert truncate("1" * 400, max_tokens=500, remaining_tokens=minimum - 1) is None


def test_never_replaces_a_result_by_a_longer_marker() -> None:
    minimum = len(CHAT.encode_continuation([tool_result("3"), tool_result("12")]))
    assert truncate("3", "12", remaining_tokens=minimum, reserved_tokens=10) == ["3", "12"]
    assert truncate("3", "12", remaining_tokens=minimum - 1) is None


def test_limits_results_by_their_rendered_length() -> None:
    quotes = '"\n' * 200
    frame = len(LLAMA.encode_continuation([tool_result("")]))
    texts = truncate(quotes, max_tokens=500, remaining_tokens=frame + 120, chat=LLAMA)
    assert texts is not None and "tokens cut" in texts[0]
    assert frame + 70 <= len(LLAMA.encode_continuation([tool_result(texts[0])])) <= frame + 120


def test_does_not_split_characters_of_several_tokens() -> None:
    for text in ("😀" * 100, "北京" * 80, "é" * 200):
        (truncated,) = truncate(text, max_tokens=61) or []
        assert "\ufffd" not in truncated and count_tokens(truncated) <= 61 and truncated.count(text[0]) >= 4


def test_counts_control_tokens_as_escaped() -> None:
    text = "<|im_end|>" * 30
    assert count_tokens(text) == 30
    (truncated,) = truncate(text, max_tokens=60) or []
    assert "tokens cut" in truncated and "<\\|im_end|>" in truncated and count_tokens(truncated) <= 60


def test_tokenizes_only_both_ends_of_huge_results() -> None:
    text = "start" + "1" * 3_000_000 + "end"
    (truncated,) = truncate(text, max_tokens=64) or []
    assert truncated.startswith("start1") and truncated.endswith("1end") and count_tokens(truncated) <= 64
    count = int(re.findall(r"\(about (\d+) tokens cut\)", truncated)[0])
    assert 2_900_000 < count < 3_100_000


PIECES = st.one_of(
    st.text(max_size=60),
    st.sampled_from(
        ["<|im_end|>", "<|im_start|>assistant\n", "<tool_call>", "tokens cut) ...", "1" * 90, "\ud83d", "😀" * 9]
    ),
)
TEXTS = st.lists(PIECES, max_size=8).map("".join)


@pytest.mark.parametrize("chat", [CHAT, LLAMA, KIMI], ids=["qwen", "llama", "kimi"])
@settings(max_examples=50)
@given(
    texts=st.lists(TEXTS, min_size=1, max_size=3),
    max_tokens=st.integers(1, 80),
    remaining_tokens=st.integers(0, 400),
    reserved_tokens=st.integers(0, 60),
)
def test_observations_fit_and_keep_the_templates_control_tokens(
    chat: ChatTemplate, texts: list[str], max_tokens: int, remaining_tokens: int, reserved_tokens: int
) -> None:
    results = [tool_result(text) for text in texts]
    result = truncate_observations(chat, results, [], max_tokens, remaining_tokens, reserved_tokens)
    frame = chat.encode_continuation([tool_result("0")] * len(results))
    if result is None:
        markers = chat.encode_continuation([tool_result("... (10 tokens cut) ...")] * len(results))
        assert remaining_tokens < len(markers) + 10 * len(results)
        return
    messages, ids = result
    assert len(ids) <= remaining_tokens and ids == chat.encode_continuation(messages)
    assert chat.control_tokens.filter_ids(ids) == chat.control_tokens.filter_ids(frame)
    for before, after in zip(results, messages, strict=True):
        assert after["content"] in (before["content"], after["content"])
        assert count_tokens(chat.control_tokens.escape(after["content"]), chat) <= max(max_tokens, 40)
