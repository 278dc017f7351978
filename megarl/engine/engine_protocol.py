"""Protocols, results and errors of all kinds of engines. `engine_backends.py` chooses the kind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, Self, runtime_checkable

import torch

from megarl.config import Config
from megarl.models.routing import RoutingShape
from megarl.models.sparse_indices import IndexShape
from megarl.types import Ids, Image, Logprobs, SamplingMask, Turn


class RequestFailed(RuntimeError):
    """One request was refused, aborted, or answered with an invalid response.

    The conversation is aborted. The engine still runs, so other requests go on.
    """


@dataclass(frozen=True)
class RecordedPrefix:
    """The leading tokens of a sequence whose routing and sparse attention indices are on record.

    tokens: their number. version: version of the weights that read them; None if unknown.
    """

    tokens: int = 0
    version: int | None = None

    def next_start(self, version: int | None) -> int:
        """Return the first token that a request to weights `version` records.

        Other weights read the prefix again, through other experts. They record all of it, so that the whole record is
        of the weights that sample the next tokens.
        """
        return self.tokens if version == self.version else 0


NOT_RECORDED = RecordedPrefix()


@dataclass(frozen=True)
class Generation:
    """One response of the policy, with each token's log-prob as sampled and the weight version.

    finish_reason: `stop` after an end token, which is the last id; `length` after max_new_tokens; `abort` if aborted
    for `abort_reason`, possibly without tokens.
    weight_version, versions: as in `Turn`. If weights were replaced mid-request while the KV cache stayed,
    weight_version is that at the time of the request, because later tokens come from neither version alone.
    routing: [tokens, MoE layers, topk], the experts of the tokens from `record_start` on, see `Policy`; as in
    `Rollout`.
    sparse_indices: [tokens, layers, topk], the keys of the tokens from `record_start` on, but after the first topk; as
    in `Rollout`.
    record_start: first token that the two cover: 0, or the first one that the caller had no record of.
    sampling_mask: if sampling was truncated, the tokens that could have been drawn at each position. The log-probs are
    then of the distribution over these.
    drafted, accepted: number of draft tokens (rollout.num_speculative_tokens), and how many of them were accepted.
    cached: number of prompt tokens found in the engine's prefix cache; -1 if not reported.
    retractions: how often the engine stopped the request because its KV cache was full, to compute it again later; 0
        with vLLM, which does not report it.
    """

    token_ids: Ids
    logprobs: Logprobs
    finish_reason: Literal["stop", "length", "abort"]
    weight_version: int
    versions: tuple[tuple[int, int], ...] = ()
    routing: torch.Tensor | None = None
    sampling_mask: SamplingMask | None = None
    drafted: int = 0
    accepted: int = 0
    abort_reason: str = ""
    cached: int = -1
    sparse_indices: torch.Tensor | None = None
    record_start: int = 0
    retractions: int = 0

    @property
    def has_record(self) -> bool:
        return self.routing is not None or self.sparse_indices is not None

    def extend_prefix(self, known: RecordedPrefix) -> RecordedPrefix:
        """Return the recorded prefix after this response to a request with the prefix `known`."""
        if not self.has_record:
            return known
        return RecordedPrefix(num_recorded(self.record_start, self.routing, self.sparse_indices), self.weight_version)

    def to_turn(self) -> Turn:
        """Return the tokens as a turn of the policy."""
        return Turn(self.token_ids, self.logprobs, True, self.weight_version, self.versions, cached_tokens=self.cached)


def num_recorded(start: int, routing: torch.Tensor | None, indices: torch.Tensor | None) -> int:
    """Return the number of leading tokens on record after a request whose record begins at token `start`.

    A record of sparse attention indices starts after the first topk tokens.
    """
    if routing is not None:
        return start + len(routing)
    return start if indices is None or not len(indices) else max(start, indices.shape[2]) + len(indices)


@dataclass(frozen=True)
class EngineLoad:
    """An engine's load at the moment.

    Attributes:
        num_running, num_waiting: requests in its batch, and in its queue
        cache_usage: share of the KV cache that running requests use; prefixes that could be evicted do not count
        capacity: tokens that the KV cache holds; 0 if unknown
        prefilled, prefill_s: prompt tokens that it has computed since its start, and the seconds that this took; 0 if
            unknown
    """

    num_running: int = 0
    num_waiting: int = 0
    cache_usage: float = 0.0
    capacity: int = 0
    prefilled: int = 0
    prefill_s: float = 0.0


@runtime_checkable
class LoadSource(Protocol):
    """A policy that reports its load. Not every kind of engine does."""

    async def read_load(self) -> EngineLoad | None:
        """Return the engine's load, or None if it does not answer."""
        ...


