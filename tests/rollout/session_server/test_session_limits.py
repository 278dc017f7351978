"""What bounds a rollout bounds an agent's, too: turns of the policy, and what tools may say."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import openai
import pytest
from scripted import CHAT, CONFIG, call, ids
from serving import ASK, Numbered, Served, run

pytestmark = pytest.mark.alone

TOOLS = [CHAT.tools["calculator"].schema]


def test_behind_the_last_turn_a_client_hears_nothing_and_its_branch_says_why() -> None:
    policy = Numbered("one", "two", "three", "four")

    async def test(served: Served) -> None:
        messages: list[Any] = [*ASK]
        said = []
        for _ in range(5):
            choice = (await served.create(messages, stream=False)).choices[0]
            said.append((choice.message.content, choice.finish_reason))
            messages += [choice.message, *ASK]
        assert said == [("one", "stop"), ("two", "stop"), *[("", "length")] * 3]
        assert len(policy.calls) == 2
        chunks = [chunk async for chunk in await served.create(messages, stream=True, n=2)]
        assert {item.index: item.finish_reason for chunk in chunks for item in chunk.choices} == {
            0: "length",
            1: "length",
        }
        (branch,) = served.recording.collect_branches()
        assert (branch.status, branch.num_turns) == ("max_turns", 2)
        assert (served.recording.metrics.over_max_turns, served.recording.metrics.requests) == (4, 2)
        answer = (await served.create([{"role": "user", "content": "anew"}])).choices[0]
        assert answer.message.content == "three"  # another branch has turns of its own
        assert [item.status for item in served.recording.collect_branches()] == ["max_turns", "stop"]

    run(test, policy, config=replace(CONFIG, max_turns=2))


def test_an_agent_that_asks_for_ever_is_told_by_an_error() -> None:
    async def test(served: Served) -> None:
        messages: list[Any] = [*ASK, (await served.create(ASK)).choices[0].message, *ASK]
        with pytest.raises(openai.BadRequestError, match=r"rollout\.max_turns") as refused:
            while True:
                assert (await served.create(messages)).choices[0].message.content == ""
        assert refused.value.code == "max_turns_exceeded"
        assert [item.status for item in served.recording.collect_branches()] == ["max_turns"]

    run(test, Numbered("one"), config=replace(CONFIG, max_turns=1))


def test_results_are_cut_by_tokens_head_and_tail_kept() -> None:
    policy = Numbered(call("1+2"), "Done", "Bye")
    flood = "begin " + "1+2 " * 200 + "end"

    async def test(served: Served) -> None:
        message = (await served.create(ASK, tools=TOOLS)).choices[0].message
        result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": flood}
        messages: list[Any] = [*ASK, message, result]
        for _ in range(2):  # the second time by the same tokens
            await served.create(messages, tools=TOOLS)
        shown, also = (texts[2] for texts in served.texts())
        assert shown == also and "tokens cut) ..." in shown and "begin" in shown and "end\n</tool_response>" in shown
        assert len(ids(shown)) < 90
        assert served.recording.metrics.observations_truncated == 1
        branch = served.recording.collect_branches()[0]
        assert branch.messages[2]["content"] in shown and branch.messages[2]["content"] != flood
        assert branch.status == "stop"
        await served.create([{"role": "system", "content": "s"}, *messages], tools=TOOLS)
        assert "tokens cut) ..." in served.texts()[-1][0]  # also where all is rendered anew
        assert served.recording.metrics.observations_truncated == 2

    run(test, policy, config=replace(CONFIG, max_tool_response_tokens=40))


def test_a_flood_is_refused_without_being_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A megabyte takes seconds, in which no other session would be answered."""
    read, local = [0], CHAT.encode

    def counting(text: str) -> list[int]:
        read[0] += len(text)
        return local(text)

    monkeypatch.setattr(CHAT, "encode", counting)
    flood = "1+2 " * 250_000
    call_of_it = {"id": "c", "type": "function", "function": {"name": "f", "arguments": f'{{"x": "{flood}"}}'}}
    calling = {"role": "assistant", "content": None, "tool_calls": [call_of_it]}

    async def test(served: Served) -> None:
        answer = (await served.create(ASK)).choices[0].message
        for messages in (
            [{"role": "user", "content": flood}],
            [*ASK, answer, {"role": "user", "content": flood}],
            [*ASK, calling, {"role": "tool", "tool_call_id": "c", "content": "3"}],
        ):
            with pytest.raises(
                openai.BadRequestError, match=r"more than \d+ tokens, .*rollout\.max_context"
            ) as refused:
                await served.create(messages)
            assert refused.value.code == "context_length_exceeded"
        assert read[0] < 200_000

    run(test, Numbered("one"))


def test_results_are_cut_to_the_room_there_is() -> None:
    async def test(served: Served) -> None:
        message = (await served.create(ASK, tools=TOOLS)).choices[0].message
        result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "1+2 " * 400}
        assert (await served.create([*ASK, message, result], tools=TOOLS)).choices[0].message.content == "Done"
        (branch,) = served.recording.collect_branches()
        assert branch.num_tokens < 500 and served.recording.metrics.observations_truncated == 1

    run(test, Numbered(call("1+2"), "Done"), config=replace(CONFIG, max_context=500))
