"""An engine with a KV cache, simulated request by request, and an event loop whose clock jumps over all waits.

The engine follows SGLang's scheduler: requests start in the order of arrival, if the cache has room for their prompts
and for the tokens that running ones are expected to write. It evicts the least recently used prefixes, and retracts
requests if the cache is full all the same.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from megarl.engine.engine_protocol import NOT_RECORDED, EngineLoad, Generation, RecordedPrefix
from megarl.types import Ids, as_token_ids

T = TypeVar("T")
_MAX_STEPS = 16
"""Tokens that a batch writes between two looks at the queue."""
_CLIP_TOKENS = 4096
"""Tokens that the engine expects of a request at most."""
_RETRACT_STEPS = 20
"""Steps for which a retraction makes room."""
_PREFILL_TOKENS = 8192
"""Prompt tokens of a step."""


class _Clock(selectors.SelectSelector):
    """A selector that does not wait, but advances the loop's clock."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        assert timeout is not None, "nothing will ever happen"
        self.now += max(0.0, timeout)
        return super().select(0)


def run_simulated(work: Coroutine[Any, Any, T]) -> tuple[T, float]:
    """Run a coroutine in simulated time; return its result and the seconds that have passed there."""
    clock = _Clock()
    loop = asyncio.SelectorEventLoop(clock)
    loop.time = lambda: clock.now  # type: ignore[method-assign]
    try:
        return loop.run_until_complete(work), clock.now
    finally:
        loop.close()


@dataclass(frozen=True)
class EngineSpec:
    """Sizes and speeds of an engine; by default those of a dense model of 8B on an H100.

    Attributes:
        capacity: tokens of its KV cache
        step_s, token_s, prefill_s: seconds of a decoding step, of each token in the cache of its requests, and of a
            prompt token
        max_requests: requests in a batch
    """

    capacity: int = 300_000
    step_s: float = 8e-3
    token_s: float = 5e-8
    prefill_s: float = 4e-5
    max_requests: int = 256


@dataclass(eq=False)
class _Request:
    key: int
    prompt: int
    remaining: int
    limit: int
    done: asyncio.Future[None]
    written: int = 0
    cached: int = -1
    retractions: int = 0

    @property
    def tokens(self) -> int:
        return self.prompt + self.written


@dataclass
class EngineCounts:
    """Counts of a simulated run: tokens computed and computed again, retractions, and seconds with an empty batch."""

    prefilled: int = 0
    recomputed: int = 0
    decoded: int = 0
    retractions: int = 0
    idle_s: float = 0.0


