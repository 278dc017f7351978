"""The reward function for code: extract the code from an answer and run the hidden tests of its prompt."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from functools import cached_property

from megarl.rewards.code.grading import Grading, grade
from megarl.rewards.code.problems import parse_problem
from megarl.rewards.stated_answer import extract_answer
from megarl.sandbox.box import Sandbox
from megarl.types import Prompt, Rollout
from megarl.types.reward_values import Reward

LONGEST = 200_000
"""Characters of code."""
_FENCE = "```"
_TAG = re.compile(r"[ \t]*([\w+#.-]{0,20})[ \t]*(?:\{[^}\n]{0,80}\})?[ \t]*\r?", re.ASCII)
_LONGEST_TAG = 120
_END = re.compile(r"^[ \t]{0,12}```", re.MULTILINE)
_PYTHON = ("python", "py", "python3")


def extract_code(answer: str) -> str:
    """The last fenced block that is marked as Python, else the last that is not marked, else the last; where there is
    none, what is between `<answer>` tags, else all of the answer. A block without an end goes to the end. What stands
    before `</think>` does not count.

    Empty where there is none, or where it has more than LONGEST characters.
    """
    text = answer.rpartition("</think>")[2]
    found = _blocks(text)
    code = extract_answer(text) if "</answer>" in text else text
    for tags in (_PYTHON, ("",), tuple(tag for tag, _ in found)):
        if fitting := [block for tag, block in found if tag in tags]:
            code = fitting[-1]
            break
    code = code.strip("\n\r")
    return textwrap.dedent(code) if 0 < len(code) <= LONGEST and not code.isspace() else ""


def _blocks(text: str) -> list[tuple[str, str]]:
    """Marks in lower case, and what is between the fences. A block ends at a fence that begins a line, or, where no
    such follows, at the next one."""
    found, place = [], 0
    ends: Iterator[int] = (match.end() for match in _END.finditer(text))
    end = next(ends, -1)
    while (start := text.find(_FENCE, place)) >= 0:
        line = text.find("\n", start, start + _LONGEST_TAG)
        tag = _TAG.fullmatch(text, start + len(_FENCE), line) if line >= 0 else None
        if tag is None:  # within a line
            place = start + len(_FENCE)
            continue
        while 0 <= end <= line:
            end = next(ends, -1)
        stop = end - len(_FENCE) if end >= 0 else text.find(_FENCE, line)
        found.append((tag[1].lower(), text[line + 1 :] if stop < 0 else text[line + 1 : stop]))
        if stop < 0:
            break
        place = stop + len(_FENCE)
    return found


class HiddenTests:
    """A reward function with settings of yours:

    mine = HiddenTests(Grading(most=20, seconds=2), share=True)      # name it as my_module:mine

    share: the reward is the share of tests that have passed; else 1.0 where all have, and 0.0.
    """

    sandboxed = True

    def __init__(self, how: Grading = Grading(), share: bool = False) -> None:  # noqa: B008
        self.grading, self.partial_credit = how, share

    async def __call__(self, rollout: Rollout) -> Reward:
        """Part `passed`: the share of tests. Raises ValueError for a ground truth without tests, or with wrong ones,
        ConfigError and RuntimeError where there can be no box."""
        problem = parse_problem(rollout.prompt.ground_truth)
        found = await grade(extract_code(rollout.answer), problem, self._box, self.grading)
        reward = found.pass_rate if self.partial_credit else float(found.passed == found.tests)
        return Reward(reward, parts={"passed": found.pass_rate})

    @staticmethod
    def check(prompt: Prompt) -> None:
        """Raises ValueError where the prompt's ground truth holds no tests."""
        parse_problem(prompt.ground_truth)

    @cached_property
    def _box(self) -> Sandbox:
        """By the settings of the run that this process belongs to, which are there when it is called."""
        return Sandbox.from_environment()


hidden_tests = HiddenTests()
"""1.0 where the code in the answer passes all hidden tests of `prompt.ground_truth`, else 0.0."""
