"""The gap between trainer and engine, log p_trainer - log p_engine of the same token, taken apart into its causes.

Of each token that the policy chose a recorded rollout has what the engine said when it drew it, and, of a step that has
looked, what the trainer says before its updates (`rollout_table`). With `train.replay_routing` that is twice: through
the experts that the engine chose, and through those that the trainer chooses. So the gap is a sum:

    log p_trainer - log p_engine  =  (own experts - replayed experts)  +  (replayed experts - log p_engine)
                                      routing                              staleness, a carried prefix ..., or the rest

*Routing* is measured: the difference of two passes of the same weights and kernels. Training with replay does not have
it. Without replay there is one pass, and routing is within the rest. The other part has one cause for each token, the
first of these that holds:

    staleness   weights before those that the trainer has now chose it
    prefix      they chose a token before it in its rollout, and not this one: the engine has kept what stands before
                it, or read it again by newer weights, and where routing is replayed the trainer's way through the
                experts may be another one
    cut-off     what it could be was cut off (`rollout.top_p`, `top_k`, `min_p`): both sides are over the words that
                the engine kept, so what is left are kernels, which a small set of words makes larger or smaller. With
                one word left it is 0
    kernels     the same weights over all words, of a turn for which the engine had nothing in its cache: it computed
                all that stands before it at once, as the trainer does, and the turn itself token by token
    cache       likewise, of a turn for which it had: keys and values that another request left there, or an earlier
                turn of the same conversation, which the policy's own tokens wrote one by one, in other batches

Files of runs that did not put it on record (`turn_cached_tokens`) have `kernels and cache` instead, in a first turn,
where only a prompt can come from the cache, and in later ones.

`kernels` and `cache` are of different tokens, and a token behind a long conversation may be another kind of token. So
`twins` compares the same with the same: samples of a prompt begin alike, and where several have chosen the same token
behind the same tokens, by the same weights, the engine has said its log-prob several times over. Two of these differ by
what it had cached, or, where it had cached nothing for both, by the batches alone that they were computed in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megarl.observe.rollout_table import Record
from megarl.types import Rollout

REMAINDER_CAUSES = (
    *("staleness", "carried prefix", "cut-off sampling", "kernels, nothing cached", "cache, and kernels"),
    *("kernels and cache, first turn", "kernels and cache, later turns"),
)
"""Causes of the part that is not routing, by their numbers in `LogprobGaps.cause_ids`."""
ROUTING = "routing"


@dataclass(frozen=True)
class LogprobGaps:
    """Of n tokens that the policy chose, and of which both sides have said something that is finite."""

    engine: np.ndarray  # [n] float64 log-probs
    trainer: np.ndarray  # [n] float64, through experts that it chose itself, where it has looked at that
    routing: np.ndarray  # [n] float64, the part of routing; nan where it was not looked at
    remainder: np.ndarray  # [n] float64, the other part
    cause_ids: np.ndarray  # [n] int8, place in RESTS
    staleness: np.ndarray  # [n] int32, versions by which the weights that chose it are older
    mask_sizes: np.ndarray  # [n] int32 words that it could be; 0 for all
    cached_tokens: (
        np.ndarray
    )  # [n] int32 tokens before its turn that the engine had in its cache; -1 where it did not say
    positions: np.ndarray  # [n, 2] int64: which of the records, which of its tokens
    num_missing: int = 0  # rollouts of which the trainer has said nothing
    num_nonfinite: int = 0  # tokens left out

    def __len__(self) -> int:
        return len(self.engine)

    @property
    def gap(self) -> np.ndarray:
        """[n] log p_trainer - log p_engine."""
        return self.trainer - self.engine


def compute_gaps(records: Sequence[Record], version: int) -> LogprobGaps:
    """version: of the trainer's weights in their step. Records of what could be drawn must have been read, too."""
    parts = [
        found
        for number, record in enumerate(records)
        if (found := _rollout_columns(number, record, version)) is not None
    ]
    columns = [np.concatenate([part[i] for part in parts]) if parts else np.zeros(0) for i in range(9)]
    engine, replayed, free, rest_of, lag, choices, cached, number, place = columns
    own = np.where(np.isnan(free), replayed, free)
    keep = np.isfinite(engine) & np.isfinite(own) & np.isfinite(replayed)
    return LogprobGaps(
        engine=engine[keep],
        trainer=own[keep],
        routing=(free - replayed)[keep],
        remainder=(replayed - engine)[keep],
        cause_ids=rest_of[keep].astype(np.int8),
        staleness=lag[keep].astype(np.int32),
        mask_sizes=choices[keep].astype(np.int32),
        cached_tokens=cached[keep].astype(np.int32),
        positions=np.stack([number, place], 1).astype(np.int64)[keep],
        num_missing=sum(record.trainer_logprobs is None for record in records),
        num_nonfinite=int((~keep).sum()),
    )


