"""Run rollouts on one engine: its client, the processes of tools and environments, and its watchdog."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

from megarl.chat_format.chat_template import ChatTemplate
from megarl.config import OnWeightSync, RolloutConfig
from megarl.engine.engine_protocol import Engine, EngineClient, EngineLost
from megarl.engine.engine_restart import watch
from megarl.engine.external_client import SharedClient
from megarl.engine.external_engines import ExternalEngines
from megarl.engine.tool_calls import ParsedResponse, ParseFunction, make_parser
from megarl.environments.process_sessions import EnvironmentPool, ToolCallStats
from megarl.models.routing import RoutingShape
from megarl.models.sparse_indices import IndexShape
from megarl.processes.children import ProcessLimits
from megarl.rollout.cache_budget import CacheBudget
from megarl.rollout.conversation import RolloutContext
from megarl.rollout.group_queue import GroupQueue
from megarl.rollout.group_stream import AdmittedPrompt, GroupStream
from megarl.rollout.partial_rollouts import Group
from megarl.rollout.request_gate import OVERCOMMIT, RequestGate
from megarl.rollout.scheduler import GenerationResult, gather_rollouts
from megarl.rollout.session_server import SessionServer
from megarl.rollout.session_server.recording import SessionMetrics
from megarl.types import Prompt, Rollout

T = TypeVar("T")
_POLL_S = 1.0
_REQUEST_MARGIN_S = 60.0
"""How much later a request times out than the overall deadline, whose error is more specific."""


async def _run_watched(work: Coroutine[Any, Any, T], check: Callable[[], None]) -> T:
    """Await `work` while calling `check` repeatedly in a thread, where it may block; its exception ends the work."""
    task = asyncio.ensure_future(work)
    try:
        while not (await asyncio.wait([task], timeout=_POLL_S))[0]:
            await asyncio.to_thread(check)
        return task.result()
    finally:
        task.cancel()
        await asyncio.wait([task])


class RolloutRunner:
    """Rollouts by one engine, in a separate thread.

    Processes of tools and environments are reused across calls until `close`.

    Args:
        routing: shape of the engine's routing record, if rollouts carry one
        on_rollout_finished: as `RolloutContext.on_rollout_finished`
        indices: shape of its record of sparse attention indices, if rollouts carry one
        external: engines outside of the job that take part of the requests
        adapter: as for `Engine.connect`
        on_engine_lost: called immediately when the engine is lost, in the generation thread, possibly more than once
    """

    def __init__(
        self,
        engine: Engine,
        chat: ChatTemplate,
        config: RolloutConfig,
        routing: RoutingShape | None = None,
        on_rollout_finished: Callable[[Rollout], None] = lambda rollout: None,
        on_engine_lost: Callable[[EngineLost], None] = lambda lost: None,
        indices: IndexShape | None = None,
        external: ExternalEngines | None = None,
        adapter: str = "",
    ) -> None:
        self._adapter = adapter
        self._engine, self._chat, self._config, self._external = engine, chat, config, external
        self._routing, self._indices = routing, indices
        self._on_rollout_finished, self._on_engine_lost = on_rollout_finished, on_engine_lost
        self._loop = asyncio.new_event_loop()  # asyncio subprocesses are bound to one loop
        self._thread = threading.Thread(target=self._loop.run_forever, name="generation", daemon=True)
        self._environments: EnvironmentPool | None = None
        self._session_server: SessionServer | None = None
        self._server_lock = asyncio.Lock()
        self._parse: ParseFunction | None = None
        self._stream: GroupStream | None = None
        self._client: EngineClient | None = None
        self._stream_task: asyncio.Task[None] | None = None
        self._stream_engine_start = 0
        """The engine's start number to which the stream is bound."""
        self._budget = CacheBudget() if config.fit_kv_cache else None
        """Budget at the start of a generation, or of the stream: that at the end of the last one for training."""
        self._client_by_gate: dict[RequestGate, EngineClient] = {}
        """Clients of running generations outside the stream."""
        self._pause_lock, self._is_paused = asyncio.Lock(), False
        """Held while no request may be sent to the engine."""
        self._is_asleep = False
        """True while the stream, alone, is paused because the engine sleeps or another generation uses it."""

    def set_config(self, config: RolloutConfig) -> None:
        """Use these settings for conversations that start from now on; a stream also for the limits of running ones."""
        self._config = config
        if self._stream is not None:
            self._stream.set_config(config)
        if self._session_server is not None:
            self._session_server.set_config(config)

    def generate(self, prompts: Sequence[Prompt], **settings: Any) -> GenerationResult:
        """Run `start_generation` and wait for its result."""
        return self.start_generation(prompts, **settings).result()

    def start_generation(
        self,
        prompts: Sequence[Prompt],
        *,
        queue: GroupQueue | None = None,
        samples: int | None = None,
        greedy: bool = False,
        seed: int = 0,
        first_group: int = 0,
        num_total: int | None = None,
        check: Callable[[], None] = lambda: None,
        held_out: bool = False,
    ) -> Future[GenerationResult]:
        """Start generating rollouts for the prompts that this engine claims; see `gather_rollouts`.

        The engine must be ready. The generation ends within `config.step_timeout`. A request that fails or times out
        yields an aborted rollout, and the engine stops working on it. If the engine is lost, the generation ends
        immediately, see `GenerationResult.engine_loss`. A weight sync by `pause` and `resume` does not end it.

        Args:
            queue: queue shared by the engines that receive the same prompts; by default this engine takes all groups
            seed: seed of the step; each sample records its own, derived from it
            check: called every second in a thread; an exception it raises ends the generation
            held_out: sample with the evaluation settings
        """
        config = self._config.eval_config if held_out else self._config

        async def run() -> GenerationResult:
            deadline = asyncio.get_running_loop().time() + config.step_timeout
            async with self._new_client() as client:
                if config != self._config:  # evaluation rollouts are never trained on
                    client.should_request_masks = False
                generation = gather_rollouts(
                    prompts,
                    queue or GroupQueue(len(prompts)),
                    client,
                    self._make_context(client, config),
                    samples=config.samples_per_prompt if samples is None else samples,
                    greedy=greedy,
                    seed=seed,
                    first_group=first_group,
                    deadline=deadline,
                    num_total=num_total,
                    watch=partial(self._watch, client, self._engine.start_number),
                    on_gate_opened=lambda gate: self._client_by_gate.update({gate: client}),
                    budget=self._budget,
                )
                try:
                    result = await _run_watched(generation, check)
                    if not greedy and not held_out:
                        self._budget = result.budget
                    if result.engine_loss is not None:
                        self._on_engine_lost(result.engine_loss)  # in case a request noticed first
                    return await self._drop_aborted(result)
                finally:
                    self._client_by_gate = {
                        gate: other for gate, other in self._client_by_gate.items() if other is not client
                    }

        return self._submit(run())

    async def _watch(self, client: EngineClient, start: int) -> None:
        try:
            await watch(self._engine, client, self._config.hang_timeout, start)
        except EngineLost as lost:
            self._on_engine_lost(lost)
            raise

    # --- generation that outlasts a step

    def start_stream(self, queue: GroupQueue, **settings: Any) -> None:
        """Start continuous generation until `close`. The engine must be ready. settings: of `GroupStream`."""

        async def start() -> None:
            client = await self._new_client().__aenter__()
            self._stream = GroupStream(
                queue,
                client,
                self._make_context(client, self._config),
                timeout=self._config.step_timeout,
                on_engine_lost=self._on_engine_lost,
                budget=self._budget,
                **settings,
            )
            self._run_stream(self._stream, client)

        self._submit(start()).result()

    def _run_stream(self, stream: GroupStream, client: EngineClient) -> None:
        self._client, self._stream_engine_start = client, self._engine.start_number
        self._stream_task = asyncio.create_task(stream.run(partial(self._watch, client, self._stream_engine_start)))

    def admit(self, prompts: Sequence[AdmittedPrompt]) -> None:
        """Allow further groups to start."""
        self._submit(self._running_stream.admit(prompts)).result()

    def set_version(self, version: int) -> None:
        """Apply `GroupStream.set_version`, before `resume`."""
        self._submit(self._running_stream.set_version(version)).result()

    def hold_claims(self, is_held: bool) -> None:
        """Stop claiming groups, or go on."""
        self._submit(self._running_stream.hold_claims(is_held)).result()

    def snapshot(self) -> list[Group]:
        """Return the result of `GroupStream.snapshot`."""
        return self._submit(self._running_stream.snapshot()).result()

    def collect(
        self, count: int, first_group: int, check: Callable[[], None] = lambda: None
    ) -> Future[GenerationResult | None]:
        """Return the result of `GroupStream.collect`. `check` is as in `start_generation`."""

        async def run() -> GenerationResult | None:
            collected = self._running_stream.collect(count, first_group)
            result = await _run_watched(self._run_unless_stream_fails(collected), check)
            if result is None:
                return None
            self._budget = result.budget
            return await self._drop_aborted(result)

        return self._submit(run())

    def pause(self, mode: OnWeightSync) -> None:
        """Free the engine for a weight sync until `resume`, see `RequestGate.pause`. A lost engine is free, and one
        that sleeps."""
        if self._is_asleep or (self._stream is None and not self._client_by_gate):
            return
        self._submit(self._pause(mode)).result()
        if mode == "in_place" and not (self._stream is not None and self._stream.is_lost):
            try:
                self._engine.pause_generation()
            except EngineLost as lost:
                self._on_engine_lost(lost)

    def sleep(self, mode: OnWeightSync) -> None:
        """Pause the stream until `resume`, so that the engine can sleep. No other generation may be running."""
        if self._stream is not None and not self._is_asleep:
            self._is_asleep = True
            self._submit(self._run_unless_stream_fails(self._stream.pause(mode, sleeps=True))).result()

    def wake(self) -> None:
        """Undo `sleep`."""
        if self._is_asleep:
            self.resume()

    async def _pause(self, mode: OnWeightSync) -> None:
        await self._pause_lock.acquire()
        self._is_paused = True
        paused = [self._pause_gate(gate, mode) for gate in self._client_by_gate]
        if self._stream is not None:
            paused.append(self._run_unless_stream_fails(self._stream.pause(mode)))
        await asyncio.gather(*paused)
        if mode == "in_place":  # external engines continue like this engine's own after "retract"
            clients: list[EngineClient | None] = [*self._client_by_gate.values(), self._client]
            shared = [client for client in clients if isinstance(client, SharedClient)]
            await asyncio.gather(*(client.stop_external(wait=True) for client in shared))

    async def _pause_gate(self, gate: RequestGate, mode: OnWeightSync) -> None:
        try:
            await gate.pause(mode)
        except EngineLost as lost:  # the generation that uses the gate notices it, too
            self._on_engine_lost(lost)

    def resume(self) -> None:
        """Continue with the engine's weights; if the stream's engine was lost, reconnect with a new client."""
        if self._stream is None and not self._is_paused:
            return
        needs_reconnect = self._stream is not None and (
            self._stream.is_lost or self._stream_engine_start != self._engine.start_number
        )
        for client in (*self._client_by_gate.values(), None if needs_reconnect else self._client):
            if client is not None:  # before the engine goes on, whose answers may be by the new weights
                client.weight_version = self._engine.version_of(self._adapter)
        if not needs_reconnect:
            self._engine.resume_generation()
        self._submit(self._resume(needs_reconnect)).result()

    async def _resume(self, reconnect: bool = False) -> None:
        """Reopen all gates, that of the stream with a new client if `reconnect`."""
        self._is_asleep = False
        for gate in self._client_by_gate:
            gate.reopen()
        if self._stream is not None and reconnect:
            assert self._stream_task is not None and self._client is not None
            await asyncio.wait([self._stream_task])
            await self._client.__aexit__(None, None, None)
            client = await self._new_client().__aenter__()
            await self._stream.reconnect(client, self._make_context(client, self._config))
            self._run_stream(self._stream, client)
        elif self._stream is not None and self._client is not None:
            await self._stream.resume()
        if self._is_paused:
            self._is_paused = False
            self._pause_lock.release()

    @property
    def _running_stream(self) -> GroupStream:
        assert self._stream is not None, "call start_stream first"
        return self._stream

    async def _run_unless_stream_fails(self, work: Coroutine[Any, Any, T]) -> T:
        """Await `work`, or raise the error that ended the stream."""
        task, stream_task = asyncio.ensure_future(work), self._stream_task
        assert stream_task is not None
        try:
            await asyncio.wait([task, stream_task], return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                stream_task.result()  # returns normally if the engine is lost, which `work` handles
            return await task
        finally:
            task.cancel()

    # --- helpers

    def _new_client(self) -> EngineClient:
        timeout = self._config.step_timeout + _REQUEST_MARGIN_S
        client = self._engine.connect(timeout, self._routing, self._indices, self._adapter)
        if self._external is None:
            return client
        return SharedClient(client, self._external, timeout, self._config.hang_timeout)

    def _make_context(self, client: EngineClient, config: RolloutConfig) -> RolloutContext:
        engine, chat = self._engine, self._chat
        if self._environments is None:
            log = engine.log.with_name(engine.log.name.replace("engine", "tools"))
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
        """Start the server for agents on first use. Its sessions may outlive a client, as in a stream."""

        async def parse(text: str, schemas: Sequence[dict[str, Any]]) -> ParsedResponse:
            assert self._parse is not None
            return await self._parse(text, schemas)

        def log(line: str) -> None:
            assert self._environments is not None
            self._environments.error_log.write("agents", "", line, line)

        async with self._server_lock:
            if self._session_server is None:
                server = SessionServer(self._chat, parse, self._config, log=log)
                await server.start()
                self._session_server = server
        return self._session_server

    @property
    def tool_call_stats(self) -> dict[str, ToolCallStats]:
        """Calls that reached tools so far, by tool name."""
        return {} if self._environments is None else dict(self._environments.tool_call_stats)

    @property
    def session_metrics(self) -> SessionMetrics:
        """Metrics of agents' sessions so far."""
        server = self._session_server
        if server is None:
            return SessionMetrics()

        async def read_metrics() -> SessionMetrics:
            return server.metrics

        # Read them in the loop that updates them: a stream keeps running meanwhile.
        return asyncio.run_coroutine_threadsafe(read_metrics(), self._loop).result()

    async def _drop_aborted(self, result: GenerationResult) -> GenerationResult:
        """Stop the engine from working on aborted rollouts: it drops all requests, and a stream resumes its own."""
        if result.engine_loss is not None or (self._stream is not None and self._stream.is_lost):
            return result
        if any(rollout.status == "aborted" for rollout in result.rollouts):
            is_asleep = self._is_asleep
            try:
                if not is_asleep:
                    await self._pause("retract")
                await asyncio.to_thread(self._engine.abort_requests)
            except EngineLost as lost:
                self._on_engine_lost(lost)
            finally:
                if not is_asleep:
                    await self._resume()
        return result

    def _submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        if not self._thread.is_alive():
            self._thread.start()
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def close(self) -> None:
        """Cancel running work and end the processes; safe to call twice."""
        if self._thread.is_alive():
            asyncio.run_coroutine_threadsafe(self._shut_down(), self._loop).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
        if not self._loop.is_closed():
            self._loop.close()

    async def _shut_down(self) -> None:
        other_tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in other_tasks:
            task.cancel()
        await asyncio.gather(*other_tasks, return_exceptions=True)
        client, self._client, self._stream = self._client, None, None
        if client is not None:
            await client.__aexit__(None, None, None)
        server, self._session_server = self._session_server, None
        if server is not None:
            await server.aclose()
        environments, self._environments = self._environments, None
        if environments is not None:
            await environments.aclose()
