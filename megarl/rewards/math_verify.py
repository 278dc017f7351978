r"""Mathematics (MATH and the like): is the result equal to the ground truth, however it is written?

By the library math-verify (Hugging Face, Apache 2.0), which reads LaTeX and plain expressions into sympy: 1/2 is 0.5
and \frac{2}{4}, 50\% too, x+1 is 1+x, {1,2} is {2,1}. MATH is Hendrycks et al., arXiv:2103.03874.

Its time limits are signals, which only a main thread can have. They are off; instead it is given only what is little
work (`rewards/evaluated.py`), and what sympy does then is under `reward.timeout`, as every function is.
"""

from __future__ import annotations

import logging
from functools import lru_cache
from typing import Any

import math_verify as library

from megarl.rewards.evaluated import LONGEST, differ, small, tame
from megarl.rewards.stated import boxed
from megarl.rewards.truths import checking
from megarl.types import Prompt, Rollout

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns of time limits that are off

_LATEX = library.LatexExtractionConfig(boxed_match_priority=0)
_NO_LIMIT = 0
_ANY = (_LATEX, library.ExprExtractionConfig())


def _check(prompt: Prompt) -> None:
    """What would take long is left to the process that compares, which can be stopped."""
    given = prompt.ground_truth
    truth = str("" if given is None else given).strip()
    inside = boxed(truth)
    truth = truth if inside is None else inside
    if not truth or small(truth):
        _truth(truth)


@checking(_check)
def math_verify(rollout: Rollout) -> float:
    r"""1.0 where the answer's result equals `prompt.ground_truth`, else 0.0.

    The result is what the last `\boxed{}` holds, or, where there is none, the formula or number that math-verify finds
    in the last 300 characters: one behind "answer is" before others, later ones before earlier ones. The ground truth
    is a text of LaTeX, with or without dollar signs or a box, or a number.

    Wrong is also what is longer than 300 characters, has more than 6 brackets within each other, or would have to be
    worked out first: integrals, sums, limits, numbers of a million bits; unless it is the ground truth itself.
    Raises ValueError for a ground truth that cannot be read.
    """
    return _compared(rollout, strict=False)


@checking(_check)
def math_verify_strict(rollout: Rollout) -> float:
    r"""As `math_verify`, but an answer without `\boxed{}` is wrong."""
    return _compared(rollout, strict=True)


def _compared(rollout: Rollout, strict: bool) -> float:
    given = rollout.prompt.ground_truth
    truth = str("" if given is None else given).strip()
    inside = boxed(truth)
    truth = truth if inside is None else inside
    gold = _truth(truth)
    found = boxed(rollout.answer)
    if found is None and strict:
        return 0.0
    if found is not None and found == truth:
        return 1.0
    said = _read(rollout.answer[-LONGEST:], _ANY) if found is None else _read(_in_a_box(found), (_LATEX,))
    if not said or differ(gold[0], said[0]):
        return 0.0
    return float(library.verify(gold, said, timeout_seconds=_NO_LIMIT))


@lru_cache(maxsize=4096)
def _truth(text: str) -> list[Any]:
    """What a ground truth is, read once for all samples of a prompt."""
    found: list[Any] = []
    if text:
        wrapped = text if "$" in text else _in_a_box(text)
        found = library.parse(wrapped, extraction_config=list(_ANY), parsing_timeout=_NO_LIMIT)
    if not found:
        raise ValueError(f"the ground truth {text[:200]!r} is no mathematics that could be read")
    return found


def _read(text: str, targets: tuple[Any, ...]) -> list[Any]:
    """What a policy's text is: an expression and its own letters; nothing where it may not be worked out."""
    if not small(text.removeprefix(r"\boxed{").removesuffix("}")):
        return []
    found: list[Any] = library.parse(text, extraction_config=list(targets), parsing_timeout=_NO_LIMIT)
    return found if all(map(tame, found)) else []


def _in_a_box(text: str) -> str:
    r"""A formula as math-verify finds it: alone, in a box, without marks of its own."""
    for mark in ("$", r"\[", r"\]", r"\(", r"\)"):
        text = text.replace(mark, " ")
    return f"\\boxed{{{text}}}"
