"""Mathematics with one right answer, as DAPO rewards it.

Yu et al., DAPO (arXiv:2503.14476), section 2.4: +1 where the answer is equivalent to the ground truth, else -1. The
prompts of its data set ask for a last line `Answer: ..`, and its answers are integers (section 3.5).
"""

from __future__ import annotations

import re

from megarl.rewards.ground_truths import with_prompt_check
from megarl.rewards.stated_answer import extract_boxed, extract_braced, has_false_equation, join_thousands, parse_number
from megarl.types import Prompt, Rollout

LONGEST = 300
"""Characters at the end that are looked at, as in DAPO's own code (verl)."""

_MARK = re.compile(r"answer[\s*_]*:", re.IGNORECASE)
_OPENING = re.compile(r"(?:[\s*_$}]|\\[(\[]|<answer>)*")  # between the mark and its result, also line breaks
_WRAPPED = re.compile(r"\\(?:text|textbf|mathrm|mathbf|mbox)\s*(?=\{)")
_SPACING = re.compile(
    r"\\[,;:! ()\[\]\\]|\\(?:left|right|displaystyle)(?![a-zA-Z])|[$*`\"~]|</?answer>|(?<![0-9])\s|\s(?![0-9])"
)
_FRACTION = re.compile(r"\\[dt]frac(?![a-zA-Z])")
_UNIT = re.compile(r"(?<=[0-9])(?:[a-zA-Z]+(?:\^?\{?[23]\}?)?|\^\{?\\circ\}?|\\?%)$")


def _truth(prompt: Prompt) -> str:
    truth = normalize(str(prompt.ground_truth if prompt.ground_truth is not None else ""))
    if not truth:
        raise ValueError("the ground truth is empty")
    return truth


@with_prompt_check(_truth)
def math_dapo(rollout: Rollout) -> float:
    """1.0 where the last `Answer: ..` gives `prompt.ground_truth`, else -1.0.

    Of the last 300 characters, what follows the last `answer:` up to the end of its line, or the first line with text
    after that, is compared with the ground truth: as numbers where both are, else as text. What makes no difference:
    `$`, `\\(`, `\\[`, spaces, bold, a box, the word in `\\text{}`, `<answer>` tags, `x =` before it, thousands
    separators, a full stop, and behind a number its unit. `3 = 5` is wrong. Raises ValueError for an empty ground
    truth.
    """
    truth = _truth(rollout.prompt)
    tail = rollout.answer[-LONGEST:]
    marks = list(_MARK.finditer(tail))
    if not marks:
        return -1.0
    start = _OPENING.match(tail, marks[-1].end())
    assert start is not None
    line = tail[start.end() :].partition("\n")[0]
    if has_false_equation(_strip_formatting(line)):
        return -1.0
    said = normalize(line)
    number = parse_number(truth)
    right = said == truth if number is None else parse_number(_UNIT.sub("", said)) == number
    return 1.0 if right else -1.0


def normalize(text: str) -> str:
    """A result without what makes no difference."""
    if (inside := extract_boxed(text)) is not None:
        text = inside
    return _FRACTION.sub(r"\\frac", _strip_formatting(text.rpartition("=")[2]))


def _strip_formatting(text: str) -> str:
    """Without what only changes how it looks; a space stays between two digits."""
    text = " ".join(_unwrapped(text).replace("{,}", ",").replace(r"\$", "").split())
    return _SPACING.sub("", join_thousands(text)).rstrip(".")


def _unwrapped(text: str) -> str:
    r"""Without `\text{}` and the like around words."""
    while found := _WRAPPED.search(text):
        inside = extract_braced(text, found.end())
        if inside is None:
            return text
        text = text[: found.start()] + inside + text[found.end() + len(inside) + 2 :]
    return text
