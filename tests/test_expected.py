"""Expectations (`expect`): parsing, and comparison with the metrics of a run."""

from __future__ import annotations

from typing import Any

import pytest

from megarl.config import ConfigError, from_dict
from megarl.dry_run.validation import Expectation, check_expectations, parse_expectations

pytestmark = pytest.mark.alone


def parse(**expect: Any) -> dict[str, Expectation]:
    return parse_expectations(from_dict({"expect": expect, "run": {"num_rollout": 10}}))


def test_compares_with_the_last_reported_value() -> None:
    metrics = {1: {"a": 1.0, "b": 5.0}, 2: {"a": 2.0}, 3: {"c": float("nan")}}
    expected = {
        "a": Expectation(min=2.0),
        "b": Expectation(min=4.0, max=5.0),
        "c": Expectation(max=1e9),
        "d": Expectation(max=0.0),
    }
    result = check_expectations(expected, metrics)
    assert [good for _, good in result.values()] == [True, True, False, False]
    assert (result["a"][0], result["b"][0], result["d"][0]) == (2.0, 5.0, None)
    assert check_expectations({"a": Expectation(max=1.0, step=1)}, metrics) == {"a": (1.0, True)}
    assert check_expectations({"a": Expectation(max=1.0, step=0)}, metrics) == {"a": (None, False)}


def test_parses_expectations() -> None:
    assert parse(**{"eval/x": {"min": 1, "step": 3}}) == {"eval/x": Expectation(min=1.0, step=3)}
    assert str(Expectation(min=0.5, max=1.0, step=3)) == "at least 0.5 and at most 1 at step 3"


@pytest.mark.parametrize(
    ("expect", "message"),
    [
        ({"a": {}}, r"^expect\.a has no bounds: set `min`, `max` or both$"),
        ({"a": 3}, r"^expect\.a must be a section"),
        ({"a": {"mim": 3}}, r"expect\.a\.mim.*min"),
        ({"a": {"min": "x"}}, r"expect\.a\.min"),
        ({"a": {"min": 1, "step": 11}}, r"^expect\.a\.step=11 is beyond run\.num_rollout=10$"),
    ],
)
def test_rejects_bad_expectations(expect: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(**expect)
