"""Through the server against asking the engine directly: the same ids, log-probs and routing, and no text is made into
tokens that the policy wrote."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import tiny_models
import torch
from compare import recorded
from engines import Running, start
from openai import AsyncOpenAI

from megarl.chat_format.chat_template import ChatTemplate
from megarl.engine.client import Client
from megarl.engine.engine_protocol import Generation
from megarl.engine.tool_calls import make_parser
from megarl.rollout.conversation import build_sampling_params
from megarl.rollout.partial_rollouts import PartialRollout
from megarl.rollout.session_server import SessionServer
from megarl.types import Prompt, as_token_ids

ASK = {"role": "user", "content": "What is 1+2?"}
PROMPT = Prompt("p", (ASK,))
SEED = 11


@pytest.fixture(scope="module")
def running(host: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with start(host, tiny_models.qwen3_moe(), tmp_path_factory.mktemp("sessions")) as result:
        yield result


class Watched(ChatTemplate):
    """Keeps the texts that it makes into tokens."""

    texts: list[str]

    def _encode(self, text: str) -> list[int]:
        self.texts.append(text)
        return super()._encode(text)


def everything(running: Running, test: Any) -> None:
    async def run() -> None:
        engine = running.engine
        chat = Watched.load(str(running.folder))
        chat.texts = []
        chat.end_token_ids  # noqa: B018  what it finds out of the template
        async with Client(engine.url, engine.api_key, 300.0, recorded(engine), engine.weight_version) as client:
            parse = make_parser(client, engine.tool_call_parser, engine.tool_call_marker)
            server = SessionServer(chat, parse, running.config.rollout)
            await server.start()
            try:
                await test(server, client, chat)
            finally:
                await server.aclose()

    asyncio.run(asyncio.wait_for(run(), 300))


def same(result: PartialRollout, at: int, direct: Generation, parts: slice = slice(None)) -> None:
    """That a branch's turn is what the engine says when it is asked directly."""
    turn = result.turns[at]
    assert turn.token_ids.tolist() == direct.token_ids.tolist() and turn.is_action
    assert np.abs(turn.logprobs - direct.logprobs).max() < 1e-5
    assert turn.weight_version == direct.weight_version and direct.routing is not None
    assert torch.equal(torch.cat(result.routing[parts]), direct.routing)


def test_a_conversation_is_the_one_that_the_engine_has_when_it_is_asked_directly(running: Running) -> None:
    config = running.config.rollout

    async def test(server: SessionServer, client: Client, chat: Watched) -> None:
        params = build_sampling_params(config, chat, True, SEED)
        recording = server.open(PROMPT, client, params, seed=SEED)
        async with AsyncOpenAI(base_url=recording.base_url, api_key=recording.key, timeout=300) as outside:
            messages: list[Any] = [ASK]
            contexts: list[list[int]] = []
            known, routed = chat.encode_prompt(PROMPT), 0
            chat.texts.clear()
            said = []
            for words in ("Sure?", "And 2+2?", "Bye"):
                answer = await outside.chat.completions.create(model="policy", messages=messages)
                said.append(answer.choices[0].message.content or "")
                messages += [answer.choices[0].message, {"role": "user", "content": words}]
                contexts.append(list(known))
                (branch,) = recording.collect_branches()
                known = branch.token_ids.tolist()
                known += chat.encode_continuation([messages[-1]], (), known[-1])
            (branch,) = recording.collect_branches()
            assert not [text for text in chat.texts for item in said if len(item) > 3 and item in text]
        assert [turn.is_action for turn in branch.turns] == [False, True] * 3
        for number, context in enumerate(contexts):
            direct = await client.generate(context, {**params, "max_new_tokens": config.max_new_tokens}, routed)
            same(branch, 2 * number + 1, direct, slice(number, number + 1))
            routed += len(branch.routing[number])
            full = [*context, *direct.token_ids.tolist()]
            assert branch.token_ids.tolist()[: len(full)] == full and routed == len(full) - 1

    everything(running, test)


