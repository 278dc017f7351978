"""`iter_json_rows`: evaluated rollouts as lines of JSON."""

from __future__ import annotations

import json

import pytest

from megarl.observe.eval_metrics import iter_json_rows
from megarl.types import Prompt, Rollout, Turn
from megarl.utils import exact_json

pytestmark = pytest.mark.alone

PROMPT = Prompt("p", ({"role": "user", "content": "1+1?"},), [1, 2], "", "2")


def make_rollout(status: str, reward: float, **kwargs: object) -> Rollout:
    turns = (Turn([1, 2]), Turn([3, 4], [0.0, 0.0], True, 0), Turn([5]), Turn([6], [0.0], True, 0))
    return Rollout(PROMPT, turns, status, reward, group=3, messages=(), **kwargs)  # type: ignore[arg-type]


def test_unscored_rollouts_have_null_reward_and_verdict() -> None:
    rollouts = [
        make_rollout("stop", 0.5),
        make_rollout("stop", 0.25),
        make_rollout("aborted", 0.0),
        make_rollout("stop", 1.0, unscored={"rule": "late"}),
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


def test_writes_lone_surrogates_as_ascii_json() -> None:
    messages = ({"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "\ud83d \u2028 <b>"})
    unscored = Rollout(PROMPT, make_rollout("stop", 0.0).turns, "stop", float("nan"), group=0, messages=messages)
    (line,) = iter_json_rows([unscored], correct_threshold=0.5)
    text = exact_json.dumps(line)
    assert text.isascii() and len(text.splitlines()) == 1 and json.loads(text)["messages"][1] == messages[1]
