"""Sessions with a real engine equal direct requests: the same ids, log-probs and routing. Sampled text is never encoded
again."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import tiny_models
import torch
from compare import engine_routing_shape
from engines import RunningEngine, start_engine
from openai import AsyncOpenAI

from megarl.chat_format.chat_template import ChatTemplate
from megarl.engine.engine_protocol import NOT_RECORDED, Generation, RecordedPrefix
from megarl.engine.http_client import HTTPClient
from megarl.engine.tool_calls import make_parser
from megarl.rollout.conversation import build_sampling_params
from megarl.rollout.partial_rollouts import PartialRollout
from megarl.rollout.session_server import SessionServer
from megarl.types import Prompt, as_token_ids

QUESTION = {"role": "user", "content": "What is 1+2?"}
PROMPT = Prompt("p", (QUESTION,))
SEED = 11


@pytest.fixture(scope="module")
def running(host: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningEngine]:
    with start_engine(host, tiny_models.qwen3_moe(), tmp_path_factory.mktemp("sessions")) as result:
        yield result


class RecordingTemplate(ChatTemplate):
    """Records the texts that it encodes."""

    texts: list[str] = []

    def encode(self, text: str) -> list[int]:
        self.texts.append(text)
        return super().encode(text)


def run_with_engine(running: RunningEngine, test: Any) -> None:
    async def run() -> None:
        engine = running.engine
        chat = RecordingTemplate.load(str(running.folder))
        chat.texts = []
        chat.end_token_ids  # noqa: B018  computed once from the template
        async with HTTPClient(
            engine.url, engine.api_key, 300.0, engine_routing_shape(engine), engine.weight_version
        ) as client:
            parse = make_parser(client, engine.tool_call_parser, engine.tool_call_marker)
            server = SessionServer(chat, parse, running.config.rollout)
            await server.start()
            try:
                await test(server, client, chat)
            finally:
                await server.aclose()

    asyncio.run(asyncio.wait_for(run(), 300))


def assert_same_turn(result: PartialRollout, index: int, direct: Generation, parts: slice = slice(None)) -> None:
    """Check a branch's turn against a direct request."""
    turn = result.turns[index]
    assert turn.token_ids.tolist() == direct.token_ids.tolist() and turn.is_action
    assert np.abs(turn.logprobs - direct.logprobs).max() < 1e-5
    assert turn.weight_version == direct.weight_version and direct.routing is not None
    assert torch.equal(torch.cat(result.routing[parts]), direct.routing)


def test_session_equals_direct_engine_requests(running: RunningEngine) -> None:
    config = running.config.rollout

    async def test(server: SessionServer, client: HTTPClient, chat: RecordingTemplate) -> None:
        params = build_sampling_params(config, chat, True, SEED)
        recording = server.open(PROMPT, client, params, seed=SEED)
        async with AsyncOpenAI(base_url=recording.base_url, api_key=recording.key, timeout=300) as openai_client:
            messages: list[Any] = [QUESTION]
            contexts: list[list[int]] = []
            context_ids, known = chat.encode_prompt(PROMPT), NOT_RECORDED
            replies, encoded = [], []
            for question in ("Sure?", "And 2+2?", "Bye"):
                chat.texts.clear()
                answer = await openai_client.chat.completions.create(model="policy", messages=messages)
                encoded += chat.texts
                replies.append(answer.choices[0].message.content or "")
                messages += [answer.choices[0].message, {"role": "user", "content": question}]
                contexts.append(list(context_ids))
                (branch,) = recording.collect_branches()
                context_ids = branch.token_ids.tolist()
                context_ids += chat.encode_continuation([messages[-1]], (), context_ids[-1])
            (branch,) = recording.collect_branches()
            assert encoded and not [text for text in encoded for item in replies if len(item) > 3 and item in text]
        assert [turn.is_action for turn in branch.turns] == [False, True] * 3
        for number, context in enumerate(contexts):
            direct = await client.generate(context, {**params, "max_new_tokens": config.max_new_tokens}, known)
            assert_same_turn(branch, 2 * number + 1, direct, slice(number, number + 1))
            known = direct.extend_prefix(known)
            full = [*context, *direct.token_ids.tolist()]
            assert branch.token_ids.tolist()[: len(full)] == full and known.tokens == len(full) - 1

    run_with_engine(running, test)


