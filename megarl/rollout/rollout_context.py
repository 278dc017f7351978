"""Rollouts by an engine: its client, the processes of tools and environments, and what looks after it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

from megarl.chat_format.chat_template import Chat
from megarl.config import OnPush, RolloutConfig
from megarl.engine.client import Client
from megarl.engine.engine_loss import EngineLost, watch
from megarl.engine.sglang_engine import Engine
from megarl.engine.tool_calls import Parse, Reply, parser
from megarl.environments.error_log import Calls
from megarl.environments.process_sessions import Sessions
from megarl.models.routing import RoutingShape
from megarl.processes.process_limits import Limits
from megarl.rollout.background import AtWork, Stream
from megarl.rollout.conversation import Surroundings
from megarl.rollout.group_queue import Tickets
from megarl.rollout.request_gate import AHEAD, Room
from megarl.rollout.scheduler import Gathered, Group, gather_rollouts
from megarl.rollout.session_server import SessionServer
from megarl.rollout.session_server.recording import Figures
from megarl.types import Prompt, Rollout

T = TypeVar("T")
_LOOK_S = 1.0
_LATER_S = 60.0
"""By which a request's own limit comes after the deadline of all, which says why."""


async def _watched(work: Coroutine[Any, Any, T], look: Callable[[], None]) -> T:
    """The result, or what `look` raises, which is called again and again meanwhile, in a thread: it may wait."""
    task = asyncio.ensure_future(work)
    try:
        while not (await asyncio.wait([task], timeout=_LOOK_S))[0]:
            await asyncio.to_thread(look)
        return task.result()
    finally:
        task.cancel()
        await asyncio.wait([task])


