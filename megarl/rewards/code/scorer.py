"""Reward function for code: extract the code from an answer and run the hidden tests of its prompt."""

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

MAX_CODE_CHARS = 200_000
"""Maximum characters of code."""
_FENCE = "```"
_TAG = re.compile(r"[ \t]*([\w+#.-]{0,20})[ \t]*(?:\{[^}\n]{0,80}\})?[ \t]*\r?", re.ASCII)
_MAX_TAG_CHARS = 120
_END = re.compile(r"^[ \t]{0,12}```", re.MULTILINE)
_PYTHON = ("python", "py", "python3")


def extract_code(answer: str) -> str:
    """Return the code of an answer, dedented; empty if there is none or it exceeds MAX_CODE_CHARS characters.

    Prefers the last fenced block marked as Python, then the last unmarked block, then the last block; without blocks,
    the content of the `<answer>` tags, or the whole answer. An unclosed block extends to the end. Text before
    `</think>` is ignored.
    """
    text = answer.rpartition("</think>")[2]
    blocks = _blocks(text)
    code = extract_answer(text) if "</answer>" in text else text
    for tags in (_PYTHON, ("",), tuple(tag for tag, _ in blocks)):
        if matching := [block for tag, block in blocks if tag in tags]:
            code = matching[-1]
            break
    code = code.strip("\n\r")
    return textwrap.dedent(code) if 0 < len(code) <= MAX_CODE_CHARS and not code.isspace() else ""


def _blocks(text: str) -> list[tuple[str, str]]:
    """Return (lower-case language tag, content) of each fenced block.

    A block ends at the next fence that begins a line, or without one at the next fence.
    """
    blocks, position = [], 0
    closing_fences: Iterator[int] = (match.end() for match in _END.finditer(text))
    end = next(closing_fences, -1)
    while (start := text.find(_FENCE, position)) >= 0:
        line = text.find("\n", start, start + _MAX_TAG_CHARS)
        tag = _TAG.fullmatch(text, start + len(_FENCE), line) if line >= 0 else None
        if tag is None:  # inside a line
            position = start + len(_FENCE)
            continue
        while 0 <= end <= line:
            end = next(closing_fences, -1)
        stop = end - len(_FENCE) if end >= 0 else text.find(_FENCE, line)
        blocks.append((tag[1].lower(), text[line + 1 :] if stop < 0 else text[line + 1 : stop]))
        if stop < 0:
            break
        position = stop + len(_FENCE)
    return blocks


class HiddenTests:
    """Reward function with configurable grading:

        mine = HiddenTests(Grading(max_tests=20, seconds=2), partial_credit=True)      # name it as my_module:mine

    partial_credit: the reward is the fraction of tests passed; otherwise 1.0 if all pass, else 0.0.
    """

    sandboxed = True

    def __init__(self, grading: Grading = Grading(), partial_credit: bool = False) -> None:  # noqa: B008
        self.grading, self.partial_credit = grading, partial_credit

    async def __call__(self, rollout: Rollout) -> Reward:
        """Score a rollout. The sub-part `passed` is the fraction of tests passed.

        Raises ValueError for a ground truth without tests or with invalid ones, and ConfigError or RuntimeError if
        there is no working sandbox.
        """
        problem = parse_problem(rollout.prompt.ground_truth)
        result = await grade(extract_code(rollout.answer), problem, self._box, self.grading)
        reward = result.pass_rate if self.partial_credit else float(result.passed == result.tests)
        return Reward(reward, parts={"passed": result.pass_rate})

    @staticmethod
    def check(prompt: Prompt) -> None:
        """Raise ValueError if the prompt's ground truth holds no tests."""
        parse_problem(prompt.ground_truth)

    @cached_property
    def _box(self) -> Sandbox:
        """Sandbox with the settings of this process's run, which are known only when it is called."""
        return Sandbox.from_environment()


hidden_tests = HiddenTests()
"""Return 1.0 if the answer's code passes all hidden tests of `prompt.ground_truth`, else 0.0."""
