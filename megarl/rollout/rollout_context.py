"""Rollouts by an engine: its client, the processes of tools and environments, and what looks after it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

from megarl.chat_format.chat_template import ChatTemplate
from megarl.config import OnWeightSync, RolloutConfig
from megarl.engine.client import Client
from megarl.engine.engine_loss import EngineLost, watch
from megarl.engine.sglang_engine import Engine
from megarl.engine.tool_calls import ParsedResponse, ParseFunction, make_parser
from megarl.environments.error_log import ToolCallStats
from megarl.environments.process_sessions import EnvironmentPool
from megarl.models.routing import RoutingShape
from megarl.processes.process_limits import ProcessLimits
from megarl.rollout.background import GroupStream, OnBusyInterval
from megarl.rollout.conversation import RolloutContext
from megarl.rollout.group_queue import GroupQueue
from megarl.rollout.request_gate import OVERCOMMIT, RequestGate
from megarl.rollout.scheduler import GenerationResult, Group, gather_rollouts
from megarl.rollout.session_server import SessionServer
from megarl.rollout.session_server.recording import SessionMetrics
from megarl.types import Prompt, Rollout

T = TypeVar("T")
_POLL_S = 1.0
_REQUEST_MARGIN_S = 60.0
"""By which a request's own limit comes after the deadline of all, which says why."""


async def _run_watched(work: Coroutine[Any, Any, T], look: Callable[[], None]) -> T:
    """The result, or what `look` raises, which is called again and again meanwhile, in a thread: it may wait."""
    task = asyncio.ensure_future(work)
    try:
        while not (await asyncio.wait([task], timeout=_POLL_S))[0]:
            await asyncio.to_thread(look)
        return task.result()
    finally:
        task.cancel()
        await asyncio.wait([task])


