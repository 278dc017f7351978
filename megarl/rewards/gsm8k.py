"""Grade-school maths (GSM8K): is the final answer the right number?"""

from __future__ import annotations

import re
from decimal import Decimal

from megarl.rewards.numbers import as_number, numbers_in
from megarl.rewards.stated import braced
from megarl.rewards.truths import checking
from megarl.types import Prompt, Rollout

_NOT_THE_NUMBER = re.compile(r"\\(?:text|mathrm|mbox)\s*\{[^{}]*\}|\^\s*(?:\{[^{}]*\}|\w)")  # units and their exponents


def _truth(prompt: Prompt) -> Decimal:
    truth = as_number(prompt.ground_truth)
    if truth is None:
        raise ValueError(f"the ground truth {prompt.ground_truth!r} is not a number")
    return truth


@checking(_truth)
def gsm8k(rollout: Rollout) -> float:
    """1.0 where the answer's number equals `prompt.ground_truth`, else 0.0.

    The number is the one behind the last `####` or in the last `\\boxed{}`, whichever comes later, or the last number
    of the answer where there is neither. Raises ValueError for a ground truth that is no number.
    """
    return _compare(rollout, final_number(rollout.answer, strict=False))


@checking(_truth)
def gsm8k_strict(rollout: Rollout) -> float:
    """As `gsm8k`, but an answer without `####` or `\\boxed{}` is wrong."""
    return _compare(rollout, final_number(rollout.answer, strict=True))


def final_number(answer: str, strict: bool) -> Decimal | None:
    """The number that a text gives as its result; without `strict` its last number where none is marked."""
    hashes = answer.rfind("####")
    boxed = answer.rfind(r"\boxed")
    marked: list[Decimal] = []
    if boxed > hashes:
        marked = numbers_in(_plain(braced(answer, boxed + len(r"\boxed")) or ""))[-1:]
    elif hashes >= 0:
        marked = numbers_in(_plain(answer[hashes + 4 :].lstrip().partition("\n")[0]))[:1]
    if marked or strict:
        return marked[0] if marked else None
    numbers = numbers_in(_plain(answer))
    return numbers[-1] if numbers else None


def _compare(rollout: Rollout, found: Decimal | None) -> float:
    return float(found == _truth(rollout.prompt))


def _plain(text: str) -> str:
    r"""Without LaTeX that hides a number: 1{,}080, 1\,080, \$5, 5\text{ cm}^2."""
    text = _NOT_THE_NUMBER.sub(" ", text)
    return text.replace("{,}", ",").replace("\\,", ",").replace("\\!", "").replace("\\$", "$").replace("**", "")
