"""What can continue a conversation, and what it answers: an engine (`client.py`), or a script in a test."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

import torch

from megarl.types import Ids, Logprobs, SamplingMask


class RequestFailed(RuntimeError):
    """One request was refused, cut off, or answered with what cannot be an answer. Its conversation is aborted; other
    requests go on, for the engine is there."""


@dataclass(frozen=True)
class Generation:
    """What the policy wrote in one turn, with the log-prob of each token as sampled and the version of the weights.

    finish: `stop` after an end token, which is the last id; `length` after max_new_tokens; `abort` when cut off, for
    the `reason`; then there may be no tokens.
    weight_version, versions: as of a `Turn`; of weights that were replaced in the middle of a request, keys and values
    staying as they were, the oldest, for the tokens after it were drawn by neither.
    routing: [tokens, MoE layers, topk], the experts of the tokens that were asked for, see `Policy`; as of a `Rollout`.
    support: where sampling was cut off, what could have been drawn in the place of each token; the log-probs are of the
    distribution over these.
    drafted, accepted: tokens that were drafted for it (rollout.draft_tokens), and those of them that it accepted.
    cached: of the tokens that were asked for, those that the engine had in its cache; -1 where it does not say.
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


class Policy(Protocol):
    """Whatever can continue a conversation: an engine, or a script in a test."""

    async def generate(self, ids: Ids | Sequence[int], params: dict[str, Any], routed: int = 0) -> Generation:
        """Continue `ids` under SGLang's sampling `params`.

        Where routing is recorded, that of the first `routed` tokens is known from before; what comes back is of the
        others, but for the last one written, which the engine has not run. Raises RequestFailed.
        """
        ...

    async def stop(self) -> None:
        """Have what is being generated answered now, as far as it is written, as cut off. What is asked for later, or
        is on its way, is not stopped."""
        ...


TokenCallback = Callable[[Ids], None]
"""Is told the next tokens of an answer while it is written."""


@runtime_checkable
class StreamingPolicy(Protocol):
    """A policy that can be listened to."""

    async def stream(
        self, ids: Ids | Sequence[int], params: dict[str, Any], routed: int, heard: TokenCallback
    ) -> Generation:
        """As `Policy.generate`, with the same result."""
        ...
