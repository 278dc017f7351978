"""Arithmetic with a calculator: does the policy state the right result?"""

from __future__ import annotations

import re

from megarl.rewards.gsm8k import parse_truth
from megarl.rewards.stated_answer import find_numbers
from megarl.types import Rollout


def arithmetic(rollout: Rollout) -> float:
    """Return 1.0 if the conversation ends with a statement whose last number equals `prompt.ground_truth`, else 0.0.

    A statement is a complete text of the policy that contains a word, such as "The answer is 72."; a bare number, a
    tool call, or a truncated text does not count. Raises ValueError for a ground truth that is not a number.
    """
    truth = parse_truth(rollout.prompt)
    last = rollout.messages[-1] if rollout.messages else {"role": "none"}
    if last["role"] != "assistant" or last.get("tool_calls") or rollout.status in ("length", "aborted"):
        return 0.0
    text = rollout.answer
    is_statement = "<tool_call" not in text and re.search(r"[^\W\d_]", text)
    return float(bool(is_statement) and find_numbers(text)[-1:] == [truth])
