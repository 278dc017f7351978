"""Where a policy reasons and where it says something; which templates open reasoning, and which forget it."""

from __future__ import annotations

import pytest
import templates
import tiny_models
from reasoning_templates import OTHERS, REASONING, reasoning_tokenizer

from megarl.chat_format.chat_messages import MARKS, find_reasoning, is_open
from megarl.chat_format.chat_template import ChatTemplate
from megarl.types import Message

pytestmark = pytest.mark.alone

CHATS = {name: ChatTemplate(reasoning_tokenizer(family)) for name, family in REASONING.items()}
THINK = MARKS[0]
USER: Message = {"role": "user", "content": "Go on."}
OTHER: Message = {"role": "assistant", "content": "Let me see."}
TOOL: Message = {"role": "tool", "name": "f", "tool_call_id": "functions.f:0", "content": "3"}


@pytest.mark.parametrize(
    ("text", "opened", "expected"),
    [
        ("<think>\nhm\n</think>\n\n3", False, ("hm", "3")),
        ("\n <think>hm</think>3", False, ("hm", "3")),
        ("hm</think>3", True, ("hm", "3")),
        ("<think>hm</think>3", True, ("hm", "3")),  # opened twice, by the template and by the policy
        ("hm</think>3", False, ("hm", "3")),  # closed only: as templates themselves read it
        ("<think>hm", False, ("hm", "")),
        ("hm", True, ("hm", "")),
        ("3", False, ("", "3")),
        ("Write <think> and </think>.", False, ("", "Write <think> and </think>.")),
        ("<think>a</think>b</think>c", False, ("a", "b</think>c")),
        ("<think>a <think> b</think>c", False, ("a <think> b", "c")),
        ("<think></think>", False, ("", "")),
        ("</think>3", True, ("", "3")),
        ("", False, ("", "")),
        ("", True, ("", "")),
    ],
)
def test_reasoning_is_what_a_turn_begins_with(text: str, opened: bool, expected: tuple[str, str]) -> None:
    result = find_reasoning(text, THINK, opened)
    split = (text[result.inner_start : result.inner_end].strip(), text[result.stop :].strip()) if result else ("", text)
    assert split == expected


def test_the_head_of_a_turn_may_leave_it_open() -> None:
    assert is_open("<|im_start|>assistant\n<think>\n", THINK)
    assert not is_open("<|im_start|>assistant\n<think>\n\n</think>\n\n", THINK)
    assert not is_open("<｜Assistant｜></think>", THINK) and not is_open("", THINK)


@pytest.mark.parametrize(
    ("name", "user", "tool"),
    [
        ("qwen3", False, False),
        ("qwen3 opened", True, True),
        ("glm", False, False),
        ("deepseek r1", True, False),
        ("deepseek v3.1", False, False),
        ("kimi", False, False),
    ],
)
def test_what_the_template_opens_depends_on_what_the_turn_answers(name: str, user: bool, tool: bool) -> None:
    for role, opens in (("user", user), ("tool", tool)):
        assert CHATS[name].split_reasoning("hm", role) == (("hm", "") if opens else ("", "hm"))


def test_reasoning_by_ids() -> None:
    chat = CHATS["qwen3"]
    inner, said = chat.encode("\n🤔 1+2 hm\n"), chat.encode("\n\nIt is 3.")
    opening, closing = chat.encode("<think>"), chat.encode("</think>")
    assert len(opening) == len(closing) == 1
    full = [*opening, *inner, *closing, *said]
    assert chat.find_reasoning_range(full) == range(len(inner) + 2)
    assert chat.decode(full[len(inner) + 2 :]) == "\n\nIt is 3."
    assert chat.find_reasoning_range([*full, chat.end_of_turn]) == range(len(inner) + 2)
    assert chat.find_reasoning_range([*opening, *inner]) == range(len(inner) + 1)
    assert chat.find_reasoning_range(said) is None and chat.find_reasoning_range([]) is None
    opened = CHATS["qwen3 opened"]
    assert opened.find_reasoning_range([*inner, *closing, *said]) == range(len(inner) + 1)
    assert opened.find_reasoning_range([*closing, *said]) == range(1)
    assert opened.find_reasoning_range(inner) == range(len(inner)) and not opened.find_reasoning_range([])


def test_marks_that_are_words_and_no_tokens() -> None:
    tokenizer = tiny_models.tokenizer()
    tokenizer.chat_template = REASONING["qwen3"].template
    chat = ChatTemplate(tokenizer)
    assert chat.reasoning_marks == THINK and len(chat.encode("</think>")) > 1
    ids = chat.encode("<think>hm</think>3")
    result = chat.find_reasoning_range(ids)
    assert (
        result is not None
        and chat.decode(ids[: len(result)]) == "<think>hm</think>"
        and chat.decode(ids[len(result) :]) == "3"
    )


def test_a_model_that_does_not_reason_has_none() -> None:
    for family in (templates.PUBLISHED["qwen"], OTHERS["qwen3 coder"]):
        chat = ChatTemplate(family.tokenizer())
        assert chat.reasoning_marks is None and not chat.is_reasoning_dropped([USER])
        assert chat.split_reasoning("<think>hm</think>3") == ("", "<think>hm</think>3")
        assert chat.find_reasoning_range(chat.encode("<think>hm</think>3")) is None
        assert chat.find_content_start("<think>hm</think>3") == 0


@pytest.mark.parametrize(
    ("name", "messages", "drops"),
    [
        ("qwen3", [USER], True),
        ("qwen3", [TOOL], False),
        ("qwen3", [TOOL, TOOL], False),
        ("qwen3", [TOOL, USER], True),
        ("qwen3", [TOOL, OTHER], False),
        ("glm", [TOOL], False),
        ("glm", [USER], True),
        ("kimi", [TOOL], False),
        ("kimi", [USER], True),
        ("kimi", [TOOL, OTHER, USER], True),
        ("kimi", [TOOL, USER], False),
        ("deepseek r1", [USER], True),
        ("deepseek v3.1", [USER], True),
    ],
)
def test_whether_the_template_forgets_it(name: str, messages: list[Message], drops: bool) -> None:
    assert CHATS[name].is_reasoning_dropped(messages) is drops


def test_a_template_without_a_rule_keeps_what_is_in_the_text() -> None:
    tokenizer = templates.PUBLISHED["qwen"].tokenizer()
    tokenizer.add_tokens(list(THINK))
    chat = ChatTemplate(tokenizer)
    assert (
        chat.reasoning_marks == THINK
        and not chat.is_reasoning_dropped([USER])
        and not chat.is_reasoning_dropped([TOOL])
    )


def test_another_models_marks() -> None:
    tokenizer = templates.PUBLISHED["qwen"].tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["[THINK]", "[/THINK]"]})
    assert ChatTemplate(tokenizer).split_reasoning("[THINK]hm[/THINK]3") == ("hm", "3")
