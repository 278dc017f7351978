"""A tool call, its result and a further question in the formats of all model families."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from scripted import CHAT, CONFIG
from serving import PARAMS
from templates import PUBLISHED

from megarl.chat_format.chat_template import ChatTemplate
from megarl.engine.engine_protocol import NOT_RECORDED, Generation, RecordedPrefix
from megarl.engine.tool_calls import ParsedResponse, ToolCall
from megarl.rollout.session_server.recording import AgentSession
from megarl.rollout.session_server.rendering import MessageRenderer
from megarl.rollout.session_server.requests import CompletionRequest, normalize_messages
from megarl.types import Prompt, as_token_ids

pytestmark = pytest.mark.alone

TOOLS = (CHAT.tools["calculator"].schema,)
QUESTION: Any = {"role": "user", "content": "What is 1+2?"}


@pytest.mark.parametrize("truncated", [False, True])
@pytest.mark.parametrize("name", PUBLISHED)
def test_conversation_in_each_model_familys_format(name: str, truncated: bool) -> None:
    """truncated: the second response has no end token; the next observation supplies it."""
    family = PUBLISHED[name]
    chat = ChatTemplate(family.tokenizer(), CHAT.tools)
    lines = [
        family.call + family.after_call,
        "3" + ("" if truncated else family.after_answer),
        "Yes" + family.after_answer,
    ]
    requests: list[str] = []

    class LinePolicy:
        async def generate(
            self, ids: Any, params: dict[str, Any], recorded: RecordedPrefix = NOT_RECORDED, on_tokens: Any = None
        ) -> Generation:
            requests.append(chat.decode(ids))
            tokens = as_token_ids(chat.tokenizer.encode(lines[len(requests) - 1], add_special_tokens=False))
            is_ended = int(tokens[-1]) in chat.end_token_ids
            return Generation(tokens, np.zeros(len(tokens), np.float32), "stop" if is_ended else "length", 0)

        async def stop(self) -> None: ...

    async def parse(text: str, schemas: Sequence[dict[str, Any]]) -> ParsedResponse:
        return (
            ParsedResponse("", (ToolCall("calculator", {"expression": "1+2"}),))
            if family.call.endswith(text)
            else ParsedResponse(text)
        )

    recording = AgentSession(MessageRenderer(chat, parse, CONFIG), "", Prompt("p", (QUESTION,)), LinePolicy(), PARAMS)

    async def converse() -> None:
        messages: list[Any] = [QUESTION]
        for turn in range(3):
            request = CompletionRequest(normalize_messages(messages), TOOLS)
            (choice,) = await recording.answer(request, recording.locate_request(request))
            messages.append(choice.message)
            calls = choice.message.get("tool_calls", [])
            assert len(calls) == (turn == 0)
            messages += [{"role": "tool", "tool_call_id": item["id"], "content": "3"} for item in calls]
            messages += [] if calls else [{"role": "user", "content": "Sure?"}]

    asyncio.run(converse())
    (branch,) = recording.collect_branches()
    texts = [chat.decode(turn.token_ids) for turn in branch.turns]
    assert texts[1] == lines[0] and texts[2] == family.observation and texts[3] == lines[1] and texts[5] == lines[2]
    assert texts[4].count("Sure?") == 1 and requests[2] == "".join(texts[:5])
    if truncated:
        assert texts[4].startswith("<|user|>" if name.startswith("glm") else family.after_call)
    assert recording.metrics.forks == 0 and [turn.is_action for turn in branch.turns] == [False, True] * 3
