"""Sessions as OpenAI's client sees them."""

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
from serving import PARAMS, QUESTION, NumberedPolicy, ServedSession, run_with_server, serve_session

from megarl.types import Branch, as_token_ids

pytestmark = pytest.mark.alone

TOOLS = [CHAT.tools["calculator"].schema]
RENDERED_QUESTION = ids("<|im_start|>user\nWhat is 1+2?<|im_end|>\n<|im_start|>assistant\n")


def test_records_the_tokens_of_a_response() -> None:
    policy = NumberedPolicy("It is 3")

    async def test(session: ServedSession) -> None:
        answer = await session.create(QUESTION)
        assert answer.choices[0].message.content == "It is 3" and answer.choices[0].finish_reason == "stop"
        assert answer.choices[0].message.tool_calls is None and answer.model == "policy"
        written = len(ids("It is 3")) + 1
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(RENDERED_QUESTION), written)
        (branch,) = session.recording.collect_branches()
        assert [turn.token_ids.tolist() for turn in branch.turns] == [list(RENDERED_QUESTION), [*ids("It is 3"), END]]
        assert branch.turns[1].is_action and branch.turns[1].logprobs.tolist() == [-1.0 - i for i in range(written)]
        assert branch.status == "stop" and branch.prompt is PROMPT and branch.seed == 5 and branch.num_turns == 1
        assert branch.messages == (*PROMPT.messages, {"role": "assistant", "content": "It is 3"})
        assert branch.routing[0].shape == (len(RENDERED_QUESTION) + written - 1, 1, 2)
        rollout = branch.to_rollout(group=3)
        assert rollout.answer == "It is 3" and rollout.num_actions == written
        assert policy.calls[0][1] == {**PARAMS, "max_new_tokens": CONFIG.max_new_tokens}

    run_with_server(test, policy)


def test_continues_a_conversation_by_its_token_ids() -> None:
    """The tokens that the policy sampled, a call with odd spaces, are not rendered again."""
    odd_call = '<tool_call>{"arguments": {"expression":   "1+2"}, "name": "calculator"}</tool_call>'
    policy = NumberedPolicy(odd_call, "It is 3", "Yes")

    async def test(session: ServedSession) -> None:
        messages: list[Any] = [*QUESTION]
        answer = await session.create(messages, tools=TOOLS)
        assert answer.choices[0].finish_reason == "tool_calls"
        message = answer.choices[0].message
        (tool_call,) = message.tool_calls
        assert message.content is None and tool_call.type == "function" and tool_call.function.name == "calculator"
        assert json.loads(tool_call.function.arguments) == {"expression": "1+2"}
        messages += [message, {"role": "tool", "tool_call_id": tool_call.id, "content": "3"}]
        answer = await session.create(messages, tools=TOOLS)
        messages += [
            answer.choices[0].message.model_dump(),
            {"role": "user", "content": [{"type": "text", "text": "Sure?"}]},
        ]
        assert (await session.create(messages, tools=TOOLS)).choices[0].message.content == "Yes"
        (branch,) = session.recording.collect_branches()
        texts = session.texts()[0]
        assert texts[1:] == [
            f"*{odd_call}<|im_end|>",
            "\n<|im_start|>user\n<tool_response>\n3\n</tool_response><|im_end|>\n<|im_start|>assistant\n",
            "*It is 3<|im_end|>",
            "\n<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\n",
            "*Yes<|im_end|>",
        ]
        assert (branch.tool_calls, branch.tool_errors, branch.num_turns) == (1, 0, 3)
        assert branch.branch == Branch(0, 0, True) and branch.status and branch.to_rollout(0).branch == branch.branch
        contexts = [context for context, *_ in policy.calls]
        assert [routed for _, _, routed, _ in policy.calls] == [
            0,
            *(len(context) - 1 for context in _contexts_after_requests(policy)[:-1]),
        ]
        assert contexts[2] == branch.token_ids.tolist()[: len(contexts[2])]
        record = [position for part in branch.routing for position in part[:, 0, 0].tolist()]
        assert record == list(range(branch.num_tokens - 1))
        await session.server.close(session.recording)
        metrics = session.server.metrics
        assert (metrics.requests, metrics.forks, metrics.branches) == (3, 0, 1)
        assert metrics.drift == 1  # the template would render the call as other tokens than the policy sampled

    run_with_server(test, policy)


def _contexts_after_requests(policy: NumberedPolicy) -> list[list[int]]:
    return [[*context, *answer.token_ids.tolist()] for context, _, _, answer in policy.calls]


