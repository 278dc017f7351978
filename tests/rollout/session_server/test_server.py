"""Sessions as OpenAI's own client sees them."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import aiohttp
import httpx
import openai
import pytest
from scripted import CHAT, CONFIG, END, HEAD, PROMPT, call, ids
from serving import ASK, PARAMS, Numbered, Served, run, serving

from megarl.rollout.conversation import Halted
from megarl.types import Branch, as_token_ids

pytestmark = pytest.mark.alone

TOOLS = [CHAT.tools["calculator"].schema]
FIRST = ids("<|im_start|>user\nWhat is 1+2?<|im_end|>\n<|im_start|>assistant\n")


def test_an_answer_and_what_is_recorded_of_it() -> None:
    policy = Numbered("It is 3")

    async def test(served: Served) -> None:
        answer = await served.create(ASK)
        assert answer.choices[0].message.content == "It is 3" and answer.choices[0].finish_reason == "stop"
        assert answer.choices[0].message.tool_calls is None and answer.model == "policy"
        written = len(ids("It is 3")) + 1
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(FIRST), written)
        (branch,) = served.recording.collect_branches()
        assert [turn.token_ids.tolist() for turn in branch.turns] == [list(FIRST), [*ids("It is 3"), END]]
        assert branch.turns[1].is_action and branch.turns[1].logprobs.tolist() == [-1.0 - i for i in range(written)]
        assert branch.status == "stop" and branch.prompt is PROMPT and branch.seed == 5 and branch.num_turns == 1
        assert branch.messages == (*PROMPT.messages, {"role": "assistant", "content": "It is 3"})
        assert branch.routing[0].shape == (len(FIRST) + written - 1, 1, 2)
        rollout = branch.to_rollout(group=3)
        assert rollout.answer == "It is 3" and rollout.num_actions == written
        assert policy.calls[0][1] == {**PARAMS, "max_new_tokens": CONFIG.max_new_tokens}

    run(test, policy)


def test_a_conversation_is_gone_on_with_by_its_ids() -> None:
    """What the policy wrote in its own way, a call with odd spaces, is never written anew."""
    odd = '<tool_call>{"arguments": {"expression":   "1+2"}, "name": "calculator"}</tool_call>'
    policy = Numbered(odd, "It is 3", "Yes")

    async def test(served: Served) -> None:
        messages: list[Any] = [*ASK]
        answer = await served.create(messages, tools=TOOLS)
        assert answer.choices[0].finish_reason == "tool_calls"
        message = answer.choices[0].message
        (called,) = message.tool_calls
        assert message.content is None and called.type == "function" and called.function.name == "calculator"
        assert json.loads(called.function.arguments) == {"expression": "1+2"}
        messages += [message, {"role": "tool", "tool_call_id": called.id, "content": "3"}]
        answer = await served.create(messages, tools=TOOLS)
        messages += [
            answer.choices[0].message.model_dump(),
            {"role": "user", "content": [{"type": "text", "text": "Sure?"}]},
        ]
        assert (await served.create(messages, tools=TOOLS)).choices[0].message.content == "Yes"
        (branch,) = served.recording.collect_branches()
        texts = served.texts()[0]
        assert texts[1:] == [
            f"*{odd}<|im_end|>",
            "\n<|im_start|>user\n<tool_response>\n3\n</tool_response><|im_end|>\n<|im_start|>assistant\n",
            "*It is 3<|im_end|>",
            "\n<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\n",
            "*Yes<|im_end|>",
        ]
        assert (branch.tool_calls, branch.tool_errors, branch.num_turns) == (1, 0, 3)
        assert branch.branch == Branch(0, 0, True) and branch.status and branch.to_rollout(0).branch == branch.branch
        requested = [known for known, *_ in policy.calls]
        assert [routed for _, _, routed, _ in policy.calls] == [0, *(len(known) - 1 for known in _ends(policy)[:-1])]
        assert requested[2] == branch.token_ids.tolist()[: len(requested[2])]
        record = [place for part in branch.routing for place in part[:, 0, 0].tolist()]
        assert record == list(range(branch.num_tokens - 1))
        await served.server.close(served.recording)
        figures = served.server.metrics
        assert (figures.requests, figures.forks, figures.branches) == (3, 0, 1)
        assert figures.drift == 1  # as the template writes the call, it is others than the policy wrote

    run(test, policy)


def _ends(policy: Numbered) -> list[list[int]]:
    return [[*known, *answer.token_ids.tolist()] for known, _, _, answer in policy.calls]


@pytest.mark.parametrize("usage", [False, True])
def test_a_stream_says_the_same(usage: bool) -> None:
    async def test(served: Served) -> None:
        options: Any = {"stream_options": {"include_usage": True}} if usage else {}
        stream = await served.create(ASK, stream=True, tools=TOOLS, logprobs=True, n=2, **options)
        text, calls, finishes, chunks, values = ["", ""], [], {}, [], []
        async for chunk in stream:
            chunks.append(chunk)
            for choice in chunk.choices:
                text[choice.index] += choice.delta.content or ""
                calls += choice.delta.tool_calls or []
                values += choice.logprobs.content if choice.logprobs and choice.index == 1 else []
                if choice.finish_reason:
                    finishes[choice.index] = choice.finish_reason
        assert text == ["", "It is 3"] and finishes == {0: "tool_calls", 1: "stop"}
        assert [(item.index, item.type, item.function.name) for item in calls] == [(0, "function", "calculator")]
        assert chunks[0].choices[0].delta.role == "assistant"
        assert (chunks[-1].usage is not None) == usage and len({chunk.id for chunk in chunks}) == 1
        assert "".join(item.token for item in values) == "It is 3<|im_end|>"
        assert len(served.recording.collect_branches()) == 2

    run(test, Numbered(call("1+2"), "It is 3"))


def test_the_stream_of_a_raw_reader_ends_with_done() -> None:
    async def test(served: Served) -> None:
        async with httpx.AsyncClient(headers={"Authorization": f"Bearer {served.recording.key}"}, timeout=60) as client:
            body = {"model": "policy", "messages": ASK, "stream": True}
            answer = await client.post(f"{served.recording.base_url}/chat/completions", json=body)
        assert answer.headers["content-type"].startswith("text/event-stream")
        events = [line for line in answer.text.split("\n\n") if line]
        assert events[-1] == "data: [DONE]" and all(event.startswith("data: {") for event in events[:-1])

    run(test, Numbered("It is 3"))


def test_choices_are_siblings_with_seeds_of_their_own() -> None:
    policy = Numbered("a", "b", "a", "c")

    async def test(served: Served) -> None:
        answer = await served.create(ASK, n=3, logprobs=True)
        assert [choice.message.content for choice in answer.choices] == ["a", "b", "a"]
        assert [choice.index for choice in answer.choices] == [0, 1, 2]
        first = answer.choices[0].logprobs.content
        assert [item.logprob for item in first] == [-1.0, -2.0] and [item.token for item in first] == [
            "a",
            "<|im_end|>",
        ]
        assert first[0].bytes == list(b"a") and first[0].top_logprobs == []
        assert answer.usage.completion_tokens == 6
        await served.create(ASK)
        seeds = [params["sampling_seed"] for _, params, _, _ in policy.calls]
        assert seeds[0] == 5 and len(set(seeds)) == 4
        assert [texts[1] for texts in served.texts()] == [f"*{item}<|im_end|>" for item in "abac"]
        assert served.recording.metrics.forks == 0

    run(test, policy)


def test_a_stop_string_is_the_engines_and_all_that_was_sampled_is_recorded() -> None:
    policy = Numbered("Thought\nObservation:...", "Done")

    async def test(served: Served) -> None:
        answer = await served.create(ASK, stop=["nothing", "\nObs"])
        assert policy.calls[0][1]["stop"] == ["nothing", "\nObs"]
        message = answer.choices[0].message
        assert (message.content, answer.choices[0].finish_reason) == ("Thought", "stop")
        await served.create([*ASK, message, {"role": "user", "content": "3"}], stop="\nObs")
        assert served.texts()[0][1:] == [
            "*Thought\nObservation:",
            "<|im_end|>\n<|im_start|>user\n3<|im_end|>\n<|im_start|>assistant\n",  # the turn's end is not the policy's
            "*Done<|im_end|>",
        ]

    run(test, policy)


def test_limits_bind_and_a_full_context_is_said_and_gone_on_behind() -> None:
    policy = Numbered("1+2 is 3...")

    async def test(served: Served) -> None:
        answer = await served.create(ASK, max_tokens=4, max_completion_tokens=3)
        assert policy.calls[-1][1]["max_new_tokens"] == 3 and answer.choices[0].finish_reason == "length"
        await served.create([*ASK, *ASK], max_tokens=10**9)
        assert policy.calls[-1][1]["max_new_tokens"] == 60 - len(policy.calls[-1][0])
        long = [*ASK, answer.choices[0].message, {"role": "user", "content": "1+2 " * 40}]
        for _ in range(2):
            with pytest.raises(openai.BadRequestError, match=r"rollout\.max_context") as refused:
                await served.create(long)
            assert refused.value.code == "context_length_exceeded"
        with pytest.raises(openai.BadRequestError):
            await served.create([{"role": "user", "content": "1+2 " * 40}])
        await served.create(ASK)
        assert [branch.status for branch in served.recording.collect_branches()] == ["length"] * 3
        assert served.recording.metrics.refused == 3

    run(test, policy, config=replace(CONFIG, max_context=60))


def test_other_tools_are_another_rendering_and_none_leaves_them_out() -> None:
    policy = Numbered(call("1+2"))

    async def test(served: Served) -> None:
        with_tools = await served.create(ASK, tools=TOOLS, tool_choice="auto")
        without = await served.create(ASK, tools=TOOLS, tool_choice="none")
        assert with_tools.choices[0].message.tool_calls and not without.choices[0].message.tool_calls
        assert without.choices[0].message.content == call("1+2")
        requested = [CHAT.decode(known) for known, *_ in policy.calls]
        assert "calculator" in requested[0] and "calculator" not in requested[1]
        assert served.recording.metrics.forks == 1

    run(test, policy)


def test_what_is_asked_of_sampling_is_not_followed_and_said_once() -> None:
    policy = Numbered("a")

    async def test(served: Served) -> None:
        for _ in range(2):
            await served.create(ASK, temperature=0.3, seed=4, top_p=1.0, tool_choice="required", tools=TOOLS)
        await served.create(ASK, temperature=1.0, extra_body={"min_p": 0.0, "thinking": "hard"}, user="x")
        params = policy.calls[0][1]
        assert params["temperature"] == 1.0 and params["sampling_seed"] == 5
        ignored = served.recording.metrics.ignored
        assert ignored == {"temperature": 2, "seed": 2, "tool_choice": 2, "thinking": 1}
        assert len(served.said) == 4 and sum("'temperature'" in line for line in served.said) == 1
        assert served.server.metrics.ignored == ignored

    run(test, policy)


def test_a_slow_reader_and_a_slow_writer_slow_nobody() -> None:
    policy = Numbered("3 " * 1500)

    async def test(served: Served) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(served.server.url.rpartition(":")[2]), limit=1)
        recording = served.recording
        body = json.dumps({"model": "policy", "messages": ASK, "n": 128, "logprobs": True, "stream": True}).encode()
        path = f"/s/{recording.id}/v1/chat/completions"
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {recording.key}\r\nContent-Length: "
        writer.write(f"{head}{len(body)}\r\n\r\n".encode() + body)
        _, half = await asyncio.open_connection("127.0.0.1", int(served.server.url.rpartition(":")[2]))
        half.write(f"{head}{len(body)}\r\n\r\n".encode() + body[:10])
        while recording.metrics.requests < 1:
            await asyncio.sleep(0.01)
        for _ in range(20):
            await served.create(ASK)
        assert len(served.recording.collect_branches()) == 148
        writer.close()
        half.close()

    run(test, policy, config=replace(CONFIG, max_new_tokens=2000, max_context=4000))


def test_512_sessions_at_once_none_lost() -> None:
    """Each of three turns with a tool, all under way at the same time."""

    async def everything() -> None:
        async with serving(Numbered("a")) as served:
            server = served.server
            at_once, most = 0, 0

            async def agent(session: aiohttp.ClientSession, number: int) -> None:
                nonlocal at_once, most
                policy = Numbered(call(f"{number}+1"), f"It is {number + 1}", "Yes")
                recording = server.open(replace(PROMPT, id=str(number)), policy, PARAMS)
                messages: list[Any] = [*ASK]
                at_once += 1
                most = max(most, at_once)
                for turn in range(3):
                    body = {"model": "policy", "messages": messages, "tools": TOOLS}
                    headers = {"Authorization": f"Bearer {recording.key}"}
                    async with session.post(
                        f"{recording.base_url}/chat/completions", json=body, headers=headers
                    ) as answer:
                        assert answer.status == 200
                        message = (await answer.json())["choices"][0]["message"]
                    messages.append(message)
                    calls = message.get("tool_calls") or []
                    messages += [{"role": "tool", "tool_call_id": item["id"], "content": "3"} for item in calls]
                    messages += [] if calls else [{"role": "user", "content": "Sure?"}]
                    assert bool(calls) == (turn == 0)
                at_once -= 1
                (branch,) = recording.collect_branches()
                assert branch.num_turns == 3 and branch.status == "stop" and branch.prompt.id == str(number)
                requested, *_, answer_ids = policy.calls[-1][0], policy.calls[-1][3].token_ids.tolist()
                assert branch.token_ids.tolist() == [*requested, *answer_ids]
                await server.close(recording)

            async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
                await asyncio.gather(*(agent(session, number) for number in range(512)))
            assert most == 512
            figures = server.metrics
            assert (figures.sessions, figures.requests, figures.branches, figures.forks) == (513, 1536, 512, 0)
            assert figures.drift == 0 and figures.failed == figures.refused == 0

    asyncio.run(asyncio.wait_for(everything(), 300))


def test_the_prompts_own_ids_are_used_where_the_client_begins_with_them() -> None:
    policy = Numbered("a")
    schemas = [CHAT.tools["calculator"].schema]
    local = as_token_ids([*ids("rendered before"), *HEAD])

    async def test(served: Served) -> None:
        await served.create(ASK, tools=schemas)
        await served.create(ASK)
        assert policy.calls[0][0] == local.tolist() and policy.calls[1][0] == list(FIRST)

    run(test, policy, prompt=replace(PROMPT, token_ids=local))


def test_a_request_of_a_generation_that_is_halted_fails() -> None:
    class Stops(Numbered):
        async def generate(self, *args: Any, **settings: Any) -> Any:
            raise Halted

    async def test(served: Served) -> None:
        with pytest.raises(openai.InternalServerError, match="generation was halted"):
            await served.create(ASK)
        (branch,) = served.recording.collect_branches()
        assert (branch.status, branch.failure) == ("aborted", "generation was halted")

    run(test, Stops("never"))