TokenCallback = Callable[[Ids], None]
"""Receives the next tokens of a response while it is generated."""


class Policy(Protocol):
    """Anything that can continue a conversation: an engine, or a script in a test."""

    async def generate(
        self,
        ids: Ids | Sequence[int],
        params: dict[str, Any],
        recorded: RecordedPrefix = NOT_RECORDED,
        on_tokens: TokenCallback | None = None,
        *,
        images: Sequence[Image] = (),
    ) -> Generation:
        """Continue `ids` under sampling `params`, whose names are those of SGLang's SamplingParams.

        If routing or sparse attention indices are recorded, the caller already has those of the prefix `recorded`. The
        result covers the rest, or all tokens if other weights have read the prefix, except the last generated token,
        which the engine has not run. `on_tokens` gets the tokens as they arrive. `images` are those of image tokens in
        `ids`. Raises RequestFailed.
        """
        ...

    async def stop(self) -> None:
        """Abort the running requests; each returns what it has generated. Later requests are not affected."""
        ...


Fault = Literal["died", "hangs", "did not start again"]


class EngineError(RuntimeError):
    """The engine did not start, died, or refused a weight sync. The message ends with its last log lines."""


class EngineLost(EngineError):
    """The engine must be started again; its requests are lost.

    detection_delay: seconds from its last sign of life until detection, an upper bound on how long it has been gone.
    start_number: that of the lost engine; 0 if unknown.
    """

    def __init__(self, fault: Fault, text: str, detection_delay: float = 0.0, start_number: int = 0) -> None:
        super().__init__(text)
        self.fault, self.detection_delay, self.start_number = fault, detection_delay, start_number


