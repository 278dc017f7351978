"""`--where` conditions on rollouts."""

from __future__ import annotations

import pytest

from megarl.config import ConfigError
from megarl.view.query import COLUMNS, parse_condition

pytestmark = pytest.mark.alone
ROW = dict.fromkeys(COLUMNS, 0.0) | {
    "reward": 0.25,
    "turns": 3.0,
    "status": "stop",
    "prompt": "gsm8k/7",
    "advantage": None,
}
ROW |= {"source": ""}


@pytest.mark.parametrize(
    ("text", "fits"),
    [
        ("reward<0.5", True),
        ("reward<0.5 and turns>2", True),
        ("reward<0.5 and turns>3", False),
        ("reward>1 or turns>=3", True),
        ("reward > 1 or turns = 4 and reward < 1", False),
        ("(reward>1 or turns=3) and reward<1", True),
        ("not reward>1", True),
        ("not (reward<1 and turns=3)", False),
        ("status=stop", True),
        ("status != stop", False),
        ("prompt ~ gsm8k", True),
        ("prompt='gsm8k/7' and source=\"\"", True),
        ("advantage<1", False),
        ("advantage!=1", True),
        ("reward<=1e-1 or staleness==-0", True),
    ],
)
def test_evaluates_conditions(text: str, fits: bool) -> None:
    assert parse_condition(text)(ROW) is fits


@pytest.mark.parametrize(
    "text",
    [
        "",
        "reward",
        "reward<",
        "reward<0.5 and",
        "reward<0.5 turns>2",
        "(reward<0.5",
        "reward<0.5)",
        "reward<many",
        "reward<nan",
        "reward~1",
        "status<stop",
        "nobody=1",
        "'reward'<1",
        "__import__('os').system('true')",
        "reward<0.5; turns",
        "reward<'",
        "(" * 500 + "reward<1" + ")" * 500,
        "not " * 200 + "reward<1",
        "reward<" + "9" * 2000,
    ],
)
def test_rejects_invalid_conditions(text: str) -> None:
    with pytest.raises(ConfigError, match="--where"):
        parse_condition(text)
