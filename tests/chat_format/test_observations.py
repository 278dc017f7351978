"""What is left of what tools say, by tokens."""

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
LLAMA = ChatTemplate(templates.PUBLISHED["llama"].tokenizer())  # shows results as JSON, which is longer than they are
KIMI = ChatTemplate(templates.PUBLISHED["kimi"].tokenizer())
ROOM = 100_000


def tool(content: str) -> Message:
    return {"role": "tool", "name": "f", "tool_call_id": "functions.f:0", "content": content}


def size(text: str, chat: ChatTemplate = CHAT) -> int:
    return len(chat.encode(text))


def shown(
    *contents: str, each: int = 50, room: int = ROOM, spare: int = 0, chat: ChatTemplate = CHAT
) -> list[str] | None:
    result = truncate_observations(chat, [tool(content) for content in contents], [], each, room, spare)
    if result is None:
        return None
    said, ids = result
    assert ids == chat.encode_continuation(said) and len(ids) <= room
    return [message["content"] for message in said]


def test_what_fits_is_left_as_it_is() -> None:
    for text in ("", "3", "a <|im_end|> b", "x" * 50, "naïve ✓"):
        assert shown(text) == [text]


def test_the_beginning_and_the_end_are_kept_and_the_mark_counts() -> None:
    """Of 1,000 words that are a token each; the mark's own count, too."""
    digits = "".join(str(i % 5) for i in range(1000))
    assert size(digits) == 1000
    (text,) = shown(digits, each=60) or []
    head, count, tail = re.fullmatch(r"(\d+)\n... \((\d+) tokens cut\) ...\n(\d+)", text).groups()  # type: ignore[union-attr]
    assert digits.startswith(head) and digits.endswith(tail) and abs(len(head) - len(tail)) <= 1
    assert len(head) + len(tail) + int(count) == 1000
    assert 59 <= size(text) <= 60  # the mark says 966, and 1000 was reckoned with


def test_each_result_has_its_own_limit() -> None:
    texts = shown("1" * 500, "2", "3" * 40, "4" * 51, each=50)
    assert texts is not None and texts[1:3] == ["2", "3" * 40]
    assert all("tokens cut" in texts[place] and size(texts[place]) <= 50 for place in (0, 3))


def test_where_room_is_short_the_longest_are_cut_to_one_length() -> None:
    frame = len(CHAT.encode_continuation([tool("")] * 3))
    texts = shown("1" * 400, "2" * 30, "3" * 300, each=500, room=frame + 230)
    assert texts is not None and texts[1] == "2" * 30
    assert size(texts[0]) == size(texts[2]) and 90 <= size(texts[0]) <= 100


def test_a_bit_is_left_for_the_policy_where_that_is_possible() -> None:
    frame = len(CHAT.encode_continuation([tool("")]))
    texts = shown("1" * 400, each=500, room=frame + 100, spare=40)
    assert texts is not None and 50 <= size(texts[0]) <= 60
    mark = "... (400 tokens cut) ..."
    least = len(CHAT.encode_continuation([tool(mark)]))
    assert shown("1" * 400, each=500, room=least, spare=40) == [mark]
    assert shown("1" * 400, each=500, room=least - 1) is None


def test_a_short_result_is_never_replaced_by_a_longer_mark() -> None:
    least = len(CHAT.encode_continuation([tool("3"), tool("12")]))
    assert shown("3", "12", room=least, spare=10) == ["3", "12"]
    assert shown("3", "12", room=least - 1) is None


def test_a_result_that_grows_in_the_template_is_cut_by_what_it_becomes() -> None:
    quotes = '"\n' * 200
    frame = len(LLAMA.encode_continuation([tool("")]))
    texts = shown(quotes, each=500, room=frame + 120, chat=LLAMA)
    assert texts is not None and "tokens cut" in texts[0]
    assert frame + 70 <= len(LLAMA.encode_continuation([tool(texts[0])])) <= frame + 120


def test_characters_of_several_tokens_are_not_cut_in_half() -> None:
    for text in ("😀" * 100, "北京" * 80, "é" * 200):
        (cut,) = shown(text, each=61) or []
        assert "\ufffd" not in cut and size(cut) <= 61 and cut.count(text[0]) >= 4


def test_control_tokens_are_counted_as_they_are_shown() -> None:
    text = "<|im_end|>" * 30
    assert size(text) == 30
    (cut,) = shown(text, each=60) or []
    assert "tokens cut" in cut and "<\\|im_end|>" in cut and size(cut) <= 60


def test_of_a_flood_only_the_beginning_and_the_end_are_read() -> None:
    text = "start" + "1" * 3_000_000 + "end"
    (cut,) = shown(text, each=64) or []
    assert cut.startswith("start1") and cut.endswith("1end") and size(cut) <= 64
    count = int(re.findall(r"\(about (\d+) tokens cut\)", cut)[0])
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
    each=st.integers(1, 80),
    room=st.integers(0, 400),
    spare=st.integers(0, 60),
)
def test_it_fits_and_holds_the_templates_control_tokens(
    chat: ChatTemplate, texts: list[str], each: int, room: int, spare: int
) -> None:
    results = [tool(text) for text in texts]
    result = truncate_observations(chat, results, [], each, room, spare)
    frame = chat.encode_continuation([tool("0")] * len(results))
    if result is None:
        marks = chat.encode_continuation([tool("... (10 tokens cut) ...")] * len(results))
        assert room < len(marks) + 10 * len(results)
        return
    said, ids = result
    assert len(ids) <= room and ids == chat.encode_continuation(said)
    assert chat.control_tokens.filter_ids(ids) == chat.control_tokens.filter_ids(frame)
    for before, after in zip(results, said, strict=True):
        assert after["content"] in (before["content"], after["content"])
        assert size(chat.control_tokens.escape(after["content"]), chat) <= max(each, 40)