@pytest.mark.parametrize("usage", [False, True])
def test_stream_equals_the_plain_response(usage: bool) -> None:
    async def test(session: ServedSession) -> None:
        options: Any = {"stream_options": {"include_usage": True}} if usage else {}
        stream = await session.create(QUESTION, stream=True, tools=TOOLS, logprobs=True, n=2, **options)
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
        assert len(session.recording.collect_branches()) == 2

    run_with_server(test, NumberedPolicy(call("1+2"), "It is 3"))


def test_raw_stream_ends_with_done() -> None:
    async def test(session: ServedSession) -> None:
        async with httpx.AsyncClient(
            headers={"Authorization": f"Bearer {session.recording.key}"}, timeout=60
        ) as client:
            body = {"model": "policy", "messages": QUESTION, "stream": True}
            answer = await client.post(f"{session.recording.base_url}/chat/completions", json=body)
        assert answer.headers["content-type"].startswith("text/event-stream")
        events = [line for line in answer.text.split("\n\n") if line]
        assert events[-1] == "data: [DONE]" and all(event.startswith("data: {") for event in events[:-1])

    run_with_server(test, NumberedPolicy("It is 3"))


def test_choices_are_siblings_with_separate_seeds() -> None:
    policy = NumberedPolicy("a", "b", "a", "c")

    async def test(session: ServedSession) -> None:
        answer = await session.create(QUESTION, n=3, logprobs=True)
        assert [choice.message.content for choice in answer.choices] == ["a", "b", "a"]
        assert [choice.index for choice in answer.choices] == [0, 1, 2]
        first = answer.choices[0].logprobs.content
        assert [item.logprob for item in first] == [-1.0, -2.0] and [item.token for item in first] == [
            "a",
            "<|im_end|>",
        ]
        assert first[0].bytes == list(b"a") and first[0].top_logprobs == []
        assert answer.usage.completion_tokens == 6
        await session.create(QUESTION)
        seeds = [params["sampling_seed"] for _, params, _, _ in policy.calls]
        assert seeds[0] == 5 and len(set(seeds)) == 4
        assert [texts[1] for texts in session.texts()] == [f"*{item}<|im_end|>" for item in "abac"]
        assert session.recording.metrics.forks == 0

    run_with_server(test, policy)


def test_stop_string_is_cut_from_the_response_but_recorded() -> None:
    policy = NumberedPolicy("Thought\nObservation:...", "Done")

    async def test(session: ServedSession) -> None:
        answer = await session.create(QUESTION, stop=["nothing", "\nObs"])
        assert policy.calls[0][1]["stop"] == ["nothing", "\nObs"]
        message = answer.choices[0].message
        assert (message.content, answer.choices[0].finish_reason) == ("Thought", "stop")
        await session.create([*QUESTION, message, {"role": "user", "content": "3"}], stop="\nObs")
        assert session.texts()[0][1:] == [
            "*Thought\nObservation:",
            "<|im_end|>\n<|im_start|>user\n3<|im_end|>\n<|im_start|>assistant\n",  # the server adds the end of the turn
            "*Done<|im_end|>",
        ]

    run_with_server(test, policy)


def test_token_limits_and_a_full_context() -> None:
    policy = NumberedPolicy("1+2 is 3...")

    async def test(session: ServedSession) -> None:
        answer = await session.create(QUESTION, max_tokens=4, max_completion_tokens=3)
        assert policy.calls[-1][1]["max_new_tokens"] == 3 and answer.choices[0].finish_reason == "length"
        await session.create([*QUESTION, *QUESTION], max_tokens=10**9)
        assert policy.calls[-1][1]["max_new_tokens"] == 60 - len(policy.calls[-1][0])
        long = [*QUESTION, answer.choices[0].message, {"role": "user", "content": "1+2 " * 40}]
        for _ in range(2):
            with pytest.raises(openai.BadRequestError, match=r"rollout\.max_context") as refused:
                await session.create(long)
            assert refused.value.code == "context_length_exceeded"
        with pytest.raises(openai.BadRequestError):
            await session.create([{"role": "user", "content": "1+2 " * 40}])
        await session.create(QUESTION)
        assert [branch.status for branch in session.recording.collect_branches()] == ["length"] * 3
        assert session.recording.metrics.refused == 3

    run_with_server(test, policy, config=replace(CONFIG, max_context=60))


def test_tool_choice_none_renders_without_tools() -> None:
    policy = NumberedPolicy(call("1+2"))

    async def test(session: ServedSession) -> None:
        with_tools = await session.create(QUESTION, tools=TOOLS, tool_choice="auto")
        without = await session.create(QUESTION, tools=TOOLS, tool_choice="none")
        assert with_tools.choices[0].message.tool_calls and not without.choices[0].message.tool_calls
        assert without.choices[0].message.content == call("1+2")
        contexts = [CHAT.decode(context) for context, *_ in policy.calls]
        assert "calculator" in contexts[0] and "calculator" not in contexts[1]
        assert session.recording.metrics.forks == 1

    run_with_server(test, policy)