class RolloutRunner:
    """Rollouts by one engine, in a thread of their own; those of its tools and environments are kept from one call
    to the next, until `close`.

    routing: of the engine's record of it, where the rollouts are to carry one. ended: as of `RolloutContext`. lost: is
    told at once where the engine is lost, in the thread of generation, once or more.
    """

    def __init__(
        self,
        engine: Engine,
        chat: ChatTemplate,
        config: RolloutConfig,
        routing: RoutingShape | None = None,
        ended: Callable[[Rollout], None] = lambda rollout: None,
        lost: Callable[[EngineLost], None] = lambda lost: None,
    ) -> None:
        self._engine, self._chat, self._config, self._routing = engine, chat, config, routing
        self._on_rollout_finished, self._on_engine_lost = ended, lost
        self._loop = asyncio.new_event_loop()  # the processes belong to one
        self._thread = threading.Thread(target=self._loop.run_forever, name="generation", daemon=True)
        self._environments: EnvironmentPool | None = None
        self._session_server: SessionServer | None = None
        self._server_lock = asyncio.Lock()
        self._parse: ParseFunction | None = None
        self._stream: GroupStream | None = None
        self._client: Client | None = None
        self._stream_task: asyncio.Task[None] | None = None
        self._stream_engine_start = 0
        """Of the engine, which the stream is of."""
        self._client_by_gate: dict[RequestGate, Client] = {}
        """Of generations by themselves that are under way."""
        self._pause_lock, self._is_paused = asyncio.Lock(), False
        """Held while nothing may be asked of the engine."""

    def generate(self, prompts: Sequence[Prompt], **settings: Any) -> GenerationResult:
        """What comes of `begin`."""
        return self.start_generation(prompts, **settings).result()

    def start_generation(
        self,
        prompts: Sequence[Prompt],
        *,
        tickets: GroupQueue | None = None,
        samples: int | None = None,
        greedy: bool = False,
        seed: int = 0,
        first_group: int = 0,
        needed: int | None = None,
        carried: Sequence[Group] = (),
        of: int | None = None,
        look: Callable[[], None] = lambda: None,
        held_out: bool = False,
    ) -> Future[GenerationResult]:
        """Rollouts of those prompts whose tickets this engine gets, ordered by group, then by sample, and what is to be
        gone on with; the engine must be ready. See `gather_rollouts`.

        tickets: that the engines share to which the same prompts are given; all are this engine's by default. samples:
        per prompt, `config.samples_per_prompt` by default. seed: of the step; each sample's own is recorded in it.
        look: called every second, in a thread; what it raises ends this. held_out: sampled as in an evaluation.

        Done within `config.step_timeout`; what fails or is late by itself is an aborted rollout, of which the engine
        has then let go, too. Where the engine is lost, this ends at once, see `GenerationResult.engine_loss`. Where it gets other
        weights meanwhile, by `pause` and `resume`, this goes on by them.
        """
        engine, config = self._engine, self._config.eval_config if held_out else self._config

        async def run() -> GenerationResult:
            deadline = asyncio.get_running_loop().time() + config.step_timeout
            async with self._new_client() as client:
                if config != self._config:  # then nothing is trained on it
                    client.should_request_masks = False
                talks = gather_rollouts(
                    prompts,
                    tickets or GroupQueue(len(prompts)),
                    client,
                    self._make_context(client, config),
                    samples=config.samples_per_prompt if samples is None else samples,
                    greedy=greedy,
                    seed=seed,
                    first_group=first_group,
                    deadline=deadline,
                    needed=needed,
                    carried=carried,
                    version=engine.weight_version,
                    of=of,
                    watch=partial(self._watch, client, engine.start_number),
                    opened=lambda room: self._client_by_gate.update({room: client}),
                )
                try:
                    gathered = await _run_watched(talks, look)
                    if gathered.engine_loss is not None:
                        self._on_engine_lost(gathered.engine_loss)  # where a request was the first to see it
                    return await self._drop_aborted(gathered)
                finally:
                    self._client_by_gate = {room: of for room, of in self._client_by_gate.items() if of is not client}

        return self._submit(run())

    async def _watch(self, client: Client, start: int) -> None:
        try:
            await watch(self._engine, client, self._config.hang_timeout, start)
        except EngineLost as lost:
            self._on_engine_lost(lost)
            raise

    # --- generation that goes on

    def start_stream(self, tickets: GroupQueue, *, samples: int, groups: int, at_work: OnBusyInterval) -> None:
        """Begin one, see `Stream`; until `close`. The engine must be ready."""

        async def start() -> None:
            client = await self._new_stream_client()
            around, seconds = self._make_context(client, self._config), self._config.step_timeout
            self._stream = GroupStream(
                tickets,
                client,
                around,
                samples=samples,
                groups=groups,
                seconds=seconds,
                at_work=at_work,
                lost=self._on_engine_lost,
            )
            self._stream_task = self._start_stream_task(self._stream, client)

        self._submit(start()).result()

    def _start_stream_task(self, stream: GroupStream, client: Client) -> asyncio.Task[None]:
        self._stream_engine_start = self._engine.start_number
        return asyncio.create_task(stream.run(partial(self._watch, client, self._stream_engine_start)))

    async def _new_stream_client(self) -> Client:
        before, self._client = self._client, None
        if before is not None:
            await before.__aexit__(None, None, None)
        self._client = await self._new_client().__aenter__()
        return self._client

    def admit(self, prompts: Sequence[Prompt], seed: int) -> None:
        """The groups of a further step may be begun."""
        self._submit(self._running_stream.admit(prompts, seed)).result()

    def collect(self, count: int, look: Callable[[], None] = lambda: None) -> Future[GenerationResult | None]:
        """Of the next `count` groups those that are this engine's, when they are complete; None where no engine is left
        that could complete them. look: as of `begin`."""

        async def run() -> GenerationResult | None:
            taken = await _run_watched(self._run_unless_stream_fails(self._running_stream.collect(count)), look)
            return None if taken is None else await self._drop_aborted(taken)

        return self._submit(run())

    def pause(self, how: OnWeightSync) -> None:
        """Have the engine free for other weights, until `resume`: what is under way, of a stream or by itself, is cut
        off, held in the engine or waited for. One that is lost is free."""
        if self._stream is None and not self._client_by_gate:
            return
        self._submit(self._pause(how)).result()
        if how == "in_place" and not (self._stream is not None and self._stream.is_lost):
            try:
                self._engine.pause_generation()
            except EngineLost as lost:
                self._on_engine_lost(lost)

    async def _pause(self, how: OnWeightSync) -> None:
        await self._pause_lock.acquire()
        self._is_paused = True
        paused = [self._drain_gate(room, how) for room in self._client_by_gate]
        if self._stream is not None:
            paused.append(self._run_unless_stream_fails(self._stream.pause(how)))
        await asyncio.gather(*paused)

    async def _drain_gate(self, room: RequestGate, how: OnWeightSync) -> None:
        """See `Stream.pause`; where the engine is lost, who has the room sees it, too."""
        if how == "wait":
            room.is_admitting = False
            await room.drain()
            return
        room.close()
        if how == "retract":
            try:
                await room.abort_requests()
            except EngineLost as lost:
                self._on_engine_lost(lost)

    def resume(self) -> None:
        """Go on, by the weights that the engine was given; with a stream of one that was lost by a new client."""
        if self._stream is None and not self._is_paused:
            return
        stream = self._stream
        anew = stream is not None and (stream.is_lost or self._stream_engine_start != self._engine.start_number)
        if not anew:
            self._engine.resume_generation()
        self._submit(self._resume(anew)).result()

    async def _resume(self, anew: bool = False) -> None:
        """anew: with another client for the stream."""
        for room, client in self._client_by_gate.items():
            client.weight_version = self._engine.weight_version
            room.reopen()
        if self._stream is not None and anew:
            await self._reconnect_stream(self._stream)
        elif self._stream is not None and self._client is not None:
            self._client.weight_version = self._engine.weight_version
            await self._stream.resume()
        if self._is_paused:
            self._is_paused = False
            self._pause_lock.release()

    async def _reconnect_stream(self, stream: GroupStream) -> None:
        if self._stream_task is not None:
            await asyncio.wait([self._stream_task])
        client = await self._new_stream_client()
        await stream.reconnect(client, self._make_context(client, self._config))
        self._stream_task = self._start_stream_task(stream, client)

    @property
    def _running_stream(self) -> GroupStream:
        assert self._stream is not None, "start_stream comes first"
        return self._stream

    async def _run_unless_stream_fails(self, work: Coroutine[Any, Any, T]) -> T:
        """What comes of the work, or what the stream has ended by."""
        task, goes_on = asyncio.ensure_future(work), self._stream_task
        assert goes_on is not None
        try:
            await asyncio.wait([task, goes_on], return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                goes_on.result()  # returns where the engine is lost, which the work knows of
            return await task
        finally:
            task.cancel()

    # ---

    def _new_client(self) -> Client:
        engine, limit = self._engine, self._config.step_timeout + _REQUEST_MARGIN_S
        check_runs = partial(engine.check_running, engine.start_number)
        return Client(engine.url, engine.api_key, limit, self._routing, engine.weight_version, check_runs)

    def _make_context(self, client: Client, config: RolloutConfig) -> RolloutContext:
        engine, chat = self._engine, self._chat
        if self._environments is None:
            log = engine.log.with_name(f"tools_{engine.index}.log")
            limits = ProcessLimits(config.pass_env, config.tool_memory_mb)
            self._environments = EnvironmentPool(
                chat.catalog, config.tool_timeout, OVERCOMMIT * config.concurrency, log, limits
            )
        parse = self._parse = make_parser(client, engine.tool_call_parser, engine.tool_call_marker)
        return RolloutContext(
            chat,
            self._environments,
            parse,
            config,
            on_rollout_finished=self._on_rollout_finished,
            get_session_server=self._get_session_server,
        )

    async def _get_session_server(self) -> SessionServer:
        """For agents, when the first of them comes; its sessions may outlive a client, as a stream's do."""
        async with self._server_lock:
            if self._session_server is None:

                async def parse(text: str, schemas: Sequence[dict[str, Any]]) -> ParsedResponse:
                    assert self._parse is not None
                    return await self._parse(text, schemas)

                server = SessionServer(self._chat, parse, self._config, say=self._log_line)
                await server.start()
                self._session_server = server
        return self._session_server

    def _log_line(self, line: str) -> None:
        if self._environments is not None:
            self._environments.error_log.write("agents", "", line, line)

    @property
    def tool_call_stats(self) -> dict[str, ToolCallStats]:
        """Calls that reached tools so far, by the tool's name."""
        return {} if self._environments is None else dict(self._environments.tool_call_stats)

    @property
    def session_metrics(self) -> SessionMetrics:
        """Of agents' sessions so far."""
        server = self._session_server
        if server is None:
            return SessionMetrics()

        async def figures() -> SessionMetrics:
            return server.metrics

        # Where they are opened and closed, for a stream goes on meanwhile.
        return asyncio.run_coroutine_threadsafe(figures(), self._loop).result()

    async def _drop_aborted(self, gathered: GenerationResult) -> GenerationResult:
        """See to it that the engine does not work on what was aborted. It lets go of everything: a stream goes on
        with what is its own."""
        if gathered.engine_loss is not None or (self._stream is not None and self._stream.is_lost):
            return gathered
        ended = [one.status for group in gathered.partials for one in group]
        if "aborted" in [*ended, *(rollout.status for rollout in gathered.rollouts)]:
            try:
                await self._pause("retract")
                await asyncio.to_thread(self._engine.abort_requests)
            except EngineLost as lost:
                self._on_engine_lost(lost)
            finally:
                await self._resume()
        return gathered

    def _submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        if not self._thread.is_alive():
            self._thread.start()

        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def close(self) -> None:
        """End what is under way, and the processes; safe to call twice."""
        if self._thread.is_alive():
            asyncio.run_coroutine_threadsafe(self._shut_down(), self._loop).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
        if not self._loop.is_closed():
            self._loop.close()

    async def _shut_down(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        client, self._client, self._stream = self._client, None, None
        if client is not None:
            await client.__aexit__(None, None, None)
        server, self._session_server = self._session_server, None
        if server is not None:
            await server.aclose()
        sessions, self._environments = self._environments, None
        if sessions is not None:
            await sessions.aclose()
