"""The client of an engine of the run, which shares its requests with external engines (`external_engines.py`)."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import Sequence
from typing import Any, Self
from weakref import WeakKeyDictionary

from megarl.engine.engine_protocol import (
    NOT_RECORDED,
    EngineClient,
    EngineLoad,
    Generation,
    LoadSource,
    RecordedPrefix,
    RequestFailed,
    TokenCallback,
)
from megarl.engine.external_engines import ExternalEngine, ExternalEngines
from megarl.engine.external_wire import Wire, WireError
from megarl.types import Ids, Image

_RETRY_S = 0.1
"""Seconds between repeated requests to stop: one may have been on its way."""


class _Lost(RuntimeError):
    """The external engine cannot answer; another one has to."""


class _Connection:
    """A connection for requests to one external engine, for one session."""

    def __init__(self, engine: ExternalEngine, timeout: float, hang_timeout: float) -> None:
        self._engine, self.token = engine, engine.token
        self._timeout, self._hang_timeout = timeout, hang_timeout
        self._numbers = itertools.count()
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._wire: Wire | None = None
        self._problem = ""
        self._reader = asyncio.create_task(self._run())
        self._is_open = asyncio.Event()

    async def generate(self, request: dict[str, Any]) -> Generation:
        """Return the response to a request. Raises RequestFailed, and _Lost if another engine has to answer it."""
        await self._is_open.wait()
        number = next(self._numbers)
        if self._problem or self._wire is None:
            raise _Lost(self._problem)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        try:
            await self._wire.send_async({"do": "generate", "number": number, **request})
            message = await answer
        except WireError as error:
            raise _Lost(str(error)) from None
        except asyncio.CancelledError:
            with contextlib.suppress(WireError):
                await self._wire.send_async({"do": "cancel", "number": number})
            raise
        finally:
            self._answers.pop(number, None)
        if "lost" in message:
            raise _Lost(message["lost"])
        if "failed" in message:
            raise RequestFailed(message["failed"])
        generation: Generation = message["generation"]
        return generation

    @property
    def is_busy(self) -> bool:
        """Whether it is still connecting, or has open requests."""
        return bool(self._answers) or not self._is_open.is_set()

    async def stop(self) -> None:
        """Abort the running requests; each returns what it has generated."""
        if self._wire is not None and self._answers:
            with contextlib.suppress(WireError):
                await self._wire.send_async({"do": "stop", "number": -1})

    async def close(self, problem: str = "") -> None:
        """Hang up; running requests are lost."""
        self._problem = self._problem or problem
        self._reader.cancel()
        await asyncio.wait([self._reader])

    async def _run(self) -> None:
        """Connect, and receive until the connection ends. Nothing, not even a sign of life, for too long ends it."""
        try:
            self._wire = await asyncio.to_thread(self._connect)
            await self._wire.open_streams()
            self._is_open.set()
            while True:
                async with asyncio.timeout(self._hang_timeout):
                    message = await self._wire.receive_async()
                answer = self._answers.get(message.get("number", -1))
                if answer is not None and not answer.done():
                    answer.set_result(message)
        except TimeoutError:
            self._problem = f"no sign of life for {self._hang_timeout:g} s"
        except WireError as error:
            self._problem = str(error)
        finally:
            self._problem = self._problem or "the connection is closed"
            self._is_open.set()
            for answer in self._answers.values():
                if not answer.done():
                    answer.set_result({"lost": self._problem})
            if self._wire is not None:
                self._wire.close()
                self._wire.close_streams()

    def _connect(self) -> Wire:
        wire = Wire.connect(self._engine.address)
        wire.send({"kind": "requests", "token": self.token, "timeout": self._timeout})
        if error := wire.receive().get("error"):
            wire.close()
            raise WireError(error)
        return wire


class SharedClient:
    """An `EngineClient` that sends part of the requests of `local`, a client of the run's engine, to external engines.

    Each conversation stays with one engine, whose prefix cache it uses, as long as that may generate. A request that an
    external engine loses is sent again, to another one or by `local`. What concerns more than one request, such as
    `num_pending`, is that of `local`; errors that end a generation, too.

    timeout: seconds per request. hang_timeout: seconds without a sign of life.
    """

    def __init__(self, local: EngineClient, external: ExternalEngines, timeout: float, hang_timeout: float) -> None:
        self._local, self._external, self._timeout, self._hang_timeout = local, external, timeout, hang_timeout
        self._num_local = self._num_external = 0
        """Open requests of either kind of engine."""
        self._connections: dict[str, _Connection] = {}
        """By token."""
        self._assigned: WeakKeyDictionary[Any, ExternalEngine | None] = WeakKeyDictionary()
        """The engine of each conversation; None for that of `local`."""

    async def __aenter__(self) -> Self:
        await self._local.__aenter__()
        return self

    async def __aexit__(self, *error: object) -> None:
        for connection in self._connections.values():
            await connection.close()
        await self._local.__aexit__(*error)

    @property
    def weight_version(self) -> int | None:
        return self._local.weight_version

    @weight_version.setter
    def weight_version(self, version: int | None) -> None:
        self._local.weight_version = version

    @property
    def should_request_masks(self) -> bool:
        return self._local.should_request_masks

    @should_request_masks.setter
    def should_request_masks(self, value: bool) -> None:
        self._local.should_request_masks = value

    @property
    def num_pending(self) -> int:
        """Responses in flight of `local`."""
        return self._local.num_pending

    @num_pending.setter
    def num_pending(self, value: int) -> None:
        self._local.num_pending = value

    @property
    def last_response_time(self) -> float:
        return self._local.last_response_time

    @last_response_time.setter
    def last_response_time(self, value: float) -> None:
        self._local.last_response_time = value

    async def is_alive(self, seconds: float) -> bool:
        return await self._local.is_alive(seconds)

    async def read_load(self) -> EngineLoad | None:
        """Return the load of `local`."""
        return await self._local.read_load() if isinstance(self._local, LoadSource) else None

    async def parse_tool_calls(
        self, text: str, tools: Sequence[dict[str, Any]], parser: str
    ) -> tuple[str, list[Any]] | None:
        return await self._local.parse_tool_calls(text, tools, parser)

    async def stop(self) -> None:
        await asyncio.gather(self._local.stop(), self.stop_external())

    async def stop_external(self, wait: bool = False) -> None:
        """Abort the requests of external engines; each returns what it has generated.

        wait: until all have, also those that still connect; an engine that does not return them in time is given up.
        """
        deadline = time.monotonic() + self._hang_timeout
        await self._stop_connections()
        while wait and self._num_external:
            await asyncio.sleep(_RETRY_S)
            if time.monotonic() < deadline:
                await self._stop_connections()
            else:
                problem = f"requests have not stopped for {self._hang_timeout:g} s"
                busy = [connection for connection in self._connections.values() if connection.is_busy]
                await asyncio.gather(*(connection.close(problem) for connection in busy))

    async def _stop_connections(self) -> None:
        await asyncio.gather(*(connection.stop() for connection in self._connections.values()))

    async def generate(
        self,
        ids: Ids | Sequence[int],
        params: dict[str, Any],
        recorded: RecordedPrefix = NOT_RECORDED,
        on_tokens: TokenCallback | None = None,
        *,
        images: Sequence[Image] = (),
        conversation: object = None,
    ) -> Generation:
        """As `Policy.generate`; an external engine passes all tokens to `on_tokens` at once.

        conversation: identifies the conversation, which stays with one engine.
        """
        version, is_repeat = self.weight_version, False
        while True:
            usable = self._external.usable(version)
            engine = self._assigned.get(conversation) if conversation is not None else None
            is_assigned = conversation is not None and conversation in self._assigned
            if not is_assigned or (engine is not None and engine not in usable):
                fewest = min((other.pending for other in usable), default=self._num_local)
                engines = (other for other in usable if other.pending == fewest < self._num_local)
                engine = next(engines, None)
                if is_assigned:  # the record must be of one engine: others may round to other experts
                    recorded = NOT_RECORDED
                if conversation is not None:
                    self._assigned[conversation] = engine
            self._external.num_repeated += is_repeat
            if engine is None:
                options: dict[str, Any] = {"images": images} if images else {}
                self._num_local += 1
                try:
                    generation = await self._local.generate(ids, params, recorded, on_tokens, **options)
                    self._external.num_responses += 1
                    return generation
                finally:
                    self._num_local -= 1
            request: dict[str, Any] = {"ids": ids, "params": params, "recorded": recorded, "images": tuple(images)}
            request |= {"version": version, "masks": self.should_request_masks}
            connection = self._connect(engine)
            engine.pending, self._num_external = engine.pending + 1, self._num_external + 1
            try:
                generation = await connection.generate(request)
            except _Lost as lost:
                engine.drop(str(lost), connection.token)
                is_repeat = True
                continue
            finally:
                engine.pending, self._num_external = engine.pending - 1, self._num_external - 1
            self._external.num_responses += 1
            self._external.num_external += 1
            if on_tokens is not None and len(generation.token_ids):
                on_tokens(generation.token_ids)
            return generation

    def _connect(self, engine: ExternalEngine) -> _Connection:
        connection = self._connections.get(engine.token)
        if connection is None:
            connection = _Connection(engine, self._timeout, self._hang_timeout)
            self._connections[engine.token] = connection
        return connection
