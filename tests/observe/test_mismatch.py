"""Logprob gaps between engine and trainer, attributed to causes by hand."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from megarl.observe.logprob_gap import (
    REMAINDER_CAUSES,
    ROUTING,
    TWIN_KINDS,
    LogprobGaps,
    compare_twins,
    compute_gaps,
    find_worst,
    summarize_causes,
)
from megarl.observe.rollout_table import Record, TrainerLogprobs
from megarl.types import Prompt, Rollout, SamplingMask, Turn

pytestmark = pytest.mark.alone

STALE, CUT, FRESH, CACHED, FIRST, LATER = REMAINDER_CAUSES
PROMPT = Prompt("p", ())


def make_record(
    turns: tuple[Turn, ...], logprobs: list[float], unreplayed: list[float] | None = None, **kwargs: object
) -> Record:
    trainer = TrainerLogprobs(
        np.array(logprobs, np.float32), None if unreplayed is None else np.array(unreplayed, np.float32)
    )
    return Record(0, dataclasses.replace(Rollout(PROMPT, turns), **kwargs), None, None, trainer)  # type: ignore[arg-type]


def two_turns(*versions: int) -> tuple[Turn, ...]:
    """A prompt of 2 tokens, an action of 2 by the first version, a tool result of 1, an action of 1."""
    first = Turn((7, 8), (-1.0, -2.0), is_action=True, weight_version=versions[0])
    return Turn((1, 2)), first, Turn((4,)), Turn((9,), (-0.5,), is_action=True, weight_version=versions[-1])


def causes(gaps: LogprobGaps) -> list[str]:
    return [REMAINDER_CAUSES[i] for i in gaps.tokens["cause_id"]]


def test_gap_of_current_weights_is_attributed_by_turn() -> None:
    gaps = compute_gaps([make_record(two_turns(3), [0, 0, -1.25, -2, 0, -0.375])], 3)
    assert gaps.gap.tolist() == [-0.25, 0, 0.125] and np.isnan(gaps.tokens["routing"]).all()
    assert causes(gaps) == [FIRST, FIRST, LATER]
    assert gaps.tokens[["record", "token"]].tolist() == [(0, 2), (0, 3), (0, 5)]
    first, later, total = summarize_causes(gaps)
    assert (first.name, first.tokens, first.mean, first.p99, first.largest) == (FIRST, 2, 0.125, 0.25, 0.25)
    assert (later.name, later.tokens, later.mean) == (LATER, 1, 0.125)
    assert (first.share, later.share) == (pytest.approx(2 / 3), pytest.approx(1 / 3))
    assert (total.name, total.tokens, total.mean, total.share) == ("all", 3, 0.125, 1)


def test_routing_gap_is_the_difference_of_the_two_passes() -> None:
    replayed, unreplayed = [0, 0, -1.125, -2, 0, -0.5], [0, 0, -1.125, -3, 0, -0.25]
    gaps = compute_gaps([make_record(two_turns(3), replayed, unreplayed)], 3)
    assert gaps.tokens["routing"].tolist() == [0, -1, 0.25] and gaps.tokens["remainder"].tolist() == [-0.125, 0, 0]
    assert gaps.gap.tolist() == [-0.125, -1, 0.25] == (gaps.tokens["routing"] + gaps.tokens["remainder"]).tolist()
    result = {cause.name: cause for cause in summarize_causes(gaps)}
    assert (result[ROUTING].tokens, result[ROUTING].largest) == (3, 1)
    assert result[ROUTING].share == pytest.approx(1.25 / 1.375) and result[FIRST].share == pytest.approx(0.125 / 1.375)
    assert [item["cause"] for item in find_worst(gaps, 3)] == [ROUTING, ROUTING, FIRST]


def test_stale_tokens_and_tokens_after_them() -> None:
    trainer_logprobs = [0, 0, -1.5, -2, 0, -0.5]
    fresh_gaps = compute_gaps([make_record(two_turns(2, 3), trainer_logprobs)], 3)
    assert causes(fresh_gaps) == [STALE, STALE, LATER] and fresh_gaps.tokens["staleness"].tolist() == [
        1,
        1,
        0,
    ]
    replayed = compute_gaps([make_record(two_turns(2, 3), trainer_logprobs, trainer_logprobs)], 3)
    assert causes(replayed) == [STALE, STALE, LATER]
    mixed_turn = Turn(
        (7, 8), (-1.0, -2.0), is_action=True, weight_version=3, versions=((1, 1), (3, 1)), cached_tokens=0
    )
    gaps = compute_gaps([make_record((Turn((1,)), mixed_turn), [0, -1.5, -2])], 3)
    # The request that continued the turn is not on record, so what was cached for the second token is unknown.
    assert causes(gaps) == [STALE, FIRST] and gaps.tokens["staleness"].tolist() == [2, 0]
    assert find_worst(gaps, 1) == [
        {
            "record": 0,
            "token": 1,
            "gap": -0.5,
            "engine": -1.0,
            "trainer": -1.5,
            "routing": 0.0,
            "staleness": 2,
            "choices": 0,
            "cached": 0,
            "cause": STALE,
        }
    ]


def test_tokens_with_sampling_masks_are_a_separate_cause() -> None:
    gaps = compute_gaps(
        [make_record(two_turns(3), [0, 0, -1.5, -2, 0, -0.5], sampling_mask=SamplingMask.from_rows([[7, 3], [], [9]]))],
        3,
    )
    assert causes(gaps) == [CUT, FIRST, CUT] and gaps.tokens["mask_size"].tolist() == [2, 0, 1]


def cached_turns(*cached: int) -> tuple[Turn, ...]:
    """`two_turns` with the number of cached tokens before each action turn."""
    first, *turns = (
        dataclasses.replace(turn, cached_tokens=n) for turn, n in zip(two_turns(3)[1::2], cached, strict=True)
    )
    return Turn((1, 2)), first, Turn((4,)), *turns


def test_cached_and_uncached_turns_are_separate_causes() -> None:
    trainer_logprobs = [0, 0, -1.5, -2, 0, -0.5]
    gaps = compute_gaps(
        [
            make_record(cached_turns(0, 4), trainer_logprobs),
            make_record(cached_turns(1, 0), trainer_logprobs),
            make_record(cached_turns(-1, -1), trainer_logprobs),
        ],
        3,
    )
    assert causes(gaps) == [
        FRESH,
        FRESH,
        CACHED,
        CACHED,
        CACHED,
        FRESH,
        FIRST,
        FIRST,
        LATER,
    ]
    assert gaps.tokens["cached_tokens"].tolist() == [0, 0, 4, 1, 1, 0, -1, -1, -1]
    stale = compute_gaps([make_record(cached_turns(0, 4), trainer_logprobs)], 4)
    assert set(causes(stale)) == {STALE}, "stale tokens say nothing about the cache"


def shift_logprobs(turns: tuple[Turn, ...], offset: float) -> tuple[Turn, ...]:
    """Return the turns with `offset` added to their logprobs."""
    return tuple(
        dataclasses.replace(turn, logprobs=turn.logprobs + offset) if turn.is_action else turn for turn in turns
    )


def engine_record(turns: tuple[Turn, ...], **kwargs: object) -> Record:
    return Record(0, dataclasses.replace(Rollout(PROMPT, turns), **kwargs), None, None)  # type: ignore[arg-type]


def test_compares_twins_with_and_without_cache() -> None:
    first, second, third = (
        cached_turns(0, 0),
        shift_logprobs(cached_turns(0, 3), 0.25),
        shift_logprobs(cached_turns(2, 3), 0.5),
    )
    result = {
        cause.name: cause for cause in compare_twins([engine_record(turns) for turns in (third, second, first)], 3)
    }
    mixed, both, neither = (result.get(name) for name in TWIN_KINDS)
    # Turn 1 compares with `second`, the first uncached twin; turn 2 with `first`, the only uncached one.
    assert mixed is not None and (mixed.tokens, mixed.mean, mixed.largest) == (4, 0.3125, 0.5)
    assert neither is not None and (neither.tokens, neither.largest) == (2, 0.25) and both is None
    (single_result,) = compare_twins([engine_record(third), engine_record(second[:2] + third[2:])], 3)[1:]
    assert (single_result.name, single_result.tokens, single_result.largest) == (TWIN_KINDS[1], 1, 0.0)


def test_twins_differ_in_nothing_but_the_cache() -> None:
    turns = cached_turns(0, 3)
    reordered = (Turn((2, 1)), *turns[1:])  # same tokens in another order
    assert compare_twins([engine_record(turns), engine_record(reordered)], 3) == []
    assert compare_twins([engine_record(turns), engine_record(cached_turns(-1, -1))], 3) == [], "cached tokens unknown"
    assert compare_twins([engine_record(turns), engine_record(turns)], 4) == [], "older weights"
    mask = SamplingMask.from_rows([[7], [8, 1], []])
    (last,) = compare_twins([engine_record(turns), engine_record(turns, sampling_mask=mask)], 3)
    assert (last.name, last.tokens) == (TWIN_KINDS[1], 1), "only the last token is unmasked in both"
    assert compare_twins([], 3) == [] == compare_twins([engine_record((Turn((1,)),))], 3)


def test_missing_and_nonfinite_logprobs_are_counted_and_skipped() -> None:
    trainer_logprobs = [0, 0, math.nan, -math.inf, 0, -0.5]
    engine_record = Record(1, Rollout(PROMPT, two_turns(3)), None, None)
    gaps = compute_gaps(
        [make_record(two_turns(3), trainer_logprobs), engine_record, make_record((Turn((1,)),), [0])], 3
    )
    assert (len(gaps), gaps.num_missing, gaps.num_nonfinite) == (1, 1, 2) and summarize_causes(gaps)[-1].tokens == 1
    empty = compute_gaps([engine_record], 3)
    assert len(empty) == 0 and summarize_causes(empty) == [] == find_worst(empty, 3)
    equal = compute_gaps([make_record(two_turns(3), [0, 0, -1, -2, 0, -0.5])], 3)
    assert [cause.share for cause in summarize_causes(equal)] == [0, 0, 1]
