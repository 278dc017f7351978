"""Gaps of a few tokens by hand, each with one cause."""

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

STALE, CARRIED, CUT, FRESH, CACHED, FIRST, LATER = REMAINDER_CAUSES
PROMPT = Prompt("p", ())


def record(turns: tuple[Turn, ...], logprobs: list[float], free: list[float] | None = None, **more: object) -> Record:
    says = TrainerLogprobs(np.array(logprobs, np.float32), None if free is None else np.array(free, np.float32))
    return Record(0, dataclasses.replace(Rollout(PROMPT, turns), **more), None, None, says)  # type: ignore[arg-type]


def two_turns(*versions: int) -> tuple[Turn, ...]:
    """A prompt of two tokens, a turn of two by the first version, a result of one, a turn of one."""
    first = Turn((7, 8), (-1.0, -2.0), is_action=True, weight_version=versions[0])
    return Turn((1, 2)), first, Turn((4,)), Turn((9,), (-0.5,), is_action=True, weight_version=versions[-1])


def causes(gaps: LogprobGaps) -> list[str]:
    return [REMAINDER_CAUSES[i] for i in gaps.tokens["cause_id"]]


def test_one_pass_of_new_weights_is_kernels_by_turn() -> None:
    gaps = compute_gaps([record(two_turns(3), [0, 0, -1.25, -2, 0, -0.375])], 3)
    assert gaps.gap.tolist() == [-0.25, 0, 0.125] and np.isnan(gaps.tokens["routing"]).all()
    assert causes(gaps) == [FIRST, FIRST, LATER]
    assert gaps.tokens[["record", "token"]].tolist() == [(0, 2), (0, 3), (0, 5)]
    first, later, full = summarize_causes(gaps)
    assert (first.name, first.tokens, first.mean, first.p99, first.largest) == (FIRST, 2, 0.125, 0.25, 0.25)
    assert (later.name, later.tokens, later.mean) == (LATER, 1, 0.125)
    assert (first.share, later.share) == (pytest.approx(2 / 3), pytest.approx(1 / 3))
    assert (full.name, full.tokens, full.mean, full.share) == ("all", 3, 0.125, 1)


def test_routing_is_what_two_passes_differ_by_and_comes_on_top() -> None:
    replayed, free = [0, 0, -1.125, -2, 0, -0.5], [0, 0, -1.125, -3, 0, -0.25]
    gaps = compute_gaps([record(two_turns(3), replayed, free)], 3)
    assert gaps.tokens["routing"].tolist() == [0, -1, 0.25] and gaps.tokens["remainder"].tolist() == [-0.125, 0, 0]
    assert gaps.gap.tolist() == [-0.125, -1, 0.25] == (gaps.tokens["routing"] + gaps.tokens["remainder"]).tolist()
    result = {cause.name: cause for cause in summarize_causes(gaps)}
    assert (result[ROUTING].tokens, result[ROUTING].largest) == (3, 1)
    assert result[ROUTING].share == pytest.approx(1.25 / 1.375) and result[FIRST].share == pytest.approx(0.125 / 1.375)
    assert [item["cause"] for item in find_worst(gaps, 3)] == [ROUTING, ROUTING, FIRST]


def test_older_weights_and_what_stands_behind_their_tokens() -> None:
    said = [0, 0, -1.5, -2, 0, -0.5]
    fresh = compute_gaps([record(two_turns(2, 3), said)], 3)
    assert causes(fresh) == [STALE, STALE, CARRIED] and fresh.tokens["staleness"].tolist() == [
        1,
        1,
        0,
    ]
    replayed = compute_gaps([record(two_turns(2, 3), said, said)], 3)
    assert causes(replayed) == [STALE, STALE, CARRIED]
    mixed = Turn((7, 8), (-1.0, -2.0), is_action=True, weight_version=3, versions=((1, 1), (3, 1)))
    gaps = compute_gaps([record((Turn((1,)), mixed), [0, -1.5, -2])], 3)
    assert causes(gaps) == [STALE, CARRIED] and gaps.tokens["staleness"].tolist() == [2, 0]
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
            "cached": -1,
            "cause": STALE,
        }
    ]


