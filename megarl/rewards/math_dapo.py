"""DAPO's reward for mathematics with one correct answer.

Yu et al., DAPO (arXiv:2503.14476), section 2.4: +1 if the answer is equivalent to the ground truth, else -1. The
prompts of its data set ask for a last line `Answer: ..`, and its answers are integers (section 3.5).
"""

from __future__ import annotations

import re

from megarl.rewards.functions import with_prompt_check
from megarl.rewards.stated_answer import extract_boxed, extract_braced, has_false_equation, join_thousands, parse_number
from megarl.types import Prompt, Rollout

SEARCHED_CHARS = 300
"""Characters at the end of the answer that are searched, as in DAPO's own code (verl)."""

_MARK = re.compile(r"answer[\s*_]*:", re.IGNORECASE)
_OPENING = re.compile(r"(?:[\s*_$}]|\\[(\[]|<answer>)*")  # between the marker and the result, line breaks included
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
    r"""Return 1.0 if the last `Answer: ..` states `prompt.ground_truth`, else -1.0.

    Searches the last 300 characters for the last `answer:` and takes the rest of its line, or the first line with text
    after it. Compares with the ground truth as numbers if both are numbers, else as text. Ignored: `$`, `\(`, `\[`,
    spaces, bold, a box, the command in `\text{}`, `<answer>` tags, a leading `x =`, thousands separators, a full stop,
    and the unit after a number. `3 = 5` is wrong. Raises ValueError for an empty ground truth.
    """
    truth = _truth(rollout.prompt)
    tail = rollout.answer[-SEARCHED_CHARS:]
    marks = list(_MARK.finditer(tail))
    if not marks:
        return -1.0
    opening = _OPENING.match(tail, marks[-1].end())
    assert opening is not None
    line = tail[opening.end() :].partition("\n")[0]
    if has_false_equation(_strip_formatting(line)):
        return -1.0
    stated = normalize(line)
    number = parse_number(truth)
    is_correct = stated == truth if number is None else parse_number(_UNIT.sub("", stated)) == number
    return 1.0 if is_correct else -1.0


def normalize(text: str) -> str:
    """Return a result without differences that do not matter."""
    if (boxed := extract_boxed(text)) is not None:
        text = boxed
    return _FRACTION.sub(r"\\frac", _strip_formatting(text.rpartition("=")[2]))


def _strip_formatting(text: str) -> str:
    r"""Remove formatting, and `\text{}` around its content. A space between two digits stays."""
    while (match := _WRAPPED.search(text)) and (content := extract_braced(text, match.end())) is not None:
        text = text[: match.start()] + content + text[match.end() + len(content) + 2 :]
    text = " ".join(text.replace("{,}", ",").replace(r"\$", "").split())
    return _SPACING.sub("", join_thousands(text)).rstrip(".")
