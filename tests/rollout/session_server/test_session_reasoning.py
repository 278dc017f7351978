"""Reasoning, by a template like Qwen 3's and one like DeepSeek R1's: both leave that of earlier questions out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import tiny_models
from scripted import CHAT, CONFIG, PROMPT, call
from serving import ASK, Numbered, Served, run

from megarl.chat_format.chat_template import ChatTemplate

pytestmark = pytest.mark.alone

TOOLS = [CHAT.tools["calculator"].schema]
QWEN3 = (
    "{% set ns = namespace(last=-1) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% if m.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ m.content }}\n"
    "</tool_response><|im_end|>\n{% else %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and m.reasoning_content and loop.index0 > ns.last %}"
    "{{ '<think>\n' + m.reasoning_content + '\n</think>\n\n' }}{% endif %}"
    "{{ m.content or '' }}{% for call in m.tool_calls or [] %}\n<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
R1 = QWEN3.replace(
    "{% if add_generation_prompt %}<|im_start|>assistant\n",
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n",
)


def chat_of(template: str) -> ChatTemplate:
    tokenizer = tiny_models.tokenizer()
    tokenizer.add_tokens(["<think>", "</think>"])
    tokenizer.chat_template = template
    return ChatTemplate(tokenizer, CHAT.tools)


class Says(Numbered):
    """As `Numbered`, with the tokens of this chat."""

    def __init__(self, chat: ChatTemplate, *lines: str) -> None:
        super().__init__(*lines)
        self.chat = chat

    def ids(self, text: str) -> list[int]:
        return list(self.chat.tokenizer.encode(text, add_special_tokens=False))


@pytest.mark.parametrize(("template", "opened"), [(QWEN3, ""), (R1, "<think>\n")])
def test_reasoning_is_left_out_by_its_ids_behind_the_next_question(template: str, opened: str) -> None:
    chat = chat_of(template)
    local = "" if opened else "<think>\n"
    odd = f"{local}I   add\n</think>\n\n{call('1+2')}"
    policy = Says(
        chat, odd, f"{local}fine</think>\n\nIt is 3", f"{local}sure\n</think>\n\nYes", f"{local}hm</think>Bye"
    )

    async def test(served: Served) -> None:
        answer = await served.create(ASK, tools=TOOLS)
        message = answer.choices[0].message
        assert message.content is None and message.reasoning_content == "I   add" and message.tool_calls
        messages: list[Any] = [*ASK, message.model_dump(exclude={"reasoning_content"})]
        messages += [{"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "3"}]
        messages += [(await served.create(messages, tools=TOOLS)).choices[0].message]  # type: ignore[list-item]
        assert served.recording.metrics.forks == 0  # within a question it stays
        messages += [{"role": "user", "content": "Sure?"}]
        messages += [(await served.create(messages, tools=TOOLS)).choices[0].message]  # type: ignore[list-item]
        assert served.recording.metrics.forks == 1
        messages += [{"role": "user", "content": "Bye"}]
        await served.create(messages, tools=TOOLS)
        assert served.recording.metrics.forks == 2

        first, second, third = served.recording.collect_branches()
        branches = [item.branch for item in (first, second, third) if item.branch is not None]
        assert [(item.number, item.forks) for item in branches] == [(0, 2), (1, 2), (2, 2)]
        texts = [
            [("*" if t.is_action else "") + chat.decode(t.token_ids) for t in item.turns]
            for item in (first, second, third)
        ]
        head = "<|im_start|>assistant\n"
        question = f"<|im_start|>user\nWhat is 1+2?<|im_end|>\n{head}"
        result = "\n<|im_start|>user\n<tool_response>\n3\n</tool_response><|im_end|>\n"
        called = f"{call('1+2')}<|im_end|>"
        assert texts[0] == [
            f"{question}{opened}",
            f"*{odd}<|im_end|>",
            f"{result}{head}{opened}",
            f"*{local}fine</think>\n\nIt is 3<|im_end|>",
        ]
        without = f"{question}{called}{result}{head}It is 3<|im_end|>\n<|im_start|>user\nSure?<|im_end|>\n{head}"
        assert texts[1] == [f"{without}{opened}", f"*{local}sure\n</think>\n\nYes<|im_end|>"]
        last = f"{without}Yes<|im_end|>\n<|im_start|>user\nBye<|im_end|>\n{head}"
        assert texts[2] == [f"{last}{opened}", f"*{local}hm</think>Bye<|im_end|>"]
        words = ["What is 1+2?", "", "3", "It is 3", "Sure?", "Yes"]
        assert [message["content"] for message in second.messages] == words
        # By ids: those of the first answer, odd as they are, from behind its reasoning on.
        retained = first.turns[1].token_ids.tolist()
        retained = retained[len(retained) - len(policy.ids(called)) :]
        events = second.turns[0].token_ids.tolist()
        assert any(events[at : at + len(retained)] == retained for at in range(len(events)))
        assert [part.shape[0] for part in second.routing] == [second.num_tokens - 1]
        assert sum(item.to_rollout(0).num_actions for item in (first, second, third)) == policy.tokens

    run(test, policy, chat=chat, prompt=PROMPT, config=replace(CONFIG, max_turns=9))


def test_a_stream_has_reasoning_in_a_field_of_its_own() -> None:
    chat = chat_of(QWEN3)

    async def test(served: Served) -> None:
        thoughts, text = "", ""
        async for chunk in await served.create(ASK, stream=True):
            for choice in chunk.choices:
                thoughts += getattr(choice.delta, "reasoning_content", None) or ""
                text += choice.delta.content or ""
        assert (thoughts, text) == ("fine", "It is 3")

    run(test, Says(chat, "<think>\nfine\n</think>\n\nIt is 3"), chat=chat)


def test_reasoning_without_an_end_is_no_answer() -> None:
    chat = chat_of(QWEN3)

    async def test(served: Served) -> None:
        answer = await served.create(ASK)
        assert answer.choices[0].message.content == "" and answer.choices[0].message.reasoning_content == "I add"
        assert answer.choices[0].finish_reason == "length"
        await served.create([*ASK, answer.choices[0].message, *ASK])
        _, second = served.recording.collect_branches()
        question = "<|im_start|>user\nWhat is 1+2?<|im_end|>\n<|im_start|>assistant\n"
        assert chat.decode(second.turns[0].token_ids) == f"{question}<|im_end|>\n{question}"

    run(test, Says(chat, "<think>I add...", "3"), chat=chat)