def _rollout_columns(number: int, record: Record, version: int) -> tuple[np.ndarray, ...] | None:
    """Columns of one rollout's tokens that the policy chose."""
    rollout, says = record.rollout, record.trainer_logprobs
    if says is None or not rollout.num_actions:
        return None
    lengths = [len(turn.token_ids) for turn in rollout.turns]
    written = np.repeat([turn.is_action for turn in rollout.turns], lengths)
    engine = np.concatenate([turn.logprobs for turn in rollout.turns if turn.is_action]).astype(np.float64)
    lag = np.concatenate([version - turn.token_versions for turn in rollout.turns if turn.is_action]).clip(min=0)
    which = np.cumsum([turn.is_action for turn in rollout.turns])
    turn = np.repeat(which, lengths)[written]
    support = rollout.sampling_mask
    choices = np.zeros(len(engine), np.int32) if support is None else support.counts.numpy()
    carried, cached = np.maximum.accumulate(lag) > 0, _cached_by_token(rollout)
    rest_of = np.select([lag > 0, carried, choices > 0, cached == 0, cached > 0, turn <= 1], [0, 1, 2, 3, 4, 5], 6)
    free = np.full(len(engine), np.nan) if says.unreplayed is None else says.unreplayed[written].astype(np.float64)
    place = np.flatnonzero(written)
    says_so = says.logprobs[written].astype(np.float64)
    return engine, says_so, free, rest_of, lag, choices, cached, place * 0 + number, place


def _cached_by_token(rollout: Rollout) -> np.ndarray:
    """[actions] of each token that the policy chose, what was cached for its turn."""
    own = [turn for turn in rollout.turns if turn.is_action]
    return np.repeat(np.array([turn.cached_tokens for turn in own], np.int32), [len(turn.token_ids) for turn in own])


@dataclass(frozen=True)
class Cause:
    """One part of the gap. tokens: that have it; mean, p99, largest: of its |part| over these, in nats; share: of the
    sum of |part| over all parts and tokens."""

    name: str
    tokens: int
    mean: float
    p99: float
    largest: float
    share: float


def summarize_causes(gaps: LogprobGaps) -> list[Cause]:
    """One for each cause that has tokens, largest share first, and the whole gap last, under the name `all`."""
    measured = ~np.isnan(gaps.routing)
    parts = {ROUTING: np.abs(gaps.routing[measured])}
    parts |= {name: np.abs(gaps.remainder[gaps.cause_ids == i]) for i, name in enumerate(REMAINDER_CAUSES)}
    total = sum(float(part.sum()) for part in parts.values())
    found = [_summarize_part(name, part, total) for name, part in parts.items() if len(part)]
    whole = np.abs(gaps.gap)
    return [
        *sorted(found, key=lambda cause: -cause.share),
        *([_summarize_part("all", whole, 0.0)] if len(whole) else []),
    ]


def _summarize_part(name: str, part: np.ndarray, total: float) -> Cause:
    whole = float(part.sum())
    share = whole / total if total else 1.0 if name == "all" else 0.0
    p99 = float(np.quantile(part, 0.99, method="higher"))
    return Cause(name, len(part), float(part.mean()), p99, float(part.max()), share)