class Conversations:
    """Rollouts by one engine, in a thread of their own; those of its tools and environments are kept from one call
    to the next, until `close`.

    routing: of the engine's record of it, where the rollouts are to carry one. ended: as of `Surroundings`. lost: is
    told at once where the engine is lost, in the thread of generation, once or more.
    """

    def __init__(
        self,
        engine: Engine,
        chat: Chat,
        config: RolloutConfig,
        routing: RoutingShape | None = None,
        ended: Callable[[Rollout], None] = lambda rollout: None,
        lost: Callable[[EngineLost], None] = lambda lost: None,
    ) -> None:
        self._engine, self._chat, self._config, self._routing = engine, chat, config, routing
        self._ended, self._lost = ended, lost
        self._loop = asyncio.new_event_loop()  # the processes belong to one
        self._thread = threading.Thread(target=self._loop.run_forever, name="generation", daemon=True)
        self._sessions: Sessions | None = None
        self._server: SessionServer | None = None
        self._listening = asyncio.Lock()
        self._parse: Parse | None = None
        self._stream: Stream | None = None
        self._client: Client | None = None
        self._goes_on: asyncio.Task[None] | None = None
        self._start = 0
        """Of the engine, which the stream is of."""
        self._open: dict[Room, Client] = {}
        """Of generations by themselves that are under way."""
        self._still, self._is_still = asyncio.Lock(), False
        """Held while nothing may be asked of the engine."""

    def generate(self, prompts: Sequence[Prompt], **settings: Any) -> Gathered:
        """What comes of `begin`."""
        return self.begin(prompts, **settings).result()

    def begin(
        self,
        prompts: Sequence[Prompt],
        *,
        tickets: Tickets | None = None,
        samples: int | None = None,
        greedy: bool = False,
        seed: int = 0,
        first_group: int = 0,
        needed: int | None = None,
        carried: Sequence[Group] = (),
        of: int | None = None,
        look: Callable[[], None] = lambda: None,
        held_out: bool = False,
    ) -> Future[Gathered]:
        """Rollouts of those prompts whose tickets this engine gets, ordered by group, then by sample, and what is to be
        gone on with; the engine must be ready. See `gather_rollouts`.

        tickets: that the engines share to which the same prompts are given; all are this engine's by default. samples:
        per prompt, `config.samples_per_prompt` by default. seed: of the step; each sample's own is recorded in it.
        look: called every second, in a thread; what it raises ends this. held_out: sampled as in an evaluation.

        Done within `config.step_timeout`; what fails or is late by itself is an aborted rollout, of which the engine
        has then let go, too. Where the engine is lost, this ends at once, see `Gathered.lost`. Where it gets other
        weights meanwhile, by `pause` and `resume`, this goes on by them.
        """
        engine, config = self._engine, self._config.held_out if held_out else self._config

        async def run() -> Gathered:
            deadline = asyncio.get_running_loop().time() + config.step_timeout
            async with self._new_client() as client:
                if config != self._config:  # then nothing is trained on it
                    client.has_masks = False
                talks = gather_rollouts(
                    prompts,
                    tickets or Tickets(len(prompts)),
                    client,
                    self._around(client, config),
                    samples=config.samples_per_prompt if samples is None else samples,
                    greedy=greedy,
                    seed=seed,
                    first_group=first_group,
                    deadline=deadline,
                    needed=needed,
                    carried=carried,
                    version=engine.version,
                    of=of,
                    watch=partial(self._watch, client, engine.starts),
                    opened=lambda room: self._open.update({room: client}),
                )
                try:
                    gathered = await _watched(talks, look)
                    if gathered.lost is not None:
                        self._lost(gathered.lost)  # where a request was the first to see it
                    return await self._let_go(gathered)
                finally:
                    self._open = {room: of for room, of in self._open.items() if of is not client}

        return self._submit(run())

    async def _watch(self, client: Client, start: int) -> None:
        try:
            await watch(self._engine, client, self._config.hang_timeout, start)
        except EngineLost as lost:
            self._lost(lost)
            raise

    # --- generation that goes on

    def start_stream(self, tickets: Tickets, *, samples: int, groups: int, at_work: AtWork) -> None:
        """Begin one, see `Stream`; until `close`. The engine must be ready."""

        async def start() -> None:
            client = await self._stream_client()
            around, seconds = self._around(client, self._config), self._config.step_timeout
            self._stream = Stream(
                tickets,
                client,
                around,
                samples=samples,
                groups=groups,
                seconds=seconds,
                at_work=at_work,
                lost=self._lost,
            )
            self._goes_on = self._run(self._stream, client)

        self._submit(start()).result()

    def _run(self, stream: Stream, client: Client) -> asyncio.Task[None]:
        self._start = self._engine.starts
        return asyncio.create_task(stream.run(partial(self._watch, client, self._start)))

    async def _stream_client(self) -> Client:
        before, self._client = self._client, None
        if before is not None:
            await before.__aexit__(None, None, None)
        self._client = await self._new_client().__aenter__()
        return self._client

    def admit(self, prompts: Sequence[Prompt], seed: int) -> None:
        """The groups of a further step may be begun."""
        self._submit(self._streamed.admit(prompts, seed)).result()

    def take(self, count: int, look: Callable[[], None] = lambda: None) -> Future[Gathered | None]:
        """Of the next `count` groups those that are this engine's, when they are complete; None where no engine is left
        that could complete them. look: as of `begin`."""

        async def run() -> Gathered | None:
            taken = await _watched(self._unless_it_fails(self._streamed.take(count)), look)
            return None if taken is None else await self._let_go(taken)

        return self._submit(run())

    def pause(self, how: OnPush) -> None:
        """Have the engine free for other weights, until `resume`: what is under way, of a stream or by itself, is cut
        off, held in the engine or waited for. One that is lost is free."""
        if self._stream is None and not self._open:
            return
        self._submit(self._pause(how)).result()
        if how == "in_place" and not (self._stream is not None and self._stream.is_lost):
            try:
                self._engine.hold()
            except EngineLost as lost:
                self._lost(lost)

    async def _pause(self, how: OnPush) -> None:
        await self._still.acquire()
        self._is_still = True
        paused = [self._emptied(room, how) for room in self._open]
        if self._stream is not None:
            paused.append(self._unless_it_fails(self._stream.pause(how)))
        await asyncio.gather(*paused)

    async def _emptied(self, room: Room, how: OnPush) -> None:
        """See `Stream.pause`; where the engine is lost, who has the room sees it, too."""
        if how == "wait":
            room.admits = False
            await room.empty()
            return
        room.close()
        if how == "retract":
            try:
                await room.cut_off()
            except EngineLost as lost:
                self._lost(lost)

    def resume(self) -> None:
        """Go on, by the weights that the engine was given; with a stream of one that was lost by a new client."""
        if self._stream is None and not self._is_still:
            return
        stream = self._stream
        anew = stream is not None and (stream.is_lost or self._start != self._engine.starts)
        if not anew:
            self._engine.go_on()
        self._submit(self._resume(anew)).result()

    async def _resume(self, anew: bool = False) -> None:
        """anew: with another client for the stream."""
        for room, client in self._open.items():
            client.version = self._engine.version
            room.reopen()
        if self._stream is not None and anew:
            await self._renew(self._stream)
        elif self._stream is not None and self._client is not None:
            self._client.version = self._engine.version
            await self._stream.resume()
        if self._is_still:
            self._is_still = False
            self._still.release()

    async def _renew(self, stream: Stream) -> None:
        if self._goes_on is not None:
            await asyncio.wait([self._goes_on])
        client = await self._stream_client()
        await stream.renew(client, self._around(client, self._config))
        self._goes_on = self._run(stream, client)

    @property
    def _streamed(self) -> Stream:
        assert self._stream is not None, "start_stream comes first"
        return self._stream

    async def _unless_it_fails(self, work: Coroutine[Any, Any, T]) -> T:
        """What comes of the work, or what the stream has ended by."""
        task, goes_on = asyncio.ensure_future(work), self._goes_on
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
        engine, limit = self._engine, self._config.step_timeout + _LATER_S
        check_runs = partial(engine.check_runs, engine.starts)
        return Client(engine.url, engine.api_key, limit, self._routing, engine.version, check_runs)

    def _around(self, client: Client, config: RolloutConfig) -> Surroundings:
        engine, chat = self._engine, self._chat
        if self._sessions is None:
            log = engine.log.with_name(f"tools_{engine.index}.log")
            limits = Limits(config.pass_env, config.tool_memory_mb)
            self._sessions = Sessions(chat.known, config.tool_timeout, AHEAD * config.concurrency, log, limits)
        parse = self._parse = parser(client, engine.tool_call_parser, engine.tool_call_marker)
        return Surroundings(chat, self._sessions, parse, config, ended=self._ended, agents=self._agents)

    async def _agents(self) -> SessionServer:
        """For agents, when the first of them comes; its sessions may outlive a client, as a stream's do."""
        async with self._listening:
            if self._server is None:

                async def parse(text: str, schemas: Sequence[dict[str, Any]]) -> Reply:
                    assert self._parse is not None
                    return await self._parse(text, schemas)

                server = SessionServer(self._chat, parse, self._config, say=self._note)
                await server.start()
                self._server = server
        return self._server

    def _note(self, line: str) -> None:
        if self._sessions is not None:
            self._sessions.notes.write("agents", "", line, line)

    @property
    def tool_calls(self) -> dict[str, Calls]:
        """Calls that reached tools so far, by the tool's name."""
        return {} if self._sessions is None else dict(self._sessions.calls)

    @property
    def sessions(self) -> Figures:
        """Of agents' sessions so far."""
        server = self._server
        if server is None:
            return Figures()

        async def figures() -> Figures:
            return server.figures

        # Where they are opened and closed, for a stream goes on meanwhile.
        return asyncio.run_coroutine_threadsafe(figures(), self._loop).result()

    async def _let_go(self, gathered: Gathered) -> Gathered:
        """See to it that the engine does not work on what was aborted. It lets go of everything: a stream goes on
        with what is its own."""
        if gathered.lost is not None or (self._stream is not None and self._stream.is_lost):
            return gathered
        ended = [one.status for group in gathered.partials for one in group]
        if "aborted" in [*ended, *(rollout.status for rollout in gathered.rollouts)]:
            try:
                await self._pause("retract")
                await asyncio.to_thread(self._engine.drop_requests)
            except EngineLost as lost:
                self._lost(lost)
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
            asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
        if not self._loop.is_closed():
            self._loop.close()

    async def _end(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        client, self._client, self._stream = self._client, None, None
        if client is not None:
            await client.__aexit__(None, None, None)
        server, self._server = self._server, None
        if server is not None:
            await server.aclose()
        sessions, self._sessions = self._sessions, None
        if sessions is not None:
            await sessions.aclose()