class EngineClient(Policy, Protocol):
    """A connection to one engine; use it with `async with` inside one event loop."""

    weight_version: int | None
    """Version that every response must come from; None accepts any. It may be raised while requests are in flight;
    their responses may then mix both versions. The prefix cache of one version is not reused by the next."""
    should_request_masks: bool
    """Request the sampling mask when sampling is truncated. Training needs it."""
    num_pending: int
    """Number of responses in flight."""
    last_response_time: float
    """When the last response arrived, by time.monotonic."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *_: object) -> None: ...

    async def is_alive(self, seconds: float) -> bool:
        """Return whether the engine's scheduler finishes a batch within `seconds`: with running requests that is one
        token of theirs."""
        ...

    async def parse_tool_calls(
        self, text: str, tools: Sequence[dict[str, Any]], parser: str
    ) -> tuple[str, list[Any]] | None:
        """Parse the tool calls in a response.

        Returns (text outside the calls, calls with `name` and `parameters`), or None if the parser failed. Raises as
        `generate` does.
        """
        ...


GatherPayloads = Callable[[str], list[str]]
"""Collective over an engine's ranks: takes this rank's payload and returns all payloads in rank order, on every
rank. No rank returns before all have entered."""


class Engine(Protocol):
    """Life cycle of one engine. Not thread-safe; one object per engine, on its lead rank.

    An engine across machines has one object on each; only the one with `node_rank` 0 generates.
    """

    config: Config
    index: int
    """Number of the engine among those of its role."""
    name: str
    """Name in messages."""
    log: Path
    nnodes: int
    node_rank: int
    api_key: str
    start_number: int
    """Number of starts so far, restarts included."""
    weight_version: int
    """Version of the last weight sync; 0 for the weights that the engine loaded itself, also beside adapters."""
    is_usable: bool
    """True if the engine may generate: it is ready, and no weight sync has failed since the last complete one."""
    is_paused: bool
    """True between `pause_generation` and `resume_generation`."""
    tool_call_parser: str
    """Name of the parser for the policy's tool calls."""
    tool_call_marker: str
    """Text by which the parser recognizes a tool call; empty if it has none."""

    @property
    def url(self) -> str:
        """Address at which the engine answers OpenAI's chat completions, with `api_key`."""
        ...

    def version_of(self, adapter: str) -> int:
        """Return the version of the last weight sync of an adapter (`rollout.max_loras`), 0 before the first; for an
        empty name, `weight_version`."""
        ...

    @property
    def is_asleep(self) -> bool:
        """True if some of its memory is released."""
        ...

    def connect(
        self,
        timeout: float,
        routing: RoutingShape | None = None,
        indices: IndexShape | None = None,
        adapter: str = "",
    ) -> EngineClient:
        """Return a client of the engine as it runs now; its requests raise EngineLost once that has ended.

        timeout: seconds per request, including time in the engine's queue.
        routing, indices: shapes of the engine's records of routing and of sparse attention indices, if rollouts need
        them.
        adapter: name of the adapter to generate with (`rollout.max_loras`); empty if the engine merges them.
        """
        ...

    def start(self) -> None:
        """Start the engine's processes; returns immediately."""
        ...

    def restart(self) -> None:
        """End what is left of the engine, and start it again."""
        ...

    def wait_ready(self, timeout: float | None = None) -> None:
        """Block until the engine answers; `timeout` defaults to `rollout.start_timeout` seconds.

        Raises EngineError with the last log lines if it dies or times out.
        """
        ...

    def check_running(self, start_number: int = 0) -> None:
        """Raise EngineLost if the engine is gone; one that was started again since `start_number` is another."""
        ...

    def hang_error(self, seconds: float) -> EngineLost:
        """Return the EngineLost for an engine that sent no heartbeat for `seconds`."""
        ...

    def begin_update(self) -> None:
        """Open a weight update for `call_loader`. The engine is unusable until `end_update` with a version."""
        ...

    def call_loader(self, payloads: list[str], draft: bool = False, is_session: bool = False) -> None:
        """Have the weight loader on each of the engine's ranks execute its payload, see `weight_sender.py`.

        Returns when all are done; their answers are in the shared memory that the payloads name. draft: address the
        draft model, which has the multi-token prediction layers. is_session: the request spans a weight sync.
        """
        ...

    def end_update(self, version: int | None, adapter: str = "") -> None:
        """Close the weight update.

        version: weight version that the engine now holds completely; None if the update failed: the engine stays
        unusable. adapter: the one that has this version now, if the update wrote one beside others. While generation is
        paused the KV cache stays: paused responses go on with it, and later requests use a separate prefix cache, keyed
        by the version.
        """
        ...

    def pause_generation(self) -> None:
        """Pause all responses at the next token until `resume_generation`; they keep their KV cache."""
        ...

    def resume_generation(self) -> None:
        """Undo `pause_generation`, if it was called."""
        ...

    def abort_requests(self) -> None:
        """Abort every request, even those whose client has given up; return when the engine is idle."""
        ...

    def sleep(self) -> None:
        """Free the device for training."""
        ...

    def wake_weights(self) -> None:
        """Onload the weights alone, for a weight sync."""
        ...

    def wake(self) -> None:
        """Onload everything that is still offloaded, before generating."""
        ...

    def shutdown(self) -> None:
        """End the engine and all of its processes for good. Idempotent; also runs at exit."""
        ...
