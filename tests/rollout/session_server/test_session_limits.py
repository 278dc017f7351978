"""Limits of rollouts apply to sessions: turns, context and the length of tool results."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import openai
import pytest
from scripted import CHAT, CONFIG, call, ids
from serving import QUESTION, NumberedPolicy, ServedSession, run_with_server

pytestmark = pytest.mark.alone

TOOLS = [CHAT.tools["calculator"].schema]


def test_max_turns_returns_empty_responses_and_sets_the_status() -> None:
    policy = NumberedPolicy("one", "two", "three", "four")

    async def test(session: ServedSession) -> None:
        messages: list[Any] = [*QUESTION]
        replies = []
        for _ in range(5):
            choice = (await session.create(messages, stream=False)).choices[0]
            replies.append((choice.message.content, choice.finish_reason))
            messages += [choice.message, *QUESTION]
        assert replies == [("one", "stop"), ("two", "stop"), *[("", "length")] * 3]
        assert len(policy.calls) == 2
        chunks = [chunk async for chunk in await session.create(messages, stream=True, n=2)]
        assert {item.index: item.finish_reason for chunk in chunks for item in chunk.choices} == {
            0: "length",
            1: "length",
        }
        (branch,) = session.recording.collect_branches()
        assert (branch.status, branch.num_turns) == ("max_turns", 2)
        assert (session.recording.metrics.over_max_turns, session.recording.metrics.requests) == (4, 2)
        answer = (await session.create([{"role": "user", "content": "anew"}])).choices[0]
        assert answer.message.content == "three"  # another branch counts its own turns
        assert [item.status for item in session.recording.collect_branches()] == ["max_turns", "stop"]

    run_with_server(test, policy, config=replace(CONFIG, max_turns=2))


def test_repeated_requests_past_max_turns_are_an_error() -> None:
    async def test(session: ServedSession) -> None:
        messages: list[Any] = [*QUESTION, (await session.create(QUESTION)).choices[0].message, *QUESTION]
        with pytest.raises(openai.BadRequestError, match=r"rollout\.max_turns") as refused:
            while True:
                assert (await session.create(messages)).choices[0].message.content == ""
        assert refused.value.code == "max_turns_exceeded"
        assert [item.status for item in session.recording.collect_branches()] == ["max_turns"]

    run_with_server(test, NumberedPolicy("one"), config=replace(CONFIG, max_turns=1))


def test_truncates_tool_results_in_the_middle() -> None:
    policy = NumberedPolicy(call("1+2"), "Done", "Bye")
    flood = "begin " + "1+2 " * 200 + "end"

    async def test(session: ServedSession) -> None:
        message = (await session.create(QUESTION, tools=TOOLS)).choices[0].message
        result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": flood}
        messages: list[Any] = [*QUESTION, message, result]
        for _ in range(2):  # the second request reuses the tokens
            await session.create(messages, tools=TOOLS)
        first_text, second_text = (texts[2] for texts in session.texts())
        assert (
            first_text == second_text
            and "tokens cut) ..." in first_text
            and "begin" in first_text
            and "end\n</tool_response>" in first_text
        )
        assert len(ids(first_text)) < 90
        assert session.recording.metrics.observations_truncated == 1
        branch = session.recording.collect_branches()[0]
        assert branch.messages[2]["content"] in first_text and branch.messages[2]["content"] != flood
        assert branch.status == "stop"
        await session.create([{"role": "system", "content": "s"}, *messages], tools=TOOLS)
        assert "tokens cut) ..." in session.texts()[-1][0]  # also when all is rendered again
        assert session.recording.metrics.observations_truncated == 2

    run_with_server(test, policy, config=replace(CONFIG, max_tool_response_tokens=40))


def test_rejects_oversized_messages_without_encoding_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Encoding a megabyte would take seconds and block other sessions."""
    read, encode = [0], CHAT.encode

    def count_and_encode(text: str) -> list[int]:
        read[0] += len(text)
        return encode(text)

    monkeypatch.setattr(CHAT, "encode", count_and_encode)
    flood = "1+2 " * 250_000
    long_call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": f'{{"x": "{flood}"}}'}}
    calling = {"role": "assistant", "content": None, "tool_calls": [long_call]}

    async def test(session: ServedSession) -> None:
        answer = (await session.create(QUESTION)).choices[0].message
        for messages in (
            [{"role": "user", "content": flood}],
            [*QUESTION, answer, {"role": "user", "content": flood}],
            [*QUESTION, calling, {"role": "tool", "tool_call_id": "c", "content": "3"}],
        ):
            with pytest.raises(
                openai.BadRequestError, match=r"more than \d+ tokens, .*rollout\.max_context"
            ) as refused:
                await session.create(messages)
            assert refused.value.code == "context_length_exceeded"
        assert read[0] < 200_000

    run_with_server(test, NumberedPolicy("one"))


def test_truncates_tool_results_to_fit_the_context() -> None:
    async def test(session: ServedSession) -> None:
        message = (await session.create(QUESTION, tools=TOOLS)).choices[0].message
        result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "1+2 " * 400}
        assert (await session.create([*QUESTION, message, result], tools=TOOLS)).choices[0].message.content == "Done"
        (branch,) = session.recording.collect_branches()
        assert branch.num_tokens < 500 and session.recording.metrics.observations_truncated == 1

    run_with_server(test, NumberedPolicy(call("1+2"), "Done"), config=replace(CONFIG, max_context=500))