def test_tokens_that_could_be_few_words_are_apart() -> None:
    gaps = compute_gaps(
        [record(two_turns(3), [0, 0, -1.5, -2, 0, -0.5], sampling_mask=SamplingMask.from_rows([[7, 3], [], [9]]))], 3
    )
    assert causes(gaps) == [CUT, FIRST, CUT] and gaps.tokens["mask_size"].tolist() == [2, 0, 1]


def served(*cached: int) -> tuple[Turn, ...]:
    """`two_turns`, where so many tokens before each of the policy's turns were cached."""
    first, *remaining = (
        dataclasses.replace(turn, cached_tokens=n) for turn, n in zip(two_turns(3)[1::2], cached, strict=True)
    )
    return Turn((1, 2)), first, Turn((4,)), *remaining


def test_turns_with_something_in_the_cache_are_apart_from_those_with_nothing() -> None:
    said = [0, 0, -1.5, -2, 0, -0.5]
    gaps = compute_gaps([record(served(0, 4), said), record(served(1, 0), said), record(served(-1, -1), said)], 3)
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
    stale = compute_gaps([record(served(0, 4), said)], 4)
    assert set(causes(stale)) == {STALE}, "what older weights chose says nothing of the cache"


def moved(turns: tuple[Turn, ...], by: float) -> tuple[Turn, ...]:
    """Turns whose log-probs are a little higher."""
    return tuple(dataclasses.replace(turn, logprobs=turn.logprobs + by) if turn.is_action else turn for turn in turns)


def silent(turns: tuple[Turn, ...], **more: object) -> Record:
    return Record(0, dataclasses.replace(Rollout(PROMPT, turns), **more), None, None)  # type: ignore[arg-type]


def test_the_engine_against_itself_with_and_without_a_cache() -> None:
    first, second, third = served(0, 0), moved(served(0, 3), 0.25), moved(served(2, 3), 0.5)
    result = {cause.name: cause for cause in compare_twins([silent(turns) for turns in (third, second, first)], 3)}
    mixed, both, neither = (result.get(name) for name in TWIN_KINDS)
    # Against `second`, which comes first of those without: turn 1. Against `first`: turn 2, where only it has nothing.
    assert mixed is not None and (mixed.tokens, mixed.mean, mixed.largest) == (4, 0.3125, 0.5)
    assert neither is not None and (neither.tokens, neither.largest) == (2, 0.25) and both is None
    (only,) = compare_twins([silent(third), silent(second[:2] + third[2:])], 3)[1:]
    assert (only.name, only.tokens, only.largest) == (TWIN_KINDS[1], 1, 0.0)


def test_only_what_is_the_same_in_all_but_the_cache_is_held_against_each_other() -> None:
    turns = served(0, 3)
    other = (Turn((2, 1)), *turns[1:])  # the same tokens in another order before it
    assert compare_twins([silent(turns), silent(other)], 3) == []
    assert compare_twins([silent(turns), silent(served(-1, -1))], 3) == [], "nobody knows what was cached"
    assert compare_twins([silent(turns), silent(turns)], 4) == [], "older weights"
    cut = SamplingMask.from_rows([[7], [8, 1], []])
    (last,) = compare_twins([silent(turns), silent(turns, sampling_mask=cut)], 3)
    assert (last.name, last.tokens) == (TWIN_KINDS[1], 1), "of one of them only the last token is out of all words"
    assert compare_twins([], 3) == [] == compare_twins([silent((Turn((1,)),))], 3)


def test_what_is_not_there_or_no_number_is_counted_and_left_out() -> None:
    said = [0, 0, math.nan, -math.inf, 0, -0.5]
    silent = Record(1, Rollout(PROMPT, two_turns(3)), None, None)
    gaps = compute_gaps([record(two_turns(3), said), silent, record((Turn((1,)),), [0])], 3)
    assert (len(gaps), gaps.num_missing, gaps.num_nonfinite) == (1, 1, 2) and summarize_causes(gaps)[-1].tokens == 1
    nothing = compute_gaps([silent], 3)
    assert len(nothing) == 0 and summarize_causes(nothing) == [] == find_worst(nothing, 3)
    equal = compute_gaps([record(two_turns(3), [0, 0, -1, -2, 0, -0.5])], 3)
    assert [cause.share for cause in summarize_causes(equal)] == [0, 0, 1]
