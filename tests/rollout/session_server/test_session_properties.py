"""For any client behavior, each sampled token is an action once and branches match the engine's contexts."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted import CHAT, CONFIG, PROMPT, call, parse
from serving import PARAMS, NumberedPolicy

from megarl.rollout.session_server.recording import AgentSession
from megarl.rollout.session_server.rendering import MessageRenderer
from megarl.rollout.session_server.requests import CompletionRequest, RequestRefused

pytestmark = pytest.mark.alone

TOOLS = (CHAT.tools["calculator"].schema,)
LINES = ("a", "b", " b ", call("1+2"), "so...", "<tool_call>{", call("2+1"))
STEP = st.fixed_dictionaries(
    {
        "from": st.integers(0, 5),
        "cut": st.integers(0, 2),
        "say": st.sampled_from(["u", "v", "edited", "system", "again"]),
        "n": st.sampled_from([1, 1, 1, 2, 3]),
        "tools": st.booleans(),
        "limit": st.sampled_from([None, None, 1, 3]),
    }
)


def next_messages(history: tuple[Any, ...], reply: str) -> tuple[Any, ...]:
    """Return the client's next messages: tool results or a user message, possibly after edits of the history."""
    if reply == "edited" and history:
        history = (*history[:-1], {**history[-1], "content": history[-1]["content"] + "!"})
    if reply == "system":
        return ({"role": "system", "content": "s"}, *history, {"role": "user", "content": "u"})
    calls = history[-1].get("tool_calls", ()) if history else ()
    results = tuple(
        {"role": "tool", "name": item["function"]["name"], "tool_call_id": item["id"], "content": "3"} for item in calls
    )
    return (*history, *results) if results else (*history, {"role": "user", "content": reply[:1]})


@settings(max_examples=150)
@given(st.lists(STEP, min_size=1, max_size=9), st.permutations(LINES), st.booleans())
def test_each_sampled_token_is_an_action_once(steps: list[dict[str, Any]], lines: list[str], concurrent: bool) -> None:
    policy = NumberedPolicy(*lines)
    recording = AgentSession(MessageRenderer(CHAT, parse, CONFIG), "", PROMPT, policy, PARAMS)
    histories: list[tuple[Any, ...]] = [()]

    async def send(step: dict[str, Any]) -> None:
        history = histories[step["from"] % len(histories)]
        messages = next_messages(history[: max(0, len(history) - 2 * step["cut"])], step["say"])
        request = CompletionRequest(messages, TOOLS if step["tools"] else (), step["n"], step["limit"])
        try:
            answered = await recording.answer(request, recording.locate_request(request))
        except RequestRefused as refused:
            assert refused.code == "context_length_exceeded"
            return
        histories.extend((*messages, choice.message) for choice in answered)

    async def run() -> None:
        if concurrent:
            await asyncio.gather(*(send(step) for step in steps))
        else:
            for step in steps:
                await send(step)

    asyncio.run(run())
    branches = recording.collect_branches()
    actions = [value for branch in branches for turn in branch.turns for value in turn.logprobs.tolist()]
    assert sorted(actions, reverse=True) == [-1.0 - token for token in range(policy.tokens)]

    by_logprob = {
        generation.logprobs[0]: (context, generation, routed) for context, _, routed, generation in policy.calls
    }
    for branch in branches:
        full, index = branch.token_ids.tolist(), 0
        assert branch.status in ("stop", "length", "max_turns") and branch.turns[-1].is_action
        for turn in branch.turns:
            if turn.is_action:
                context, generation, _ = by_logprob[turn.logprobs[0]]
                assert full[:index] == context and np.array_equal(turn.token_ids, generation.token_ids)
                assert (
                    np.array_equal(turn.logprobs, generation.logprobs)
                    and turn.weight_version == generation.weight_version
                )
            index += len(turn.token_ids)
        positions = [position for part in branch.routing for position in part[:, 0, 0].tolist()]
        assert positions == list(range(branch.num_tokens - 1))
        requests = [number for part in branch.routing for number in part[:, 0, 1].tolist()]
        own_requests = [number for number in range(len(policy.calls)) if number in requests]
        for number in own_requests:  # each request recorded the tokens that earlier requests on its path had not
            context, _, routed, generation = policy.calls[number]
            assert full[: len(context)] == context
            assert [index for index, request_number in enumerate(requests) if request_number == number] == list(
                range(routed, len(context) + len(generation.token_ids) - 1)
            )
    texts = [[message["content"] for message in branch.messages] for branch in branches]
    assert all(texts)
