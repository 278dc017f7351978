"""Answers as lines of JSON: what an answer without a reward says, and whose messages they are."""

from __future__ import annotations

import json

import pytest

from megarl.observe.eval_metrics import iter_json_rows
from megarl.types import Prompt, Rollout, Turn
from megarl.utils import exact_json

pytestmark = pytest.mark.alone

PROMPT = Prompt("p", ({"role": "user", "content": "1+1?"},), [1, 2], "", "2")


def answer(status: str, reward: float, **more: object) -> Rollout:
    turns = (Turn([1, 2]), Turn([3, 4], [0.0, 0.0], True, 0), Turn([5]), Turn([6], [0.0], True, 0))
    return Rollout(PROMPT, turns, status, reward, group=3, messages=(), **more)  # type: ignore[arg-type]


def test_an_answer_without_a_reward_is_neither_right_nor_wrong() -> None:
    rollouts = [
        answer("stop", 0.5),
        answer("stop", 0.25),
        answer("aborted", 0.0),
        answer("stop", 1.0, unscored={"rule": "late"}),
    ]
    lines = list(iter_json_rows(rollouts, correct_threshold=0.5, default_source="mine"))
    assert [(line["reward"], line["right"]) for line in lines] == [
        (0.5, True),
        (0.25, False),
        (None, None),
        (None, None),
    ]
    assert {(line["data_source"], line["group"], line["turns"], line["tokens"]) for line in lines} == {
        ("mine", 3, 2, 3)
    }


def test_what_no_encoding_takes_can_be_written() -> None:
    said = ({"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "\ud83d \u2028 <b>"})
    item = Rollout(PROMPT, answer("stop", 0.0).turns, "stop", float("nan"), group=0, messages=said)
    (line,) = iter_json_rows([item], correct_threshold=0.5)
    text = exact_json.dumps(line)
    assert text.isascii() and len(text.splitlines()) == 1 and json.loads(text)["messages"][1] == said[1]