def find_worst(gaps: LogprobGaps, count: int) -> list[dict[str, Any]]:
    """The tokens with the largest gap: where they are, what both sides said, and the cause of the larger part."""
    order = np.argsort(-np.abs(gaps.gap), kind="stable")[:count]
    found = []
    for i in order.tolist():
        routing = float(np.nan_to_num(gaps.routing[i]))
        found.append(
            {
                "record": int(gaps.positions[i, 0]),
                "token": int(gaps.positions[i, 1]),
                "gap": float(gaps.gap[i]),
                "engine": float(gaps.engine[i]),
                "trainer": float(gaps.trainer[i]),
                "routing": routing,
                "lag": int(gaps.staleness[i]),
                "choices": int(gaps.mask_sizes[i]),
                "cached": int(gaps.cached_tokens[i]),
                "cause": ROUTING if abs(routing) > abs(gaps.remainder[i]) else REMAINDER_CAUSES[gaps.cause_ids[i]],
            }
        )
    return found


TWIN_KINDS = ("cached for one, not for the other", "cached for both", "cached for neither")
"""What two requests that said the log-prob of one token differ in, `Cause.name` of `compare_twins`."""


def compare_twins(records: Sequence[Record], version: int) -> list[Cause]:
    """How far the engine's log-probs of the same token behind the same tokens are apart, by what was cached for either:
    each token is held against the first of its twins for which nothing was cached, and, where there is none, against
    the first of all. Of tokens that the weights of `version` chose out of all words, behind none of older weights, and
    where it is on record what was cached. `share` means nothing here and is 0. The trainer need not have looked."""
    parts = [part for record in records if (part := _hash_prefixes(record.rollout, version)) is not None]
    if not parts:
        return []
    key, cached, logprob = (np.concatenate([part[i] for part in parts]) for i in range(3))
    # Within a key those without a cache come first, in the order of the records.
    order = np.lexsort((cached, key))
    key, cached, logprob = key[order], cached[order], logprob[order]
    first = np.concatenate([[True], key[1:] != key[:-1]])
    base = np.maximum.accumulate(np.where(first, np.arange(len(key)), 0))
    gap = np.abs(logprob - logprob[base])
    kinds = np.select([~cached, cached[base]], [2, 1], 0)
    found = [(name, gap[~first & (kinds == i)]) for i, name in enumerate(TWIN_KINDS)]
    return [_summarize_part(name, part, 0.0) for name, part in found if len(part)]


def _hash_prefixes(rollout: Rollout, version: int) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
    """Of its tokens that can have twins: [n] uint64 hash of all tokens down to each, [n] bool whether something was
    cached for its turn, [n] float64 the engine's log-prob."""
    own = [turn for turn in rollout.turns if turn.is_action]
    if not rollout.num_actions or max(turn.cached_tokens for turn in own) < 0:
        return None
    written = np.repeat([turn.is_action for turn in rollout.turns], [len(turn.token_ids) for turn in rollout.turns])
    ids = rollout.token_ids.astype(np.uint64)
    prefix = np.cumsum(_splitmix64(_splitmix64(ids) + np.arange(len(ids), dtype=np.uint64)), dtype=np.uint64)[written]
    cached = _cached_by_token(rollout)
    old = np.concatenate([turn.token_versions for turn in own]) != version
    keep = ~np.maximum.accumulate(old) & (cached >= 0)
    if rollout.sampling_mask is not None:
        keep &= rollout.sampling_mask.counts.numpy() == 0
    logprobs = np.concatenate([turn.logprobs for turn in own]).astype(np.float64)
    keep &= np.isfinite(logprobs)
    return prefix[keep], cached[keep] > 0, logprobs[keep]


def _splitmix64(values: np.ndarray) -> np.ndarray:
    """[n] uint64 whose bits all depend on all bits of a value (splitmix64, Steele et al. 2014)."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
