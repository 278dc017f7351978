"""A minimal OpenAI API server that answers with a function of the messages."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

Answer = Callable[[list[dict[str, Any]]], str]


@asynccontextmanager
async def serve(answer: Answer, requests: list[dict[str, Any]], key: str = "key") -> AsyncIterator[str]:
    """Serve `answer(messages)`, append request bodies to `requests`, and yield the URL."""

    async def models(request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "policy", "object": "model"}]})

    async def chat(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if request.headers.get("Authorization") != f"Bearer {key}" or body["model"] != "policy":
            return web.json_response({"error": {"message": "no such model or key"}}, status=401)
        requests.append(body)
        text = answer(body["messages"])
        header = {"id": "1", "created": 1, "model": "policy"}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        if not body.get("stream"):
            choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": text}}
            return web.json_response({**header, "object": "chat.completion", "choices": [choice], "usage": usage})
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for delta, reason in (({"role": "assistant", "content": text}, None), ({}, "stop")):
            choice = {"index": 0, "delta": delta, "finish_reason": reason}
            chunk = {**header, "object": "chat.completion.chunk", "choices": [choice]}
            await response.write(f"data: {json.dumps(chunk)}\n\n".encode())
        final_chunk = {**header, "object": "chat.completion.chunk", "choices": [], "usage": usage}
        await response.write(f"data: {json.dumps(final_chunk)}\n\ndata: [DONE]\n\n".encode())
        return response

    app = web.Application()
    app.router.add_post("/v1/chat/completions", chat)
    app.router.add_get("/v1/models", models)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    finally:
        await runner.cleanup()
