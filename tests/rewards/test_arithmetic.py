"""The arithmetic reward: the last sentence must state the ground truth."""

import pytest

from megarl.rewards.arithmetic import arithmetic
from megarl.types import Prompt, Rollout, Turn

pytestmark = pytest.mark.alone

CALL = {"type": "function", "function": {"name": "calculator", "arguments": {"expression": "8 * 9"}}}


def rollout(*contents, ground_truth=72, status="stop", tool_calls=None):
    messages = [{"role": "user", "content": "8 * 9?"}]
    for content in contents:
        messages.append({"role": "assistant", "content": content})
    if tool_calls:
        messages[-1]["tool_calls"] = tool_calls
    prompt = Prompt(id="x", messages=(), ground_truth=ground_truth)
    return Rollout(prompt, (Turn((1,)),), status=status, messages=tuple(messages))


@pytest.mark.parametrize("ground_truth", [72, "72"])
@pytest.mark.parametrize(
    "text", ["The answer is 72.", "The answer is 72", "8 * 9 is 72.", "It is 72, I think.", "So: 8 * 9 = 72!"]
)
def test_rewards_the_stated_number(text, ground_truth):
    assert arithmetic(rollout(text, ground_truth=ground_truth)) == 1.0


def test_distinguishes_signs():
    assert arithmetic(rollout("The answer is -5.", ground_truth=-5)) == 1.0
    assert arithmetic(rollout("The answer is 5.", ground_truth=-5)) == 0.0
    assert arithmetic(rollout("The answer is -5.", ground_truth="5")) == 0.0


@pytest.mark.parametrize(
    "text",
    ["", "72", "It is 73.", "It is 720.", "It is 72.5.", "72 is 8 * 9", "No idea.", "The answer is", "It is 72 or 73."],
)
def test_gives_nothing_for_other_answers(text):
    assert arithmetic(rollout(text)) == 0.0


def test_reads_the_last_message():
    assert arithmetic(rollout("The answer is 5.", "The answer is 72.")) == 1.0
    assert arithmetic(rollout("The answer is 72.", "The answer is 5.")) == 0.0


def test_ignores_tool_calls():
    assert arithmetic(rollout("Now 72.", tool_calls=[CALL])) == 0.0
    assert arithmetic(rollout('<tool_call>{"name": "calculator", "arguments": {"expression": "72"')) == 0.0


def test_gives_nothing_when_a_tool_message_is_last():
    messages = ({"role": "assistant", "content": "It is 72."}, {"role": "tool", "content": "72"})
    prompt = Prompt(id="x", messages=(), ground_truth=72)
    assert arithmetic(Rollout(prompt, (Turn((1,)),), status="max_turns", messages=messages)) == 0.0


@pytest.mark.parametrize("status", ["length", "aborted"])
def test_gives_nothing_for_truncated_answers(status):
    assert arithmetic(rollout("The answer is 72", status=status)) == 0.0  # it may have become 720


def test_refuses_ground_truths_that_are_no_number():
    assert arithmetic(Rollout(Prompt(id="x", messages=(), ground_truth=1), (Turn((1,)),))) == 0.0
    with pytest.raises(ValueError, match="ground truth None is not a number"):
        arithmetic(rollout("The answer is 72.", ground_truth=None))
