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
class Generation:
    """One response of the policy, with each token's log-prob as sampled and the weight version.

    finish_reason: `stop` after an end token, which is the last id; `length` after max_new_tokens; `abort` if aborted
    for `abort_reason`, possibly without tokens.
    weight_version, versions: as in `Turn`. If weights were replaced mid-request while the KV cache stayed,
    weight_version is the oldest, because later tokens come from neither version alone.
    routing: [tokens, MoE layers, topk], the experts of the requested tokens, see `Policy`; as in `Rollout`.
    sparse_indices: [tokens, layers, topk], the keys of the requested tokens after the first topk; as in `Rollout`.
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

    def to_turn(self) -> Turn:
        """Return the tokens as a turn of the policy."""
        return Turn(self.token_ids, self.logprobs, True, self.weight_version, self.versions, cached_tokens=self.cached)


TokenCallback = Callable[[Ids], None]
"""Receives the next tokens of a response while it is generated."""


class Policy(Protocol):
    """Anything that can continue a conversation: an engine, or a script in a test."""

    async def generate(
        self,
        ids: Ids | Sequence[int],
        params: dict[str, Any],
        routed: int = 0,
        on_tokens: TokenCallback | None = None,
        *,
        images: Sequence[Image] = (),
    ) -> Generation:
        """Continue `ids` under SGLang's sampling `params`.

        If routing or sparse attention indices are recorded, the caller already has those of the first `routed` tokens.
        The result covers the rest, except the last generated token, which the engine has not run. `on_tokens` gets the
        tokens as they arrive. `images` are those of image tokens in `ids`. Raises RequestFailed.
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