def test_ignores_sampling_fields_and_logs_each_once() -> None:
    policy = NumberedPolicy("a")

    async def test(session: ServedSession) -> None:
        for _ in range(2):
            await session.create(QUESTION, temperature=0.3, seed=4, top_p=1.0, tool_choice="required", tools=TOOLS)
        await session.create(QUESTION, temperature=1.0, extra_body={"min_p": 0.0, "thinking": "hard"}, user="x")
        params = policy.calls[0][1]
        assert params["temperature"] == 1.0 and params["sampling_seed"] == 5
        ignored = session.recording.metrics.ignored
        assert ignored == {"temperature": 2, "seed": 2, "tool_choice": 2, "thinking": 1}
        assert len(session.log) == 4 and sum("'temperature'" in line for line in session.log) == 1
        assert session.server.metrics.ignored == ignored

    run_with_server(test, policy)


def test_slow_clients_do_not_slow_others() -> None:
    policy = NumberedPolicy("3 " * 1500)

    async def test(session: ServedSession) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(session.server.url.rpartition(":")[2]), limit=1)
        recording = session.recording
        body = json.dumps(
            {"model": "policy", "messages": QUESTION, "n": 128, "logprobs": True, "stream": True}
        ).encode()
        path = f"/s/{recording.id}/v1/chat/completions"
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {recording.key}\r\nContent-Length: "
        writer.write(f"{head}{len(body)}\r\n\r\n".encode() + body)
        _, stalled_writer = await asyncio.open_connection("127.0.0.1", int(session.server.url.rpartition(":")[2]))
        stalled_writer.write(f"{head}{len(body)}\r\n\r\n".encode() + body[:10])
        while recording.metrics.requests < 1:
            await asyncio.sleep(0.01)
        for _ in range(20):
            await session.create(QUESTION)
        assert len(session.recording.collect_branches()) == 148
        writer.close()
        stalled_writer.close()

    run_with_server(test, policy, config=replace(CONFIG, max_new_tokens=2000, max_context=4000))


def test_512_concurrent_sessions() -> None:
    """Each has three turns and a tool call, and all run at the same time."""

    async def run_all() -> None:
        async with serve_session(NumberedPolicy("a")) as session:
            server = session.server
            num_open, max_open = 0, 0

            async def agent(http: aiohttp.ClientSession, number: int) -> None:
                nonlocal num_open, max_open
                policy = NumberedPolicy(call(f"{number}+1"), f"It is {number + 1}", "Yes")
                recording = server.open(replace(PROMPT, id=str(number)), policy, PARAMS)
                messages: list[Any] = [*QUESTION]
                num_open += 1
                max_open = max(max_open, num_open)
                for turn in range(3):
                    body = {"model": "policy", "messages": messages, "tools": TOOLS}
                    headers = {"Authorization": f"Bearer {recording.key}"}
                    async with http.post(
                        f"{recording.base_url}/chat/completions", json=body, headers=headers
                    ) as answer:
                        assert answer.status == 200
                        message = (await answer.json())["choices"][0]["message"]
                    messages.append(message)
                    calls = message.get("tool_calls") or []
                    messages += [{"role": "tool", "tool_call_id": item["id"], "content": "3"} for item in calls]
                    messages += [] if calls else [{"role": "user", "content": "Sure?"}]
                    assert bool(calls) == (turn == 0)
                num_open -= 1
                (branch,) = recording.collect_branches()
                assert branch.num_turns == 3 and branch.status == "stop" and branch.prompt.id == str(number)
                context_ids, *_, answer_ids = policy.calls[-1][0], policy.calls[-1][3].token_ids.tolist()
                assert branch.token_ids.tolist() == [*context_ids, *answer_ids]
                await server.close(recording)

            async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
                await asyncio.gather(*(agent(http, number) for number in range(512)))
            assert max_open == 512
            metrics = server.metrics
            assert (metrics.sessions, metrics.requests, metrics.branches, metrics.forks) == (513, 1536, 512, 0)
            assert metrics.drift == 0 and metrics.failed == metrics.refused == 0

    asyncio.run(asyncio.wait_for(run_all(), 300))


def test_uses_the_prompts_own_token_ids_for_its_messages() -> None:
    policy = NumberedPolicy("a")
    schemas = [CHAT.tools["calculator"].schema]
    rendered = as_token_ids([*ids("rendered before"), *HEAD])

    async def test(session: ServedSession) -> None:
        await session.create(QUESTION, tools=schemas)
        await session.create(QUESTION)
        assert policy.calls[0][0] == rendered.tolist() and policy.calls[1][0] == list(RENDERED_QUESTION)

    run_with_server(test, policy, prompt=replace(PROMPT, token_ids=rendered))
