"""Sampling by requests to engines, with stand-ins for the engines."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web

from megarl.serve.engine_sampling import EngineAddress, EngineFailed, EngineSampler
from megarl.serve.tinker_wire import RequestRefused, SampleRequest, Samples

Answer = Callable[[Any], Awaitable[web.Response]]
REQUEST = SampleRequest(
    [1, 2],
    num_samples=12,
    max_tokens=4,
    seed=None,
    stop=None,
    temperature=1.0,
    top_k=-1,
    top_p=1.0,
    prompt_logprobs=False,
    topk_prompt_logprobs=0,
    topk_logprobs=0,
    first_scored=0,
)


def respond(*ids: int) -> web.Response:
    pairs = [[-0.5, token, None] for token in ids]
    meta = {"output_token_logprobs": pairs, "finish_reason": {"type": "length"}}
    return web.json_response({"output_ids": list(ids), "meta_info": meta})


def sample(*answers: Answer, timeout: float = 10.0, concurrency: int = 100) -> Samples:
    """Sample from engines that answer so."""

    async def run() -> Samples:
        runners, engines = [], []
        for number, answer in enumerate(answers):
            app = web.Application()
            app.router.add_post("/generate", answer)
            runners.append(web.AppRunner(app, shutdown_timeout=0.1))
            await runners[-1].setup()
            await web.TCPSite(runners[-1], "127.0.0.1", 0).start()
            engines.append(EngineAddress(f"http://127.0.0.1:{runners[-1].addresses[0][1]}", f"key{number}"))
        try:
            return await EngineSampler(engines, 64, timeout, concurrency).sample(REQUEST, 3)
        finally:
            for runner in runners:
                await runner.cleanup()

    return asyncio.run(run())


def test_deals_sequences_out_to_all_engines() -> None:
    requests: list[list[Any]] = [[], []]

    def engine(number: int) -> Answer:
        async def answer(request: web.Request) -> web.Response:
            requests[number].append((request.headers["Authorization"], await request.json()))
            return respond(number, 5)

        return answer

    samples = sample(engine(0), engine(1))
    assert sorted(item.token_ids for item in samples.sequences) == [[0, 5]] * 6 + [[1, 5]] * 6
    assert all(item.logprobs == [-0.5, -0.5] and item.stop_reason == "length" for item in samples.sequences)
    for number in range(2):
        assert {key for key, _ in requests[number]} == {f"Bearer key{number}"}
        assert all(body["input_ids"] == [1, 2] and body["extra_key"] == "3" for _, body in requests[number])
    seeds = {body["sampling_params"]["sampling_seed"] for part in requests for _, body in part}
    assert len(seeds) == 12


def test_sequences_that_wait_for_an_engine_do_not_time_out() -> None:
    """Twelve take 1.2 s at two at a time, and each of them less than the time-out."""
    running, most = 0, 0

    async def answer(request: web.Request) -> web.Response:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.2)
        running -= 1
        return respond(5)

    assert len(sample(answer, timeout=1.0, concurrency=2).sequences) == 12
    assert most == 2


@pytest.mark.parametrize(
    ("status", "error", "text"),
    [(400, RequestRefused, "the engine refused the request: why"), (500, EngineFailed, "status 500: b'why'")],
)
def test_a_refusal_is_the_clients_and_a_failure_the_engines(status: int, error: type[Exception], text: str) -> None:
    async def answer(request: web.Request) -> web.Response:
        return web.Response(text="why", status=status)

    with pytest.raises(error, match=text):
        sample(answer)


def test_an_engine_that_does_not_answer_fails() -> None:
    async def answer(request: web.Request) -> web.Response:
        await asyncio.sleep(30)
        return respond(5)

    with pytest.raises(EngineFailed, match="the engine did not answer: TimeoutError"):
        sample(answer, timeout=0.3)