def test_what_was_sampled_is_what_is_recorded_bit_for_bit(running: Running) -> None:
    config = running.config.rollout

    async def test(server: SessionServer, client: Client, chat: Watched) -> None:
        params = build_sampling_params(config, chat, False, SEED)
        requested: list[tuple[list[int], int]] = []
        said: list[Generation] = []

        class Between:
            async def generate(
                self, ids: Any, params: dict[str, Any], routed: int = 0, on_tokens: Any = None
            ) -> Generation:
                requested.append((list(ids), params["sampling_seed"]))
                answer = await client.generate(ids, params, routed)
                said.append(answer)
                return answer

            async def stop(self) -> None: ...

        recording = server.open(PROMPT, Between(), params)
        async with AsyncOpenAI(base_url=recording.base_url, api_key=recording.key, timeout=300) as outside:
            create = outside.chat.completions.create
            answer = await create(model="policy", messages=[ASK], n=3, logprobs=True)  # type: ignore[list-item]
            last: Any = answer.choices[1].message
            await create(model="policy", messages=[ASK, last, ASK])  # type: ignore[list-item]
        branches = recording.collect_branches()
        assert len(branches) == 3 and len({seed for _, seed in requested[:3]}) == 3 and requested[0][1] == SEED
        result = {turn.logprobs.tobytes(): turn for branch in branches for turn in branch.turns if turn.is_action}
        assert result.keys() == {item.logprobs.tobytes() for item in said} and len(result) == 4
        for item in said:
            assert np.array_equal(result[item.logprobs.tobytes()].token_ids, item.token_ids)
        long = next(branch for branch in branches if branch.num_turns == 2)
        assert requested[3][0] == long.token_ids.tolist()[: len(requested[3][0])]
        for branch in branches:
            assert torch.cat(branch.routing).shape == (branch.num_tokens - 1, 2, 2)
        for choice in answer.choices:
            events = np.float32([item.logprob for item in choice.logprobs.content])  # type: ignore[union-attr]
            assert events.tobytes() in result

    everything(running, test)


def test_a_stop_string_ends_an_answer_at_the_token_that_completes_it(running: Running) -> None:
    """What the engine sampled is recorded, the string included; the client gets what is before it."""
    config = replace(running.config.rollout, max_new_tokens=40)

    async def test(server: SessionServer, client: Client, chat: Watched) -> None:
        params = {**build_sampling_params(config, chat, True, SEED), "max_new_tokens": 40}
        full = (await client.generate(chat.encode_prompt(PROMPT), params)).token_ids
        at = next(
            n for n in range(3, len(full)) if (text := chat.decode(full[n : n + 1])).isascii() and text.isprintable()
            and text not in chat.decode(full[:n])
        )  # fmt: skip
        stop = chat.decode(full[at : at + 1])
        server._context = replace(server._context, config=config)
        recording = server.open(PROMPT, client, {name: params[name] for name in params if name != "max_new_tokens"})
        async with AsyncOpenAI(base_url=recording.base_url, api_key=recording.key, timeout=300) as outside:
            answer = await outside.chat.completions.create(model="policy", messages=[ASK], stop=[stop])  # type: ignore[list-item]
        (branch,) = recording.collect_branches()
        assert branch.turns[1].token_ids.tolist() == as_token_ids(full[: at + 1]).tolist()
        assert answer.choices[0].finish_reason == "stop" and branch.status == "stop"
        assert answer.choices[0].message.content == chat.decode(full[: at + 1]).partition(stop)[0]
        assert torch.cat(branch.routing).shape[0] == branch.num_tokens - 1

    everything(running, test)


def test_a_client_that_goes_away_frees_the_engine(running: Running) -> None:
    config = replace(running.config.rollout, max_new_tokens=200)

    async def test(server: SessionServer, client: Client, chat: Watched) -> None:
        server._context = replace(server._context, config=config)
        params = {**build_sampling_params(config, chat, False, SEED), "ignore_eos": True}
        recording = server.open(PROMPT, client, params)
        async with AsyncOpenAI(
            base_url=recording.base_url, api_key=recording.key, max_retries=0, timeout=300
        ) as outside:
            asking = asyncio.create_task(outside.chat.completions.create(model="policy", messages=[ASK]))  # type: ignore[list-item]
            while not recording.metrics.requests:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.05)
            asking.cancel()
            assert len((await outside.models.list()).data) == 1
        for _ in range(300):
            try:
                await asyncio.to_thread(running.engine._call, "/flush_cache")  # it refuses while it has anything to do
                break
            except Exception:
                await asyncio.sleep(0.1)
        else:
            pytest.fail("the engine goes on with what nobody waits for")
        (branch,) = recording.collect_branches()
        assert branch.status == "aborted" and branch.failure == "the session made no request"

    everything(running, test)


def test_a_stream_records_what_the_engine_says_without_one(running: Running) -> None:
    config = replace(running.config.rollout, max_new_tokens=40)

    async def test(server: SessionServer, client: Client, chat: Watched) -> None:
        server._context = replace(server._context, config=config)
        params = {**build_sampling_params(config, chat, True, SEED), "ignore_eos": True}
        recording = server.open(PROMPT, client, params)
        async with AsyncOpenAI(base_url=recording.base_url, api_key=recording.key, timeout=300) as outside:
            stream = await outside.chat.completions.create(model="policy", messages=[ASK], stream=True)  # type: ignore[list-item]
            pieces = [chunk.choices[0].delta.content or "" async for chunk in stream]
        (branch,) = recording.collect_branches()
        direct = await client.generate(chat.encode_prompt(PROMPT), {**params, "max_new_tokens": 40})
        same(branch, 1, direct)
        assert "".join(pieces) == branch.messages[-1]["content"] and sum(map(bool, pieces)) > 3

    everything(running, test)
