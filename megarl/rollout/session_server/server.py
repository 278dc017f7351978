"""Serve OpenAI's chat completions over HTTP on loopback, with a separate path and key for each session."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import orjson
from aiohttp import web

from megarl.chat_format.chat_template import ChatTemplate
from megarl.config import RolloutConfig
from megarl.engine.engine_protocol import Policy
from megarl.engine.tool_calls import ParseFunction
from megarl.rollout.conversation import Deadline
from megarl.rollout.session_server.recording import AgentSession, SessionMetrics
from megarl.rollout.session_server.rendering import MessageRenderer
from megarl.rollout.session_server.requests import CompletionRequest, RequestRefused, parse_request
from megarl.rollout.session_server.responses import (
    KEEPALIVE,
    Field,
    ResponseFormat,
    StreamedResponse,
    format_error,
    format_event,
)
from megarl.rollout.session_server.token_tree import Node
from megarl.types import Prompt

MAX_BODY_BYTES = 16 * 2**20
"""Maximum size of a request body."""
_BACKLOG = 4096
_KEEPALIVE_S = 10.0
"""Seconds between keep-alive comments in an idle stream."""
_NO_RETRY = {"x-should-retry": "false"}
"""Header that stops OpenAI's clients from retrying after a server error."""


class SessionServer:
    """Serves the sessions of one event loop, the one that awaits `start`.

    Args:
        model: the policy's name for clients
        log: called once per ignored request field over the server's life: during training the run's own sampling
            settings apply
    """

    def __init__(
        self,
        chat: ChatTemplate,
        parse: ParseFunction,
        config: RolloutConfig,
        *,
        model: str = "policy",
        log: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._log, self._warned = log, set[str]()
        self._renderer, self._model = MessageRenderer(chat, parse, config), model
        self._sessions: dict[str, AgentSession] = {}
        self._closed_metrics = SessionMetrics()
        self._runner: web.AppRunner | None = None
        self.url = ""

    def set_config(self, config: RolloutConfig) -> None:
        """Use these settings from the next request on."""
        self._renderer.config = config

    async def start(self) -> None:
        """Listen on a free port."""
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[_handle_errors])
        app.router.add_post("/s/{id}/v1/chat/completions", self._handle_completion)
        app.router.add_get("/s/{id}/v1/models", self._handle_models)
        app.router.add_get("/s/{id}/v1/models/{model:.+}", self._handle_models)
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, auto_decompress=False)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0, shutdown_timeout=1.0, backlog=_BACKLOG)
        await site.start()
        host, port = self._runner.addresses[0][:2]
        self.url = f"http://{host}:{port}"

    def open(
        self,
        prompt: Prompt,
        policy: Policy,
        params: Mapping[str, Any],
        deadline: Deadline | None = None,
        seed: int = 0,
    ) -> AgentSession:
        """Open a new session.

        Args:
            params: sampling parameters without max_new_tokens, as from `build_sampling_params`
            deadline: when the session fails; running requests are aborted and later ones refused
            seed: seed recorded in its rollouts
        """
        assert self.url, "call start first"
        session = AgentSession(
            self._renderer, self.url, prompt, policy, params, deadline, seed, self._model, self._warn_ignored
        )
        self._sessions[session.id] = session
        return session

    async def close(self, session: AgentSession) -> None:
        """Close a session and abort its running requests. Its branches are kept; safe to call twice."""
        if self._sessions.pop(session.id, None) is not None:
            await session.close()
            self._closed_metrics.add(session.metrics)

    @property
    def metrics(self) -> SessionMetrics:
        """Metrics over all sessions so far; drift and branches cover closed sessions only."""
        total = SessionMetrics()
        for metrics in (self._closed_metrics, *(session.metrics for session in self._sessions.values())):
            total.add(metrics)
        return total

    async def aclose(self) -> None:
        """Close all sessions and stop listening; safe to call twice."""
        for session in list(self._sessions.values()):
            await self.close(session)
        runner, self._runner, self.url = self._runner, None, ""
        if runner is not None:
            await runner.cleanup()

    # --- handlers

    def _warn_ignored(self, name: str) -> None:
        if name not in self._warned:
            self._warned.add(name)
            self._log(
                f"a client asks for {name!r}, which is ignored: the run's sampling settings apply, so that training "
                f"matches sampling"
            )

    def _find_session(self, request: web.Request) -> AgentSession:
        session = self._sessions.get(request.match_info["id"])
        if session is None:
            raise RequestRefused("no such session, or it is closed", status=404, code="session_not_found")
        kind, _, key = request.headers.get("Authorization", "").partition(" ")
        client_key = key.strip().encode(errors="replace")  # headers may hold any bytes
        if kind.lower() != "bearer" or not hmac.compare_digest(client_key, session.key.encode()):
            raise RequestRefused("the key belongs to another session", status=401, code="invalid_api_key")
        return session

    async def _handle_models(self, request: web.Request) -> web.StreamResponse:
        name, requested = self._find_session(request).model, request.match_info.get("model")
        model = {"id": name, "object": "model", "created": 0, "owned_by": "megarl"}
        if requested is None:
            return _json_response({"object": "list", "data": [model]})
        if requested != name:
            raise RequestRefused(f"the model {requested[:80]!r} does not exist", "model", "model_not_found", 404)
        return _json_response(model)

    async def _handle_completion(self, request: web.Request) -> web.StreamResponse:
        session = self._find_session(request)
        body = await request.read()
        try:
            if coding := request.headers.get("Content-Encoding"):
                raise RequestRefused(f"the body has the encoding {coding[:40]!r}; send it unencoded")
            completion_request = parse_request(body, session.model, session.params)
            node = session.locate_request(completion_request)
        except RequestRefused:
            session.metrics.refused += 1
            raise
        except Exception as error:  # our bug: fail the session so that its reaction is not trained on
            session.fail(f"a request cannot be read: {type(error).__name__}: {error}")
            raise RequestRefused(session.failure, status=503) from error
        output = ResponseFormat(session.model, len(node.tokens))
        if completion_request.stream:
            return await _stream_response(request, session, completion_request, node, output)
        choices = await session.run_request(lambda: session.answer(completion_request, node))
        return _json_response(output.format_completion(choices))