class SimulatedEngine:
    """A `Policy` that writes `params["num_tokens"]` tokens of the conversation `params["conversation"]`."""

    def __init__(self, spec: EngineSpec) -> None:
        self._spec = spec
        self.counts = EngineCounts()
        self._waiting: list[_Request] = []
        self._running: list[_Request] = []
        self._prefixes: dict[int, int] = {}
        """Cached tokens of conversations without a running request, the least recently used first."""
        self._computed: dict[int, int] = {}
        """Tokens of each conversation that the engine has computed at least once."""
        self._prefill = 0, 0.0
        """Prompt tokens computed, and the seconds that this took."""
        self._wake = asyncio.Event()
        self._ratio = 0.7
        """Share of the possible tokens that a running request is expected to write, as SGLang estimates it."""

    async def generate(
        self,
        ids: Ids | Sequence[int],
        params: dict[str, Any],
        recorded: RecordedPrefix = NOT_RECORDED,
        *_: Any,
        **__: Any,
    ) -> Generation:
        done = asyncio.get_running_loop().create_future()
        request = _Request(params["conversation"], len(ids), params["num_tokens"], params["max_new_tokens"], done)
        self._waiting.append(request)
        self._wake.set()
        await done
        tokens = as_token_ids(np.ones(params["num_tokens"], np.int32))
        logprobs = np.zeros(len(tokens), np.float32)
        return Generation(tokens, logprobs, "stop", 1, cached=request.cached, retractions=request.retractions)

    async def stop(self) -> None:
        """Do nothing: no simulated run pauses."""

    async def read_load(self) -> EngineLoad:
        used = sum(request.tokens for request in self._running)
        capacity = self._spec.capacity
        return EngineLoad(len(self._running), len(self._waiting), used / capacity, capacity, *self._prefill)

    async def run(self) -> None:
        """Compute until cancelled."""
        clock = asyncio.get_running_loop().time
        while True:
            if not self._waiting and not self._running:
                began = clock()
                self._wake.clear()
                await self._wake.wait()
                self.counts.idle_s += clock() - began
            if prefilled := self._admit():
                seconds = prefilled * self._spec.prefill_s + self._spec.step_s
                await asyncio.sleep(seconds)
                self._prefill = self._prefill[0] + prefilled, self._prefill[1] + seconds
            elif self._running:
                await self._decode()
            else:
                raise ValueError("a request does not fit in the cache")

    @property
    def _free(self) -> int:
        """Tokens that are not those of running requests; prefixes can be evicted."""
        return self._spec.capacity - sum(request.tokens for request in self._running)

    def _admit(self) -> int:
        """Start requests that fit and return the number of tokens that they compute."""
        room = self._free - sum(self._expect(request) * self._ratio for request in self._running)
        prefilled = 0
        while self._waiting and len(self._running) < self._spec.max_requests and prefilled < _PREFILL_TOKENS:
            request = self._waiting[0]
            needed = request.tokens + self._expect(request)
            if needed > room and self._running:
                break
            self._waiting.pop(0)
            cached = min(self._prefixes.pop(request.key, 0), request.tokens - 1)
            request.cached = cached if request.cached < 0 else request.cached
            self._running.append(request)
            self._evict()
            room -= needed
            prefilled += request.tokens - cached
            known = self._computed.get(request.key, 0)
            self.counts.recomputed += max(0, min(known, request.tokens) - cached)
            self._computed[request.key] = max(known, request.tokens)
        self.counts.prefilled += prefilled
        return prefilled

    def _expect(self, request: _Request) -> int:
        return min(request.limit - request.written, _CLIP_TOKENS)

    def _evict(self) -> None:
        """Evict the ends of the least recently used prefixes until the cache is not over-full."""
        excess = sum(self._prefixes.values()) - self._free
        while excess > 0 and self._prefixes:
            key = next(iter(self._prefixes))
            taken = min(excess, self._prefixes[key])
            self._prefixes[key] -= taken
            excess -= taken
            if not self._prefixes[key]:
                del self._prefixes[key]

    async def _decode(self) -> None:
        """Write a few tokens of every running request, and retract requests first if there is no room for them."""
        if self._free < len(self._running):
            self._retract()
        count = len(self._running)
        steps = min(_MAX_STEPS, min(request.remaining for request in self._running), max(1, self._free // count))
        tokens = sum(request.tokens for request in self._running)
        await asyncio.sleep(steps * (self._spec.step_s + self._spec.token_s * (tokens + count * steps / 2)))
        self._ratio = max(0.1, self._ratio - steps * 1e-3)
        finished = []
        for request in self._running:
            request.written += steps
            request.remaining -= steps
            self._computed[request.key] = max(self._computed[request.key], request.tokens)
            if not request.remaining:
                finished.append(request)
        self.counts.decoded += steps * count
        self._running = [request for request in self._running if request.remaining]
        for request in finished:
            self._prefixes[request.key] = request.tokens
            request.done.set_result(None)
        self._evict()

    def _retract(self) -> None:
        """Start requests over that have written the fewest tokens."""
        self._running.sort(key=lambda request: request.written)
        while len(self._running) > 1 and self._free < _RETRACT_STEPS * len(self._running):
            request = self._running.pop(0)
            request.retractions += 1
            self.counts.retractions += 1
            self._waiting.insert(0, request)
        written = sum(request.written for request in self._running) + _RETRACT_STEPS * len(self._running)
        self._ratio = min(1.0, written / sum(request.limit for request in self._running))


@dataclass(frozen=True)
class Workload:
    """Conversations with long tails: log-normal lengths and tool times.

    Attributes:
        conversations, max_turns: number of conversations, and of their turns at most; the actual number is uniform
        prompt, response, result: median tokens of a prompt, a response and a tool's result
        tool_s: median seconds of a call
        tail: sigma of the log-normal distributions
        max_response: tokens that a response may have
        max_context: tokens at which a conversation ends
    """

    conversations: int = 256
    max_turns: int = 16
    prompt: int = 1000
    response: int = 200
    result: int = 300
    tool_s: float = 2.0
    tail: float = 1.0
    max_response: int = 4096
    max_context: int = 65536

    def draw(self, number: int) -> SimulatedConversation:
        rng = np.random.default_rng(number)
        turns = int(rng.integers(1, self.max_turns + 1))

        def lengths(median: float, limit: int) -> list[int]:
            return [int(min(limit, max(1, value))) for value in median * rng.lognormal(0, self.tail, turns)]

        calls = [float(value) for value in self.tool_s * rng.lognormal(0, self.tail, turns)]
        sizes = lengths(self.response, self.max_response), lengths(self.result, 8192)
        return SimulatedConversation(
            number, lengths(self.prompt, self.max_context // 4)[0], *sizes, calls, self.max_response, self.max_context
        )


@dataclass(frozen=True)
class SimulatedConversation:
    number: int
    prompt: int
    responses: list[int]
    results: list[int]
    calls: list[float]
    max_response: int
    max_context: int
