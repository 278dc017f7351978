"""Reasoning, with templates like those of Qwen 3 and DeepSeek R1, which drop it after the next question."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import tiny_models
from scripted import CHAT, CONFIG, PROMPT, call
from serving import QUESTION, NumberedPolicy, ServedSession, run_with_server

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


def load_chat(template: str) -> ChatTemplate:
    tokenizer = tiny_models.tokenizer()
    tokenizer.add_tokens(["<think>", "</think>"])
    tokenizer.chat_template = template
    return ChatTemplate(tokenizer, CHAT.tools)


class ReasoningPolicy(NumberedPolicy):
    """`NumberedPolicy` with the tokenizer of this chat."""

    def __init__(self, chat: ChatTemplate, *lines: str) -> None:
        super().__init__(*lines)
        self.chat = chat

    def ids(self, text: str) -> list[int]:
        return list(self.chat.tokenizer.encode(text, add_special_tokens=False))


@pytest.mark.parametrize(("template", "opening"), [(QWEN3, ""), (R1, "<think>\n")])
def test_drops_reasoning_by_token_ids_after_the_next_question(template: str, opening: str) -> None:
    chat = load_chat(template)
    opened_by_policy = "" if opening else "<think>\n"
    odd_call = f"{opened_by_policy}I   add\n</think>\n\n{call('1+2')}"
    policy = ReasoningPolicy(
        chat,
        odd_call,
        f"{opened_by_policy}fine</think>\n\nIt is 3",
        f"{opened_by_policy}sure\n</think>\n\nYes",
        f"{opened_by_policy}hm</think>Bye",
    )

    async def test(session: ServedSession) -> None:
        answer = await session.create(QUESTION, tools=TOOLS)
        message = answer.choices[0].message
        assert message.content is None and message.reasoning_content == "I   add" and message.tool_calls
        messages: list[Any] = [*QUESTION, message.model_dump(exclude={"reasoning_content"})]
        messages += [{"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "3"}]
        messages += [(await session.create(messages, tools=TOOLS)).choices[0].message]  # type: ignore[list-item]
        assert session.recording.metrics.forks == 0  # it stays until the next question
        messages += [{"role": "user", "content": "Sure?"}]
        messages += [(await session.create(messages, tools=TOOLS)).choices[0].message]  # type: ignore[list-item]
        assert session.recording.metrics.forks == 1
        messages += [{"role": "user", "content": "Bye"}]
        await session.create(messages, tools=TOOLS)
        assert session.recording.metrics.forks == 2

        first, second, third = session.recording.collect_branches()
        branches = [item.branch for item in (first, second, third) if item.branch is not None]
        assert [(item.number, item.forks) for item in branches] == [(0, 2), (1, 2), (2, 2)]
        texts = [
            [("*" if t.is_action else "") + chat.decode(t.token_ids) for t in item.turns]
            for item in (first, second, third)
        ]
        prefix = "<|im_start|>assistant\n"
        question = f"<|im_start|>user\nWhat is 1+2?<|im_end|>\n{prefix}"
        result = "\n<|im_start|>user\n<tool_response>\n3\n</tool_response><|im_end|>\n"
        rendered_call = f"{call('1+2')}<|im_end|>"
        assert texts[0] == [
            f"{question}{opening}",
            f"*{odd_call}<|im_end|>",
            f"{result}{prefix}{opening}",
            f"*{opened_by_policy}fine</think>\n\nIt is 3<|im_end|>",
        ]
        without = (
            f"{question}{rendered_call}{result}{prefix}It is 3<|im_end|>\n<|im_start|>user\nSure?<|im_end|>\n{prefix}"
        )
        assert texts[1] == [f"{without}{opening}", f"*{opened_by_policy}sure\n</think>\n\nYes<|im_end|>"]
        final_text = f"{without}Yes<|im_end|>\n<|im_start|>user\nBye<|im_end|>\n{prefix}"
        assert texts[2] == [f"{final_text}{opening}", f"*{opened_by_policy}hm</think>Bye<|im_end|>"]
        contents = ["What is 1+2?", "", "3", "It is 3", "Sure?", "Yes"]
        assert [message["content"] for message in second.messages] == contents
        # The second branch repeats the ids of the first response after its reasoning, as sampled.
        content_ids = first.turns[1].token_ids.tolist()
        content_ids = content_ids[len(content_ids) - len(policy.ids(rendered_call)) :]
        second_ids = second.turns[0].token_ids.tolist()
        assert any(
            second_ids[position : position + len(content_ids)] == content_ids for position in range(len(second_ids))
        )
        assert [part.shape[0] for part in second.routing] == [second.num_tokens - 1]
        assert sum(item.to_rollout(0).num_actions for item in (first, second, third)) == policy.tokens

    run_with_server(test, policy, chat=chat, prompt=PROMPT, config=replace(CONFIG, max_turns=9))


def test_stream_has_reasoning_in_its_own_field() -> None:
    chat = load_chat(QWEN3)

    async def test(session: ServedSession) -> None:
        thoughts, text = "", ""
        async for chunk in await session.create(QUESTION, stream=True):
            for choice in chunk.choices:
                thoughts += getattr(choice.delta, "reasoning_content", None) or ""
                text += choice.delta.content or ""
        assert (thoughts, text) == ("fine", "It is 3")

    run_with_server(test, ReasoningPolicy(chat, "<think>\nfine\n</think>\n\nIt is 3"), chat=chat)


def test_unfinished_reasoning_has_no_content() -> None:
    chat = load_chat(QWEN3)

    async def test(session: ServedSession) -> None:
        answer = await session.create(QUESTION)
        assert answer.choices[0].message.content == "" and answer.choices[0].message.reasoning_content == "I add"
        assert answer.choices[0].finish_reason == "length"
        await session.create([*QUESTION, answer.choices[0].message, *QUESTION])
        _, second = session.recording.collect_branches()
        question = "<|im_start|>user\nWhat is 1+2?<|im_end|>\n<|im_start|>assistant\n"
        assert chat.decode(second.turns[0].token_ids) == f"{question}<|im_end|>\n{question}"

    run_with_server(test, ReasoningPolicy(chat, "<think>I add...", "3"), chat=chat)
