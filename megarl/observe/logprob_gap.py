"""Decompose the gap log p_trainer - log p_engine of the same token into its causes.

For each sampled token a recorded rollout has the engine's log-prob at sampling time and, if the step computed it, the
trainer's log-prob before the updates (`rollout_table`). With `train.routing_replay` the trainer has two: one through
the experts that the engine chose, one through the experts that it chooses itself. So the gap is a sum:

    log p_trainer - log p_engine  =  (own experts - replayed experts)  +  (replayed experts - log p_engine)
                                      routing                              staleness, a cut-off, or the rest

*Routing* is measured as the difference of two passes with the same weights and kernels. Training with replay is free of
it. Without replay there is only one pass, and routing is part of the remainder. Each token's remainder is attributed to
the first of these causes that applies:

    staleness   the token was sampled with older weights than the trainer's
    cut-off     sampling was truncated (`rollout.top_p`, `top_k`, `min_p`): both sides normalize over the tokens that
                the engine kept, so only kernels differ, amplified or damped by the small support. With a single token
                in the support the gap is 0
    kernels     same weights, full vocabulary, and a turn without cached tokens: the engine prefilled everything before
                it at once, as the trainer does, and decoded the turn token by token
    cache       the same, for a turn with cached tokens: keys and values left by another request or by an earlier turn
                of the conversation, whose sampled tokens were decoded one by one, in other batches

Where it is unknown what was cached, the cause is `kernels and cache`, split into first turns, where only the prompt can
come from the cache, and later ones: in recordings without `turn_cached_tokens`, and for tokens with which newer weights
continued a turn, because only its first request is on record.

`kernels` and `cache` cover different tokens, and tokens late in a long conversation may be of a different kind. So
`compare_twins` compares like with like: samples of one prompt share prefixes, and where several sampled the same token
after the same prefix with the same weights, the engine has reported its log-prob several times. Two such log-probs
differ by what was cached or, if nothing was cached for either, only by the batches that they were computed in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megarl.observe.rollout_table import Record
from megarl.types import Rollout

REMAINDER_CAUSES = (
    *("staleness", "truncated sampling", "kernels, nothing cached", "cache, and kernels"),
    *("kernels and cache, first turn", "kernels and cache, later turns"),
)
"""Causes of the remainder (the gap without routing), indexed by `LogprobGaps.cause_ids`."""
ROUTING = "routing"


_TOKEN_FIELDS = {
    "record": np.int64,  # index of the record
    "token": np.int64,  # index in its rollout
    "engine": np.float64,  # log-prob
    "trainer": np.float64,  # log-prob, through its own experts where these were computed
    "routing": np.float64,  # gap due to routing; nan if not measured
    "remainder": np.float64,  # gap without routing
    "cause_id": np.int8,  # index into REMAINDER_CAUSES
    "staleness": np.int32,  # weight versions between sampling and the trainer
    "mask_size": np.int32,  # size of the sampling support; 0 for the full vocabulary
    "cached_tokens": np.int32,  # cached tokens at the start of its turn; -1 if not recorded
}
_TOKEN = np.dtype(list(_TOKEN_FIELDS.items()))


@dataclass(frozen=True)
class LogprobGaps:
    """Gaps of the sampled tokens for which both sides have finite log-probs."""

    tokens: np.ndarray  # [n] _TOKEN
    num_missing: int = 0  # rollouts without trainer log-probs
    num_nonfinite: int = 0  # tokens left out because a log-prob is not finite

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def gap(self) -> np.ndarray:
        """[n] log p_trainer - log p_engine."""
        gap: np.ndarray = self.tokens["trainer"] - self.tokens["engine"]
        return gap


def compute_gaps(records: Sequence[Record], weight_version: int) -> LogprobGaps:
    """Compute the gaps of a step's records, which must include sampling masks.

    Args:
        weight_version: weight version of the trainer in that step.
    """
    parts = [_sampled_tokens(index, record, weight_version) for index, record in enumerate(records)]
    tokens = np.concatenate([np.zeros(0, _TOKEN), *parts])
    is_finite = np.isfinite(tokens["engine"]) & np.isfinite(tokens["trainer"]) & np.isfinite(tokens["remainder"])
    num_missing = sum(record.trainer_logprobs is None for record in records)
    return LogprobGaps(tokens[is_finite], num_missing, int((~is_finite).sum()))


def _sampled_tokens(record_index: int, record: Record, weight_version: int) -> np.ndarray:
    """Return the [n] sampled tokens of one rollout; none without trainer log-probs."""
    rollout, trainer = record.rollout, record.trainer_logprobs
    tokens = np.zeros(0 if trainer is None else rollout.num_actions, _TOKEN)
    if trainer is None or not len(tokens):
        return tokens
    turns, mask = rollout.turns, rollout.sampling_mask
    lengths = [len(turn.token_ids) for turn in turns]
    is_action = np.repeat([turn.is_action for turn in turns], lengths)
    versions = np.concatenate([turn.token_versions for turn in turns if turn.is_action])
    replayed = trainer.logprobs[is_action].astype(np.float64)
    unreplayed = np.nan if trainer.unreplayed is None else trainer.unreplayed[is_action].astype(np.float64)
    tokens["record"], tokens["token"] = record_index, np.flatnonzero(is_action)
    tokens["engine"] = np.concatenate([turn.logprobs for turn in turns if turn.is_action])
    tokens["trainer"] = np.where(np.isnan(unreplayed), replayed, unreplayed)
    tokens["routing"], tokens["remainder"] = unreplayed - replayed, replayed - tokens["engine"]
    tokens["staleness"] = staleness = (weight_version - versions).clip(min=0)
    tokens["mask_size"] = mask_sizes = np.zeros(len(tokens), np.int32) if mask is None else mask.counts.numpy()
    tokens["cached_tokens"] = cached = _cached_by_token(rollout)
    is_first_turn = np.repeat(np.cumsum([turn.is_action for turn in turns]) <= 1, lengths)[is_action]
    conditions = [staleness > 0, mask_sizes > 0, cached == 0, cached > 0, is_first_turn]
    tokens["cause_id"] = np.select(conditions, range(5), 5)
    return tokens


def _cached_by_token(rollout: Rollout) -> np.ndarray:
    """Return [actions] int32: for each sampled token, the cached tokens at the start of its turn; -1 if newer weights
    continued the turn, by a request of their own."""
    counts = [
        (turn.cached_tokens if index == 0 else -1, tokens)
        for turn in rollout.turns
        if turn.is_action
        for index, (_, tokens) in enumerate(turn.version_spans)
    ]
    cached, tokens = np.array(counts, np.int32).reshape(-1, 2).T
    return np.repeat(cached, tokens)


@dataclass(frozen=True)
class Cause:
    """One part of the gap.

    Args:
        tokens: number of tokens attributed to it.
        mean, p99, largest: statistics of |part| over these tokens, in nats.
        share: its fraction of the sum of |part| over all parts and tokens.
    """

    name: str
    tokens: int
    mean: float
    p99: float
    largest: float
    share: float


def summarize_causes(gaps: LogprobGaps) -> list[Cause]:
    """Return one entry per cause that has tokens, largest share first, then the whole gap as `all`."""
    routing, remainder, cause_ids = (gaps.tokens[name] for name in ("routing", "remainder", "cause_id"))
    parts = {ROUTING: np.abs(routing[~np.isnan(routing)])}
    parts |= {name: np.abs(remainder[cause_ids == i]) for i, name in enumerate(REMAINDER_CAUSES)}
    total = sum(float(part.sum()) for part in parts.values())
    causes = [_summarize_part(name, part, total) for name, part in parts.items() if len(part)]
    whole = [_summarize_part("all", np.abs(gaps.gap), 0.0)] if len(gaps) else []
    return sorted(causes, key=lambda cause: -cause.share) + whole


def _summarize_part(name: str, part: np.ndarray, total: float) -> Cause:
    share = float(part.sum()) / total if total else 1.0 if name == "all" else 0.0
    p99 = float(np.quantile(part, 0.99, method="higher"))
    return Cause(name, len(part), float(part.mean()), p99, float(part.max()), share)


def find_worst(gaps: LogprobGaps, count: int) -> list[dict[str, Any]]:
    """Return the tokens with the largest |gap|: position, both log-probs, and the cause of the larger part."""
    order = np.argsort(-np.abs(gaps.gap), kind="stable")[:count]
    rows = []
    for gap, values in zip(gaps.gap[order].tolist(), gaps.tokens[order].tolist(), strict=True):
        token = dict(zip(_TOKEN_FIELDS, values, strict=True))
        routing = float(np.nan_to_num(token["routing"]))
        remainder_cause = REMAINDER_CAUSES[token["cause_id"]]
        rows.append(
            {name: token[name] for name in ("record", "token", "engine", "trainer", "staleness")}
            | {"gap": gap, "routing": routing, "choices": token["mask_size"], "cached": token["cached_tokens"]}
            | {"cause": ROUTING if abs(routing) > abs(token["remainder"]) else remainder_cause}
        )
    return rows


TWIN_KINDS = ("cached for one, not for the other", "cached for both", "cached for neither")
"""How the two requests that reported a token's log-prob differ; `Cause.name` in `compare_twins`."""


