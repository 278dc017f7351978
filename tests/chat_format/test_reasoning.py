"""Reasoning and content of turns; which templates open reasoning, and which drop it."""

from __future__ import annotations

import pytest
import templates
import tiny_models
from reasoning_templates import OTHER_FORMATS, REASONING, reasoning_tokenizer

from megarl.chat_format.chat_messages import MARKS, find_reasoning, is_open
from megarl.chat_format.chat_template import ChatTemplate
from megarl.types import Message

pytestmark = pytest.mark.alone

CHATS = {name: ChatTemplate(reasoning_tokenizer(family)) for name, family in REASONING.items()}
THINK = MARKS[0]
USER: Message = {"role": "user", "content": "Go on."}
ASSISTANT: Message = {"role": "assistant", "content": "Let me see."}
TOOL: Message = {"role": "tool", "name": "f", "tool_call_id": "functions.f:0", "content": "3"}


@pytest.mark.parametrize(
    ("text", "is_opened", "expected"),
    [
        ("<think>\nhm\n</think>\n\n3", False, ("hm", "3")),
        ("\n <think>hm</think>3", False, ("hm", "3")),
        ("hm</think>3", True, ("hm", "3")),
        ("<think>hm</think>3", True, ("hm", "3")),  # opened by the template and by the policy
        ("hm</think>3", False, ("hm", "3")),  # only closed, which templates accept, too
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
def test_finds_reasoning_at_the_start_of_a_turn(text: str, is_opened: bool, expected: tuple[str, str]) -> None:
    result = find_reasoning(text, THINK, is_opened)
    split = (text[result.inner_start : result.inner_end].strip(), text[result.stop :].strip()) if result else ("", text)
    assert split == expected


def test_head_of_a_turn_may_open_reasoning() -> None:
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
def test_opened_reasoning_depends_on_the_previous_role(name: str, user: bool, tool: bool) -> None:
    for role, is_opened in (("user", user), ("tool", tool)):
        assert CHATS[name].split_reasoning("hm", role) == (("hm", "") if is_opened else ("", "hm"))


def test_finds_reasoning_by_token_ids() -> None:
    chat = CHATS["qwen3"]
    thought_ids, content_ids = chat.encode("\n🤔 1+2 hm\n"), chat.encode("\n\nIt is 3.")
    opening, closing = chat.encode("<think>"), chat.encode("</think>")
    assert len(opening) == len(closing) == 1
    full = [*opening, *thought_ids, *closing, *content_ids]
    assert chat.find_reasoning_range(full) == range(len(thought_ids) + 2)
    assert chat.decode(full[len(thought_ids) + 2 :]) == "\n\nIt is 3."
    assert chat.find_reasoning_range([*full, chat.end_of_turn]) == range(len(thought_ids) + 2)
    assert chat.find_reasoning_range([*opening, *thought_ids]) == range(len(thought_ids) + 1)
    assert chat.find_reasoning_range(content_ids) is None and chat.find_reasoning_range([]) is None
    opened_chat = CHATS["qwen3 opened"]
    assert opened_chat.find_reasoning_range([*thought_ids, *closing, *content_ids]) == range(len(thought_ids) + 1)
    assert opened_chat.find_reasoning_range([*closing, *content_ids]) == range(1)
    assert opened_chat.find_reasoning_range(thought_ids) == range(
        len(thought_ids)
    ) and not opened_chat.find_reasoning_range([])


def test_reasoning_marks_of_several_tokens() -> None:
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


def test_models_without_reasoning() -> None:
    for family in (templates.PUBLISHED["qwen"], OTHER_FORMATS["qwen3 coder"]):
        chat = ChatTemplate(family.tokenizer())
        assert chat.reasoning_marks is None and not chat.is_reasoning_dropped([USER])
        assert chat.split_reasoning("<think>hm</think>3") == ("", "<think>hm</think>3")
        assert chat.find_reasoning_range(chat.encode("<think>hm</think>3")) is None
        assert chat.find_content_start("<think>hm</think>3") == 0


@pytest.mark.parametrize(
    ("name", "messages", "is_dropped"),
    [
        ("qwen3", [USER], True),
        ("qwen3", [TOOL], False),
        ("qwen3", [TOOL, TOOL], False),
        ("qwen3", [TOOL, USER], True),
        ("qwen3", [TOOL, ASSISTANT], False),
        ("glm", [TOOL], False),
        ("glm", [USER], True),
        ("kimi", [TOOL], False),
        ("kimi", [USER], True),
        ("kimi", [TOOL, ASSISTANT, USER], True),
        ("kimi", [TOOL, USER], False),
        ("deepseek r1", [USER], True),
        ("deepseek v3.1", [USER], True),
    ],
)
def test_whether_the_template_drops_reasoning(name: str, messages: list[Message], is_dropped: bool) -> None:
    assert CHATS[name].is_reasoning_dropped(messages) is is_dropped


def test_template_without_a_reasoning_rule_keeps_it() -> None:
    tokenizer = templates.PUBLISHED["qwen"].tokenizer()
    tokenizer.add_tokens(list(THINK))
    chat = ChatTemplate(tokenizer)
    assert (
        chat.reasoning_marks == THINK
        and not chat.is_reasoning_dropped([USER])
        and not chat.is_reasoning_dropped([TOOL])
    )


def test_reasoning_marks_of_another_model() -> None:
    tokenizer = templates.PUBLISHED["qwen"].tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["[THINK]", "[/THINK]"]})
    assert ChatTemplate(tokenizer).split_reasoning("[THINK]hm[/THINK]3") == ("hm", "3")