def test_records_sampled_logprobs_bitwise(running: RunningEngine) -> None:
    config = running.config.rollout

    async def test(server: SessionServer, client: HTTPClient, chat: RecordingTemplate) -> None:
        params = build_sampling_params(config, chat, False, SEED)
        requests: list[tuple[list[int], int]] = []
        generations: list[Generation] = []

        class RecordingPolicy:
            async def generate(
                self, ids: Any, params: dict[str, Any], recorded: RecordedPrefix = NOT_RECORDED, on_tokens: Any = None
            ) -> Generation:
                requests.append((list(ids), params["sampling_seed"]))
                answer = await client.generate(ids, params, recorded)
                generations.append(answer)
                return answer

            async def stop(self) -> None: ...

        recording = server.open(PROMPT, RecordingPolicy(), params)
        async with AsyncOpenAI(base_url=recording.base_url, api_key=recording.key, timeout=300) as openai_client:
            create = openai_client.chat.completions.create
            answer = await create(model="policy", messages=[QUESTION], n=3, logprobs=True)  # type: ignore[list-item]
            last: Any = answer.choices[1].message
            await create(model="policy", messages=[QUESTION, last, QUESTION])  # type: ignore[list-item]
        branches = recording.collect_branches()
        assert len(branches) == 3 and len({seed for _, seed in requests[:3]}) == 3 and requests[0][1] == SEED
        result = {turn.logprobs.tobytes(): turn for branch in branches for turn in branch.turns if turn.is_action}
        assert result.keys() == {item.logprobs.tobytes() for item in generations} and len(result) == 4
        for item in generations:
            assert np.array_equal(result[item.logprobs.tobytes()].token_ids, item.token_ids)
        long = next(branch for branch in branches if branch.num_turns == 2)
        assert requests[3][0] == long.token_ids.tolist()[: len(requests[3][0])]
        for branch in branches:
            assert torch.cat(branch.routing).shape == (branch.num_tokens - 1, 2, 2)
        for choice in answer.choices:
            logprobs = np.float32([item.logprob for item in choice.logprobs.content])  # type: ignore[union-attr]
            assert logprobs.tobytes() in result

    run_with_engine(running, test)


def test_stop_string_ends_at_the_token_that_completes_it(running: RunningEngine) -> None:
    """The session records all sampled tokens; the client gets the text before the stop string."""
    config = replace(running.config.rollout, max_new_tokens=40)

    async def test(server: SessionServer, client: HTTPClient, chat: RecordingTemplate) -> None:
        params = {**build_sampling_params(config, chat, True, SEED), "max_new_tokens": 40}
        full = (await client.generate(chat.encode_prompt(PROMPT), params)).token_ids
        index = next(
            n for n in range(3, len(full)) if (text := chat.decode(full[n : n + 1])).isascii() and text.isprintable()
            and text not in chat.decode(full[:n])
        )  # fmt: skip
        stop = chat.decode(full[index : index + 1])
        server._renderer.config = config
        recording = server.open(PROMPT, client, {name: params[name] for name in params if name != "max_new_tokens"})
        async with AsyncOpenAI(base_url=recording.base_url, api_key=recording.key, timeout=300) as openai_client:
            answer = await openai_client.chat.completions.create(model="policy", messages=[QUESTION], stop=[stop])  # type: ignore[list-item]
        (branch,) = recording.collect_branches()
        assert branch.turns[1].token_ids.tolist() == as_token_ids(full[: index + 1]).tolist()
        assert answer.choices[0].finish_reason == "stop" and branch.status == "stop"
        assert answer.choices[0].message.content == chat.decode(full[: index + 1]).partition(stop)[0]
        assert torch.cat(branch.routing).shape[0] == branch.num_tokens - 1

    run_with_engine(running, test)


def test_disconnect_frees_the_engine(running: RunningEngine) -> None:
    config = replace(running.config.rollout, max_new_tokens=900, max_context=1000)

    async def test(server: SessionServer, client: HTTPClient, chat: RecordingTemplate) -> None:
        server._renderer.config = config
        params = {**build_sampling_params(config, chat, False, SEED), "ignore_eos": True}
        recording = server.open(PROMPT, client, params)
        async with AsyncOpenAI(
            base_url=recording.base_url, api_key=recording.key, max_retries=0, timeout=300
        ) as openai_client:
            request = asyncio.create_task(openai_client.chat.completions.create(model="policy", messages=[QUESTION]))  # type: ignore[list-item]
            while not recording.metrics.requests:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.05)
            request.cancel()
            assert len((await openai_client.models.list()).data) == 1
        for _ in range(300):
            try:
                await asyncio.to_thread(running.engine._call, "/flush_cache")  # refused while requests run
                break
            except Exception:
                await asyncio.sleep(0.1)
        else:
            pytest.fail("the engine still runs a request that nobody waits for")
        (branch,) = recording.collect_branches()
        assert branch.status == "aborted" and branch.failure == "the session made no request"

    run_with_engine(running, test)


def test_stream_records_the_same_tokens_as_a_plain_request(running: RunningEngine) -> None:
    config = replace(running.config.rollout, max_new_tokens=40)

    async def test(server: SessionServer, client: HTTPClient, chat: RecordingTemplate) -> None:
        server._renderer.config = config
        params = {**build_sampling_params(config, chat, True, SEED), "ignore_eos": True}
        recording = server.open(PROMPT, client, params)
        async with AsyncOpenAI(base_url=recording.base_url, api_key=recording.key, timeout=300) as openai_client:
            stream = await openai_client.chat.completions.create(model="policy", messages=[QUESTION], stream=True)  # type: ignore[list-item]
            pieces = [chunk.choices[0].delta.content or "" async for chunk in stream]
        (branch,) = recording.collect_branches()
        direct = await client.generate(chat.encode_prompt(PROMPT), {**params, "max_new_tokens": 40})
        assert_same_turn(branch, 1, direct)
        assert "".join(pieces) == branch.messages[-1]["content"] and sum(map(bool, pieces)) > 3

    run_with_engine(running, test)
