"""Streamed responses: the streamed text is always a prefix of the recorded text."""

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
from serving import QUESTION, NumberedPolicy, ServedSession, run_with_server

from megarl.chat_format.chat_template import ChatTemplate
from megarl.engine.engine_protocol import NOT_RECORDED, Generation, RecordedPrefix
from megarl.rollout.session_server.requests import CompletionRequest
from megarl.rollout.session_server.responses import StreamedResponse
from megarl.types import as_token_ids

pytestmark = pytest.mark.alone

TOOLS = [CHAT.tools["calculator"].schema]


class StreamingPolicy(NumberedPolicy):
    """Streams its lines token by token, one for each release of `go`."""

    def __init__(self, *lines: str) -> None:
        super().__init__(*lines)
        self.go, self.cancelled = asyncio.Semaphore(0), 0

    async def generate(
        self, context: Any, params: dict[str, Any], recorded: RecordedPrefix = NOT_RECORDED, on_tokens: Any = None
    ) -> Generation:
        generation = await super().generate(context, params, recorded)
        for token in generation.token_ids.tolist() if on_tokens is not None else ():
            try:
                await self.go.acquire()
            except asyncio.CancelledError:
                self.cancelled += 1
                raise
            on_tokens(as_token_ids([token]))
        return generation


def release(policy: StreamingPolicy, times: int) -> None:
    for _ in range(times):
        policy.go.release()


def test_streams_text_while_the_policy_generates() -> None:
    policy = StreamingPolicy("It is 3, I say")

    async def test(session: ServedSession) -> None:
        stream = await session.create(QUESTION, stream=True, stream_options={"include_usage": True})
        received = ""
        while len(received) < 4:  # tokens arrive one by one
            release(policy, 1)
            async for chunk in stream:
                received += chunk.choices[0].delta.content or ""
                if chunk.choices[0].delta.content:
                    break
                release(policy, 1)
        assert received and "It is 3, I say".startswith(received) and not session.recording.tree.find_leaves()
        release(policy, 100)
        chunks = [chunk async for chunk in stream]
        received += "".join(item.delta.content or "" for chunk in chunks for item in chunk.choices)
        assert received == "It is 3, I say"
        assert chunks[-1].usage.completion_tokens == len(ids(received)) + 1 and chunks[-1].choices == []
        assert session.texts()[0][1] == "*It is 3, I say<|im_end|>"
        await session.create([*QUESTION, {"role": "assistant", "content": received}, *QUESTION])
        assert session.recording.metrics.forks == 0

    run_with_server(test, policy)


def test_disconnect_during_a_stream_cancels_the_request() -> None:
    policy = StreamingPolicy("It is 3", "It is 4")

    async def test(session: ServedSession) -> None:
        stream = await session.create(QUESTION, stream=True)
        release(policy, 4)
        async for chunk in stream:
            if chunk.choices[0].delta.content:
                break
        await stream.close()
        while not policy.cancelled:
            await asyncio.sleep(0.01)
        assert not session.recording.tree.find_leaves()  # the received part is not recorded
        assert (await session.create(QUESTION)).choices[0].message.content == "It is 4"
        assert [item.status for item in session.recording.collect_branches()] == ["stop"]

    run_with_server(test, policy)


@pytest.mark.parametrize("wait", [0.0, 0.02, 0.2])
@pytest.mark.parametrize("stream", [False, True])
def test_disconnect_logs_no_error(
    stream: bool, wait: float, caplog: pytest.LogCaptureFixture, recwarn: pytest.WarningsRecorder
) -> None:
    """At any time, and with a connection reset as after a killed process."""
    policy = StreamingPolicy("It is 3", "It is 4")

    async def test(session: ServedSession) -> None:
        url = urlsplit(session.recording.base_url)
        body = json.dumps({"model": "policy", "messages": QUESTION, "stream": stream}).encode()
        lines = [f"POST {url.path}/chat/completions HTTP/1.1", "Host: x", f"Content-Length: {len(body)}"]
        headers = "\r\n".join([*lines, f"Authorization: Bearer {session.recording.key}", "", ""]).encode()
        for _ in range(3):
            _, writer = await asyncio.open_connection(url.hostname, url.port)
            writer.write(headers + body)
            await writer.drain()
            await asyncio.sleep(wait)
            linger = struct.pack("ii", 1, 0)
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            writer.transport.abort()
            await asyncio.sleep(0.1)
        release(policy, 100)
        assert (await session.create(QUESTION)).choices[0].finish_reason == "stop"

    run_with_server(test, policy)
    assert [record.getMessage() for record in caplog.records if record.levelname == "ERROR"] == []
    assert [str(item.message) for item in recwarn if "never awaited" in str(item.message)] == []


