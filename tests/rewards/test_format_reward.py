"""The format rewards: each tag once, in order."""

from __future__ import annotations

import re
import sys
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.rewards.format_reward import format_reward, format_reward_opened, in_tags
from megarl.rewards.functions import check_function

sys.path.insert(0, str(Path(__file__).parent))
from answer_rollouts import make_rollout  # noqa: E402

pytestmark = pytest.mark.alone

GOOD = [
    "<think>x</think><answer>y</answer>",
    "<think>\nx\n</think>\n<answer>\ny\n</answer>\n",
    " <think></think> <answer>y</answer> ",
    "<think>a < b > c</think>\n\n<answer><b>y</b></answer>",
]
BAD = [
    "",
    "y",
    "<think>x</think>",
    "<answer>y</answer>",
    "<think>x</think><answer></answer>",
    "<think>x</think><answer> \n</answer>",
    "so <think>x</think><answer>y</answer>",
    "<think>x</think> so <answer>y</answer>",
    "<think>x</think><answer>y</answer> so",
    "<answer>y</answer><think>x</think>",
    "<think>x<answer>y</think></answer>",
    "<think>x<think>x</think><answer>y</answer>",
    "<think>x</think></think><answer>y</answer>",
    "<think>x</think><answer>y</answer><answer>y</answer>",
    "<think><answer>x</answer></think><answer>y</answer>",
    "<think>x</think><answer>y",
    "x</think><answer>y</answer>",
    "<THINK>x</THINK><answer>y</answer>",
    "<think>x</think ><answer>y</answer>",
    "</think>x<think><answer>y</answer>",
]


@pytest.mark.parametrize("answer", GOOD)
def test_rewards_well_formed_answers(answer):
    assert format_reward(make_rollout(answer, None)) == 1.0
    opened = answer.lstrip().removeprefix("<think>")
    assert format_reward_opened(make_rollout(opened, None)) == 1.0 and format_reward(make_rollout(opened, None)) == 0.0


@pytest.mark.parametrize("answer", BAD)
def test_gives_nothing_for_malformed_answers(answer):
    assert format_reward(make_rollout(answer, None)) == 0.0


def test_accepts_custom_tags():
    form = check_function(partial(in_tags, tags=("plan", "code", "check")), "mine:form")
    assert form(make_rollout("<plan>1</plan><code>2</code><check>3</check>", None)) == 1.0
    assert form(make_rollout("<plan>1</plan><check>3</check><code>2</code>", None)) == 0.0


TAGS_IN_ORDER = re.compile(r"\s*<think>(.*?)</think>\s*<answer>(.*?)</answer>\s*", re.DOTALL)


@given(st.lists(st.sampled_from(["<think>", "</think>", "<answer>", "</answer>", "x", " "]), max_size=9).map("".join))
def test_matches_a_regular_expression(answer):
    result = TAGS_IN_ORDER.fullmatch(answer)
    good = result is not None and result[2].strip() and not re.search("</?(think|answer)>", result[1] + result[2])
    assert format_reward(make_rollout(answer, None)) == float(bool(good))
