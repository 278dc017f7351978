"""Access to an engine from other nodes: engines listen on 127.0.0.1 alone."""

from __future__ import annotations

import asyncio
import threading

import aiohttp
from aiohttp import web


class EngineRelay:
    """Forwards `POST /generate` from an address of this node to an engine, which checks the key of each request.

    engine_url: the engine's address on this machine. timeout: seconds per request. max_request: bytes.
    """

    def __init__(self, engine_url: str, timeout: float, max_request: int) -> None:
        self._engine_url, self._max_request = engine_url, max_request
        self._timeout = aiohttp.ClientTimeout(total=timeout)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="engine relay", daemon=True)
        self._runner: web.AppRunner | None = None
        self._session: aiohttp.ClientSession | None = None

    def start(self, host: str) -> str:
        """Listen on a free port of this address, and return the URL. Raises OSError."""
        self._thread.start()
        return asyncio.run_coroutine_threadsafe(self._start(host), self._loop).result()

    async def _start(self, host: str) -> str:
        self._session = aiohttp.ClientSession(
            timeout=self._timeout, connector=aiohttp.TCPConnector(limit=0), auto_decompress=False
        )
        app = web.Application(client_max_size=self._max_request)
        app.router.add_post("/generate", self._forward)
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, auto_decompress=False)
        await self._runner.setup()
        await web.TCPSite(self._runner, host, 0, shutdown_timeout=1.0, backlog=4096).start()
        return f"http://{host}:{self._runner.addresses[0][1]}"

    async def _forward(self, request: web.Request) -> web.Response:
        assert self._session is not None
        names = ("Authorization", "Content-Type")
        headers = {name: request.headers[name] for name in names if name in request.headers}
        body, url = await request.read(), f"{self._engine_url}/generate"
        try:
            async with self._session.post(url, data=body, headers=headers) as answer:
                content = await answer.read()
                return web.Response(body=content, status=answer.status, content_type=answer.content_type)
        except (TimeoutError, aiohttp.ClientError) as error:
            return web.Response(text=f"the engine did not answer: {type(error).__name__}: {error}", status=502)

    def close(self) -> None:
        """Stop listening."""

        async def stop() -> None:
            if self._runner is not None:
                await self._runner.cleanup()
            if self._session is not None:
                await self._session.close()

        asyncio.run_coroutine_threadsafe(stop(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
