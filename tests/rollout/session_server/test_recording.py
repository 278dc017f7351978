"""Answers that are told while they are written: what has gone out is the beginning of what is recorded in the end."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from typing import Any
from urllib.parse import urlsplit

import openai
import pytest
import tiny_models
from hypothesis import given
from hypothesis import strategies as st
from scripted import CHAT, call, ids
from serving import ASK, Numbered, Served, run

from megarl.chat_format.chat_template import ChatTemplate
from megarl.engine.engine_protocol import Generation
from megarl.rollout.session_server.requests import CompletionRequest
from megarl.rollout.session_server.responses import StreamedResponse
from megarl.types import as_token_ids

pytestmark = pytest.mark.alone

TOOLS = [CHAT.tools["calculator"].schema]


class Spoken(Numbered):
    """Says its lines token by token, as often as `go` is released."""

    def __init__(self, *lines: str) -> None:
        super().__init__(*lines)
        self.go, self.cancelled = asyncio.Semaphore(0), 0

    async def generate(
        self, context: Any, params: dict[str, Any], routed: int = 0, on_tokens: Any = None
    ) -> Generation:
        said = await super().generate(context, params, routed)
        for token in said.token_ids.tolist() if on_tokens is not None else ():
            try:
                await self.go.acquire()
            except asyncio.CancelledError:
                self.cancelled += 1
                raise
            on_tokens(as_token_ids([token]))
        return said


def released(policy: Spoken, times: int) -> None:
    for _ in range(times):
        policy.go.release()


def test_words_go_out_while_the_policy_writes() -> None:
    policy = Spoken("It is 3, I say")

    async def test(served: Served) -> None:
        stream = await served.create(ASK, stream=True, stream_options={"include_usage": True})
        heard = ""
        while len(heard) < 4:  # nothing but one token after the other is there
            released(policy, 1)
            async for chunk in stream:
                heard += chunk.choices[0].delta.content or ""
                if chunk.choices[0].delta.content:
                    break
                released(policy, 1)
        assert heard and "It is 3, I say".startswith(heard) and not served.recording.tree.find_leaves()
        released(policy, 100)
        chunks = [chunk async for chunk in stream]
        heard += "".join(item.delta.content or "" for chunk in chunks for item in chunk.choices)
        assert heard == "It is 3, I say"
        assert chunks[-1].usage.completion_tokens == len(ids(heard)) + 1 and chunks[-1].choices == []
        assert served.texts()[0][1] == "*It is 3, I say<|im_end|>"
        await served.create([*ASK, {"role": "assistant", "content": heard}, *ASK])
        assert served.recording.metrics.forks == 0

    run(test, policy)


def test_a_client_that_hangs_up_in_the_middle_ends_what_it_asked_for() -> None:
    policy = Spoken("It is 3", "It is 4")

    async def test(served: Served) -> None:
        stream = await served.create(ASK, stream=True)
        released(policy, 4)
        async for chunk in stream:
            if chunk.choices[0].delta.content:
                break
        await stream.close()
        while not policy.cancelled:
            await asyncio.sleep(0.01)
        assert not served.recording.tree.find_leaves()  # what it has heard is not trained
        assert (await served.create(ASK)).choices[0].message.content == "It is 4"
        assert [item.status for item in served.recording.collect_branches()] == ["stop"]

    run(test, policy)


@pytest.mark.parametrize("wait", [0.0, 0.02, 0.2])
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_hangs_up_prints_nothing(
    stream: bool, wait: float, caplog: pytest.LogCaptureFixture, recwarn: pytest.WarningsRecorder
) -> None:
    """However early, and although its connection is reset, as that of a process that is killed may be."""
    policy = Spoken("It is 3", "It is 4")

    async def test(served: Served) -> None:
        url = urlsplit(served.recording.base_url)
        body = json.dumps({"model": "policy", "messages": ASK, "stream": stream}).encode()
        lines = [f"POST {url.path}/chat/completions HTTP/1.1", "Host: x", f"Content-Length: {len(body)}"]
        head = "\r\n".join([*lines, f"Authorization: Bearer {served.recording.key}", "", ""]).encode()
        for _ in range(3):
            _, writer = await asyncio.open_connection(url.hostname, url.port)
            writer.write(head + body)
            await writer.drain()
            await asyncio.sleep(wait)
            lingers = struct.pack("ii", 1, 0)
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, lingers)
            writer.transport.abort()
            await asyncio.sleep(0.1)
        released(policy, 100)
        assert (await served.create(ASK)).choices[0].finish_reason == "stop"

    run(test, policy)
    assert [record.getMessage() for record in caplog.records if record.levelname == "ERROR"] == []
    assert [str(item.message) for item in recwarn if "never awaited" in str(item.message)] == []


def test_what_turns_out_otherwise_is_an_error_and_not_recorded() -> None:
    class Odd(Spoken):
        async def generate(self, context: Any, params: Any, routed: int = 0, on_tokens: Any = None) -> Generation:
            on_tokens(as_token_ids(ids("Something else")))
            return await Numbered.generate(self, context, params, routed)

    async def test(served: Served) -> None:
        with pytest.raises(openai.APIError, match="differs from what was streamed"):
            async for _ in await served.create(ASK, stream=True):
                pass
        assert served.recording.collect_branches()[0].status == "aborted"

    run(test, Odd("It is 3"))


def told(chat: ChatTemplate, requested: CompletionRequest, text: str, tail: int | None = None) -> tuple[str, str]:
    """What has gone out of reasoning and content when all but the last tokens have come, one by one."""
    telling = StreamedResponse(chat, requested, "user", lambda name, more: pieces.append(more))
    pieces: list[str] = []
    for token in chat.encode(text)[:tail]:
        telling.add_tokens(as_token_ids([token]))
    assert "".join(pieces) == telling.sent["reasoning_content"] + telling.sent["content"]
    return telling.sent["reasoning_content"], telling.sent["content"]


def test_what_may_become_something_else_is_kept_back() -> None:
    plain, tools = CompletionRequest(tuple(ASK)), CompletionRequest(tuple(ASK), tuple(TOOLS))
    assert told(CHAT, plain, "ä 😀 ü, 1 <tool_call>x") == ("", "ä 😀 ü, 1 <tool_call>x")
    assert told(CHAT, plain, "😀 😀", -1)[1] in ("😀", "")  # no half of it
    assert told(CHAT, tools, f"I add: {call('1+2')}") == ("", "I add:")
    assert told(CHAT, tools, "  first") == ("", "")
    assert told(CHAT, CompletionRequest(tuple(ASK), stop_strings=("\nObs",)), "so\nO") == ("", "so")
    assert told(CHAT, CompletionRequest(tuple(ASK), stop_strings=("\nObs",)), "so\nOb is 1\nObs: 3") == (
        "",
        "so\nOb is 1",
    )
    assert told(CHAT, CompletionRequest(tuple(ASK), logprobs=True), "It is 3") == ("", "")
    assert told(CHAT, plain, "It is 3<|im_end|>") == ("", "It is 3")


def test_reasoning_and_what_follows_it() -> None:
    tokenizer = tiny_models.tokenizer()
    tokenizer.add_tokens(["<think>", "</think>"])
    chat = ChatTemplate(tokenizer)
    requested = CompletionRequest(tuple(ASK))
    assert told(chat, requested, "<think>\nI add") == ("I add", "")
    assert told(chat, requested, "<think>\nI add\n</think>\n\nIt is 3") == ("I add", "It is 3")
    assert told(chat, requested, "I add") == ("", "")  # its end says what it was


@given(st.text(), st.sampled_from([(), ("ab",), (" ", "c")]), st.booleans())
def test_it_is_always_a_beginning(text: str, stops: tuple[str, ...], tools: bool) -> None:
    requested = CompletionRequest(tuple(ASK), tuple(TOOLS) if tools else (), stop_strings=stops)
    full = CHAT.decode(CHAT.encode(text))
    ends = [full.find(stop) for stop in stops if stop in full]
    final = full[: min(ends)] if ends else full
    sent = told(CHAT, requested, text)[1]
    assert final.startswith(sent)
    if not tools and "\ufffd" not in text and not CHAT.control_tokens.filter_ids(CHAT.encode(text)) and not stops:
        assert sent == final.rstrip()
