"""`ChatConversation` with a scripted policy."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from scripted import CHAT, CONFIG, TOKENIZER, FailingPolicy, ScriptedPolicy, call, parse

from megarl.chat_conversation import ChatConversation, IncrementalDetokenizer, describe_tools, printable
from megarl.chat_format.chat_template import ChatTemplate
from megarl.config import Config
from megarl.engine.engine_protocol import RequestFailed
from megarl.environments.catalog import load_catalog
from megarl.environments.protocol import ToolResult
from megarl.types import as_token_ids

pytestmark = pytest.mark.alone

GUESS = "megarl.environments.ready.guess:Guess"


class Screen:
    def __init__(self) -> None:
        self.shown: list[str] = [""]

    def on_text(self, text: str) -> None:
        self.shown[-1] += text

    def on_turn_end(self) -> None:
        self.shown.append("")

    def on_tool_result(self, name: str, result: ToolResult) -> None:
        self.shown.insert(-1, f"[{name}] {result.text}")


def run_chat(
    script: Callable[[ChatConversation], Coroutine[Any, Any, None]],
    chat: ChatTemplate = CHAT,
    row: dict[str, Any] | None = None,
    **changes: Any,
) -> Screen:
    output, config = Screen(), dataclasses.replace(Config(), rollout=dataclasses.replace(CONFIG, **changes))

    async def run() -> None:
        conversation = ChatConversation(config, chat, output, row or {})
        try:
            await script(conversation)
        finally:
            await conversation.close()

    asyncio.run(run())
    return output


def test_chat_calls_tools_and_resets() -> None:
    policy = ScriptedPolicy(call("1+2"), "It is 3.", "Yes.", "Who?")

    async def script(conversation: ChatConversation) -> None:
        assert await conversation.send("What is 1+2?", policy, parse) == ""
        roles = [message["role"] for message in conversation.messages]
        assert roles == ["user", "assistant", "tool", "assistant"]
        assert await conversation.send("Sure?", policy, parse) == ""
        assert len(conversation.messages) == 6
        await conversation.reset()
        assert await conversation.send("Hello", policy, parse) == ""
        assert [message["content"] for message in conversation.messages] == ["Hello", "Who?"]

    output = run_chat(script)
    assert output.shown == [call("1+2"), "[calculator] 3", "It is 3.", "Yes.", "Who?", ""]
    second = TOKENIZER.decode(policy.requests[2][0])
    assert "It is 3.<|im_end|>" in second and second.rstrip().endswith("Sure?<|im_end|>\n<|im_start|>assistant")
    assert "Sure?" not in TOKENIZER.decode(policy.requests[3][0])


def test_calls_tools_again_in_a_later_message() -> None:
    policy = ScriptedPolicy(call("1+2"), "3", call("2+2"), "4")

    async def script(conversation: ChatConversation) -> None:
        await conversation.send("1+2?", policy, parse)
        await conversation.send("2+2?", policy, parse)

    assert [line for line in run_chat(script).shown if line.startswith("[")] == ["[calculator] 3", "[calculator] 4"]


def test_environment_persists_across_messages() -> None:
    catalog = load_catalog(dataclasses.replace(CONFIG, environments=(GUESS,)))
    chat = ChatTemplate(TOKENIZER, catalog.tools, environments=catalog.environments)
    tool_call_text = '<tool_call>\n{{"name": "guess", "arguments": {{"number": {}}}}}\n</tool_call>'
    policy = ScriptedPolicy(
        tool_call_text.format(50), "Lower?", tool_call_text.format(17), "Done.", tool_call_text.format(1), "Again."
    )

    async def script(conversation: ChatConversation) -> None:
        assert await conversation.send("Find it.", policy, parse) == ""
        assert await conversation.send("Go on.", policy, parse) == ""
        assert await conversation.send("And now?", policy, parse) == ""

    output = run_chat(script, chat, {"ground_truth": 17})
    answers = [line for line in output.shown if line.startswith("[")]
    assert answers == ["[guess] lower", "[guess] right", "[guess] right, and already guessed"]
    assert describe_tools(chat) == "the environment Guess, guess"

    async def without(conversation: ChatConversation) -> None:
        assert "reset raised" in await conversation.send("Find it.", policy, parse)
        assert conversation.messages == ()

    run_chat(without, chat)


def test_reset_restarts_the_environment_and_keeps_the_system_prompt() -> None:
    catalog = load_catalog(dataclasses.replace(CONFIG, environments=(GUESS,)))
    chat = ChatTemplate(TOKENIZER, catalog.tools, environments=catalog.environments)
    tool_call_text = '<tool_call>\n{"name": "guess", "arguments": {"number": 17}}\n</tool_call>'
    policy = ScriptedPolicy(tool_call_text, "Found.", tool_call_text, "Found.")
    output = Screen()

    async def script() -> None:
        conversation = ChatConversation(Config(), chat, output, {"ground_truth": 17}, "Be quick.")
        for _ in range(2):
            assert await conversation.send("Find it.", policy, parse) == ""
            assert conversation.messages[0] == {"role": "system", "content": "Be quick."}
            await conversation.reset()
        await conversation.close()

    asyncio.run(script())
    assert [line for line in output.shown if line.startswith("[")] == ["[guess] right"] * 2


def test_reports_stop_reasons_and_drops_failed_messages() -> None:
    async def script(conversation: ChatConversation) -> None:
        assert "aborted: no answer" in await conversation.send("a", FailingPolicy(RequestFailed("no answer")), parse)
        assert conversation.messages == ()
        always = ScriptedPolicy(call("1+1"))
        assert await conversation.send("b", always, parse) == "stopped by rollout.max_turns"
        long = ScriptedPolicy("word " * 3000)
        assert "rollout.max_context" in await conversation.send("x " * 1000, long, parse)
        assert len(long.requests) == 0

    run_chat(script)


def test_cancelled_answer_leaves_the_conversation_unchanged() -> None:
    async def script(conversation: ChatConversation) -> None:
        await conversation.send("a", ScriptedPolicy("b"), parse)
        before = conversation.messages
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await conversation.send("c", FailingPolicy(None), parse)  # type: ignore[arg-type]
        assert conversation.messages == before
        assert await conversation.send("d", ScriptedPolicy("e"), parse) == ""

    run_chat(script)


def test_detokenizer_emits_whole_characters() -> None:
    emitted: list[str] = []
    detokenizer = IncrementalDetokenizer(CHAT, emitted.append)
    for token in TOKENIZER.encode("naïve 🙂 ok", add_special_tokens=False):
        detokenizer.add(as_token_ids([token]))
    detokenizer.add(as_token_ids([CHAT.end_of_turn]))
    detokenizer.end()
    assert "".join(emitted) == "naïve 🙂 ok" and not any("\N{REPLACEMENT CHARACTER}" in part for part in emitted)


def test_escapes_terminal_control_characters() -> None:
    assert printable("a\x1b[2Jb\r\x07\x9b\u202ec\nd") == "a\\x1b[2Jb\\x0d\\x07\\x9b\\x202ec\nd"