def compare_twins(records: Sequence[Record], weight_version: int) -> list[Cause]:
    """Compare the engine's log-probs of the same token after the same prefix, by what was cached for each.

    Each token is compared with the first of its twins without cached tokens or, if all had some, with the first twin.
    Only tokens count that were sampled from the full vocabulary with weights `weight_version`, and whose cached tokens
    are on record. Trainer log-probs are not needed. `share` is always 0 here.
    """
    parts = [part for record in records if (part := _hash_prefixes(record.rollout, weight_version)) is not None]
    if not parts:
        return []
    key, cached, logprob = (np.concatenate([part[i] for part in parts]) for i in range(3))
    # Within a key, tokens without cache come first, in record order (lexsort is stable).
    order = np.lexsort((cached, key))
    key, cached, logprob = key[order], cached[order], logprob[order]
    is_first = np.concatenate([[True], key[1:] != key[:-1]])
    reference = np.maximum.accumulate(np.where(is_first, np.arange(len(key)), 0))
    gap = np.abs(logprob - logprob[reference])
    kinds = np.select([~cached, cached[reference]], [2, 1], 0)
    gaps_by_kind = [(name, gap[~is_first & (kinds == i)]) for i, name in enumerate(TWIN_KINDS)]
    return [_summarize_part(name, part, 0.0) for name, part in gaps_by_kind if len(part)]


