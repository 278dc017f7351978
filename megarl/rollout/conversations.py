"""Rollouts by an engine: its client, the processes of tools and environments, and a look at whether it lives."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from megarl.config import OnPush, RolloutConfig
from megarl.environments.sessions import Sessions
from megarl.models.routing import RoutingShape
from megarl.processes.limits import Limits
from megarl.rollout.chat import Chat
from megarl.rollout.client import Client
from megarl.rollout.engine import Engine
from megarl.rollout.gathering import Gathered, Group, gather_rollouts
from megarl.rollout.multi_turn import Surroundings
from megarl.rollout.queue import Tickets
from megarl.rollout.room import AHEAD
from megarl.rollout.stream import AtWork, Stream
from megarl.rollout.tool_calls import Parse, Reply, parser
from megarl.sessions import SessionServer
from megarl.sessions.recording import Figures
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

    routing: of the engine's record of it, where the rollouts are to carry one. ended: as of `Surroundings`.
    """

    def __init__(
        self,
        engine: Engine,
        chat: Chat,
        config: RolloutConfig,
        routing: RoutingShape | None = None,
        ended: Callable[[Rollout], None] = lambda rollout: None,
    ) -> None:
        self._engine, self._chat, self._config, self._routing = engine, chat, config, routing
        self._ended = ended
        self._loop = asyncio.new_event_loop()  # the processes belong to one
        self._thread = threading.Thread(target=self._loop.run_forever, name="generation", daemon=True)
        self._sessions: Sessions | None = None
        self._server: SessionServer | None = None
        self._listening = asyncio.Lock()
        self._parse: Parse | None = None
        self._stream: Stream | None = None
        self._client: Client | None = None
        self._goes_on: asyncio.Task[None] | None = None

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
        look: Callable[[], None] = lambda: None,
    ) -> Future[Gathered]:
        """Rollouts of those prompts whose tickets this engine gets, ordered by group, then by sample, and what is to be
        gone on with; the engine must be ready. See `gather_rollouts`.

        tickets: that the engines share to which the same prompts are given; all are this engine's by default. samples:
        per prompt, `config.samples_per_prompt` by default. seed: of the step; each sample's own is recorded in it.
        look: called every second, in a thread; what it raises ends this.

        Done within `config.step_timeout`; what fails or is late by itself is an aborted rollout, of which the engine
        has then let go, too. Ends with RuntimeError where the engine fails, with its last log lines if it died.
        """
        engine, config = self._engine, self._config
        engine.check_alive()

        def watch() -> None:
            engine.check_alive()
            look()

        async def run() -> Gathered:
            deadline = asyncio.get_running_loop().time() + config.step_timeout
            async with self._new_client() as client:
                talks = gather_rollouts(
                    prompts,
                    tickets or Tickets(len(prompts)),
                    client,
                    self._around(client),
                    samples=config.samples_per_prompt if samples is None else samples,
                    greedy=greedy,
                    seed=seed,
                    first_group=first_group,
                    deadline=deadline,
                    needed=needed,
                    carried=carried,
                    version=engine.version,
                )
                return await self._let_go(await _watched(talks, watch))

        return self._submit(run())

    # --- generation that goes on

    def start_stream(self, tickets: Tickets, *, samples: int, groups: int, at_work: AtWork) -> None:
        """Begin one, see `Stream`; until `close`. The engine must be ready."""
        self._engine.check_alive()

        async def start() -> None:
            self._client = await self._new_client().__aenter__()
            around, seconds = self._around(self._client), self._config.step_timeout
            self._stream = Stream(
                tickets, self._client, around, samples=samples, groups=groups, seconds=seconds, at_work=at_work
            )
            self._goes_on = asyncio.create_task(_watched(self._stream.run(), self._engine.check_runs))

        self._submit(start()).result()

    def admit(self, prompts: Sequence[Prompt], seed: int) -> None:
        """The groups of a further step may be begun."""
        self._submit(self._streamed.admit(prompts, seed)).result()

    def take(self, count: int, look: Callable[[], None] = lambda: None) -> Future[Gathered]:
        """Of the next `count` groups those that are this engine's, when they are complete; errors as of `begin`."""

        async def run() -> Gathered:
            return await self._let_go(await _watched(self._unless_it_fails(self._streamed.take(count)), look))

        return self._submit(run())

    def pause(self, how: OnPush) -> None:
        """Have the engine free for other weights, if a stream goes on: what is under way is cut off, held in the engine
        or waited for. Raises as `begin` ends."""
        if self._stream is None:
            return
        self._submit(self._unless_it_fails(self._stream.pause(how))).result()
        if how == "in_place":
            self._engine.hold()

    def resume(self) -> None:
        """Go on, by the weights that the engine was given."""
        if self._stream is None or self._client is None:
            return
        self._engine.go_on()
        self._client.version = self._engine.version
        self._submit(self._stream.resume()).result()

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
                goes_on.result()
                raise RuntimeError("generation has ended")
            return task.result()
        finally:
            task.cancel()

    # ---

    def _new_client(self) -> Client:
        engine, limit = self._engine, self._config.step_timeout + _LATER_S
        return Client(engine.url, engine.api_key, limit, self._routing, engine.version)

    def _around(self, client: Client) -> Surroundings:
        engine, chat, config = self._engine, self._chat, self._config
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
        ended = [one.status for group in gathered.partials for one in group]
        if "aborted" in [*ended, *(rollout.status for rollout in gathered.rollouts)]:
            if self._stream is not None:
                await self._unless_it_fails(self._stream.pause("retract"))
            await asyncio.to_thread(self._engine.drop_requests)
            if self._stream is not None:
                await self._stream.resume()
        return gathered

    def _submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        if not self._thread.is_alive():
            self._thread.start()

        async def named() -> T:
            try:
                return await work
            except RuntimeError:
                await asyncio.to_thread(self._engine.check_runs)  # by its own words, if it died
                raise

        return asyncio.run_coroutine_threadsafe(named(), self._loop)

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