def test_final_response_that_differs_from_the_stream_is_an_error() -> None:
    class InconsistentPolicy(StreamingPolicy):
        async def generate(
            self, context: Any, params: Any, recorded: RecordedPrefix = NOT_RECORDED, on_tokens: Any = None
        ) -> Generation:
            on_tokens(as_token_ids(ids("Something else")))
            return await NumberedPolicy.generate(self, context, params, recorded)

    async def test(session: ServedSession) -> None:
        with pytest.raises(openai.APIError, match="differs from what was streamed"):
            async for _ in await session.create(QUESTION, stream=True):
                pass
        assert session.recording.collect_branches()[0].status == "aborted"

    run_with_server(test, InconsistentPolicy("It is 3"))


def stream_text(
    chat: ChatTemplate, request: CompletionRequest, text: str, num_tokens: int | None = None
) -> tuple[str, str]:
    """Add the tokens up to `num_tokens` one by one; return the streamed reasoning and content."""
    response = StreamedResponse(chat, request, "user", lambda name, delta: deltas.append(delta))
    deltas: list[str] = []
    for token in chat.encode(text)[:num_tokens]:
        response.add_tokens(as_token_ids([token]))
    assert "".join(deltas) == response.sent["reasoning_content"] + response.sent["content"]
    return response.sent["reasoning_content"], response.sent["content"]


def test_withholds_text_that_may_still_change() -> None:
    without_tools, with_tools = CompletionRequest(tuple(QUESTION)), CompletionRequest(tuple(QUESTION), tuple(TOOLS))
    assert stream_text(CHAT, without_tools, "ä 😀 ü, 1 <tool_call>x") == ("", "ä 😀 ü, 1 <tool_call>x")
    assert stream_text(CHAT, without_tools, "😀 😀", -1)[1] in ("😀", "")  # no partial character
    assert stream_text(CHAT, with_tools, f"I add: {call('1+2')}") == ("", "I add:")
    assert stream_text(CHAT, with_tools, "  first") == ("", "")
    assert stream_text(CHAT, CompletionRequest(tuple(QUESTION), stop_strings=("\nObs",)), "so\nO") == ("", "so")
    assert stream_text(CHAT, CompletionRequest(tuple(QUESTION), stop_strings=("\nObs",)), "so\nOb is 1\nObs: 3") == (
        "",
        "so\nOb is 1",
    )
    assert stream_text(CHAT, CompletionRequest(tuple(QUESTION), logprobs=True), "It is 3") == ("", "")
    assert stream_text(CHAT, without_tools, "It is 3<|im_end|>") == ("", "It is 3")


def test_streams_reasoning_and_content_separately() -> None:
    tokenizer = tiny_models.tokenizer()
    tokenizer.add_tokens(["<think>", "</think>"])
    chat = ChatTemplate(tokenizer)
    request = CompletionRequest(tuple(QUESTION))
    assert stream_text(chat, request, "<think>\nI add") == ("I add", "")
    assert stream_text(chat, request, "<think>\nI add\n</think>\n\nIt is 3") == ("I add", "It is 3")
    assert stream_text(chat, request, "I add") == ("", "")  # only the closing mark tells what this is


@given(st.text(), st.sampled_from([(), ("ab",), (" ", "c")]), st.booleans())
def test_streamed_text_is_a_prefix_of_the_final_text(text: str, stops: tuple[str, ...], with_tools: bool) -> None:
    request = CompletionRequest(tuple(QUESTION), tuple(TOOLS) if with_tools else (), stop_strings=stops)
    full = CHAT.decode(CHAT.encode(text))
    stop_positions = [full.find(stop) for stop in stops if stop in full]
    final = full[: min(stop_positions)] if stop_positions else full
    sent = stream_text(CHAT, request, text)[1]
    assert final.startswith(sent)
    if not with_tools and "\ufffd" not in text and not CHAT.control_tokens.filter_ids(CHAT.encode(text)) and not stops:
        assert sent == final.rstrip()
