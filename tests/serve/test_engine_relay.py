"""The relay to an engine, with a stand-in for the engine."""

from __future__ import annotations

import asyncio
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web

from megarl.serve.engine_relay import EngineRelay

Answer = Callable[[web.Request], Awaitable[web.Response]]


def post(url: str, body: bytes) -> tuple[int, bytes]:
    headers = {"Authorization": "Bearer key", "Content-Type": "application/json", "X-Other": "1"}
    try:
        with urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=10) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def through_relay(answer: Answer, path: str, body: bytes, max_request: int = 1000) -> tuple[int, bytes]:
    """Return status and content for a request to a relay of an engine that answers so."""

    async def run() -> tuple[int, bytes]:
        app = web.Application()
        app.router.add_post("/generate", answer)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        relay = EngineRelay(f"http://127.0.0.1:{runner.addresses[0][1]}", 1.0, max_request)
        try:
            return await asyncio.to_thread(post, relay.start("127.0.0.1") + path, body)
        finally:
            await asyncio.to_thread(relay.close)
            await runner.cleanup()

    return asyncio.run(run())


def test_forwards_body_key_and_answer() -> None:
    requests: list[Any] = []

    async def answer(request: web.Request) -> web.Response:
        requests.append((dict(request.headers), await request.read()))
        return web.Response(body=b"no", status=400, content_type="application/json")

    assert through_relay(answer, "/generate", b"{}") == (400, b"no")
    ((headers, body),) = requests
    assert body == b"{}" and headers["Authorization"] == "Bearer key" and "X-Other" not in headers


@pytest.mark.parametrize(("path", "body", "status"), [("/flush_cache", b"{}", 404), ("/generate", b" " * 1001, 413)])
def test_refuses_other_paths_and_long_requests(path: str, body: bytes, status: int) -> None:
    async def answer(request: web.Request) -> web.Response:
        raise AssertionError("it reached the engine")

    assert through_relay(answer, path, body)[0] == status


def test_an_engine_that_does_not_answer_is_an_error() -> None:
    async def answer(request: web.Request) -> web.Response:
        await asyncio.sleep(60)
        raise AssertionError("the relay waited")

    status, content = through_relay(answer, "/generate", b"{}")
    assert status == 502 and b"the engine did not answer: TimeoutError" in content
