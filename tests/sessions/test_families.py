"""A call, its result and a further question in the formats of all families."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from scripted import CHAT, CONFIG
from serving import PARAMS
from templates import PUBLISHED

from megarl.chat_format.chat_template import Chat
from megarl.engine.generation import Generation
from megarl.engine.tool_calls import Call, Reply
from megarl.rollout.session_server.recording import Around, Recording
from megarl.rollout.session_server.rendering import Rendering
from megarl.rollout.session_server.requests import Asked, normal
from megarl.types import Prompt, ids_of

TOOLS = (CHAT.tools["calculator"].schema,)
ASK: Any = {"role": "user", "content": "What is 1+2?"}


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("name", PUBLISHED)
def test_a_conversation_in_the_format_of_a_family(name: str, cut: bool) -> None:
    """cut: the second answer has no end, which comes before what follows it then."""
    family = PUBLISHED[name]
    chat = Chat(family.tokenizer(), CHAT.tools)
    lines = [family.call + family.after_call, "3" + ("" if cut else family.after_answer), "Yes" + family.after_answer]
    asked: list[str] = []

    class Says:
        async def generate(self, ids: Any, params: dict[str, Any], routed: int = 0) -> Generation:
            asked.append(chat.text(ids))
            tokens = ids_of(chat.tokenizer.encode(lines[len(asked) - 1], add_special_tokens=False))
            ended = int(tokens[-1]) in chat.ends
            return Generation(tokens, np.zeros(len(tokens), np.float32), "stop" if ended else "length", 0)

        async def stop(self) -> None: ...

    async def parse(text: str, schemas: Sequence[dict[str, Any]]) -> Reply:
        return Reply("", (Call("calculator", {"expression": "1+2"}),)) if family.call.endswith(text) else Reply(text)

    recording = Recording(Around(Rendering(chat, parse), CONFIG), "", Prompt("p", (ASK,)), Says(), PARAMS)

    async def converse() -> None:
        messages: list[Any] = [ASK]
        for turn in range(3):
            request = Asked(normal(messages), TOOLS)
            (choice,) = (await recording.answer(request, recording.place(request))).choices
            messages.append(choice.message)
            calls = choice.message.get("tool_calls", [])
            assert len(calls) == (turn == 0)
            messages += [{"role": "tool", "tool_call_id": one["id"], "content": "3"} for one in calls]
            messages += [] if calls else [{"role": "user", "content": "Sure?"}]

    asyncio.run(converse())
    (branch,) = recording.branches()
    texts = [chat.text(turn.token_ids) for turn in branch.turns]
    assert texts[1] == lines[0] and texts[2] == family.observation and texts[3] == lines[1] and texts[5] == lines[2]
    assert texts[4].count("Sure?") == 1 and asked[2] == "".join(texts[:5])
    if cut:
        assert texts[4].startswith(family.after_call if name != "glm" else "<|user|>")
    assert recording.figures.forks == 0 and [turn.is_action for turn in branch.turns] == [False, True] * 3
