"""Interface of engines for rollouts: protocols, results and errors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch

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
        """Continue `ids` under SGLang's sampling `params`.

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