def _hash_prefixes(rollout: Rollout, weight_version: int) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
    """Return, for the tokens that can have twins: [n] uint64 hash of the sequence up to and including each, [n] bool
    whether its turn had cached tokens, and [n] float64 engine log-probs."""
    action_turns = [turn for turn in rollout.turns if turn.is_action]
    if not rollout.num_actions or max(turn.cached_tokens for turn in action_turns) < 0:
        return None
    is_action = np.repeat([turn.is_action for turn in rollout.turns], [len(turn.token_ids) for turn in rollout.turns])
    ids = rollout.token_ids.astype(np.uint64)
    prefix = np.cumsum(_splitmix64(_splitmix64(ids) + np.arange(len(ids), dtype=np.uint64)), dtype=np.uint64)[is_action]
    cached = _cached_by_token(rollout)
    is_other_version = np.concatenate([turn.token_versions for turn in action_turns]) != weight_version
    keep = ~is_other_version & (cached >= 0)
    if rollout.sampling_mask is not None:
        keep &= rollout.sampling_mask.counts.numpy() == 0
    logprobs = np.concatenate([turn.logprobs for turn in action_turns]).astype(np.float64)
    keep &= np.isfinite(logprobs)
    return prefix[keep], cached[keep] > 0, logprobs[keep]


def _splitmix64(values: np.ndarray) -> np.ndarray:
    """Hash [n] uint64 values with splitmix64 (Steele et al. 2014): each output bit depends on all input bits."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