async def _stream_response(
    request: web.Request,
    session: AgentSession,
    completion_request: CompletionRequest,
    node: Node,
    output: ResponseFormat,
) -> web.StreamResponse:
    """Stream a response to the client.

    The headers go out immediately, then text as it is generated, and keep-alive comments in between. If the client
    disconnects, the request is cancelled.
    """
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    pieces, changed = list[bytes](), asyncio.Event()

    def make_stream(index: int) -> StreamedResponse:
        def send(field: Field, text: str) -> None:
            pieces.append(output.format_chunk(index, {field: text}))
            changed.set()

        return StreamedResponse(session.renderer.chat, completion_request, str(node.messages[-1]["role"]), send)

    streams = [make_stream(index) for index in range(completion_request.num_choices)]
    answer_task = asyncio.ensure_future(session.run_request(lambda: session.answer(completion_request, node, streams)))
    answer_task.add_done_callback(lambda _: changed.set())
    try:
        await response.prepare(request)
        pieces[:0] = [output.format_chunk(index, {"role": "assistant", "content": ""}) for index in range(len(streams))]
        while True:
            is_done = answer_task.done()
            if pieces:
                data, pieces[:] = b"".join(pieces), []
                await response.write(data)
            if is_done:
                break
            try:
                async with asyncio.timeout(_KEEPALIVE_S):
                    await changed.wait()
                changed.clear()
            except TimeoutError:
                await response.write(KEEPALIVE)
        try:
            events = output.format_stream_end(
                answer_task.result(), completion_request.include_usage, [stream.sent for stream in streams]
            )
        except RequestRefused as error:
            events = iter([format_event(format_error(str(error), 500))])
        for event in events:
            await response.write(event)
        await response.write_eof()
        return response
    except ConnectionResetError:
        if request.transport is not None and not request.transport.is_closing():
            raise  # not the client's connection
        return response
    finally:
        answer_task.cancel()


def _json_response(content: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    return web.Response(body=orjson.dumps(content), status=status, content_type="application/json", headers=headers)


@web.middleware
async def _handle_errors(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    try:
        return await handler(request)
    except RequestRefused as error:
        content = format_error(str(error), error.status, error.param, error.code)
        return _json_response(content, error.status, _NO_RETRY if error.status == 503 else None)
    except web.HTTPException as error:
        path = request.path[:200]
        reasons = {
            404: f"there is no {path}; sessions serve /v1/chat/completions and /v1/models",
            413: f"the body is larger than {MAX_BODY_BYTES} bytes",
        }
        message = reasons.get(error.status, f"{request.method} {path}: {error.reason}")
        return _json_response(format_error(message, error.status), error.status)
