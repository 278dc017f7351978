r"""Mathematics (MATH and the like): is the result equal to the ground truth, however it is written?

By the library math-verify (Hugging Face, Apache 2.0), which reads LaTeX and plain expressions into sympy: 1/2 is 0.5
and \frac{2}{4}, 50\% too, x+1 is 1+x, {1,2} is {2,1}. MATH is Hendrycks et al., arXiv:2103.03874.

Its time limits are signals, which only a main thread can have. They are off; instead it is given only what is little
work (`rewards/evaluated.py`), and what sympy does then is under `reward.timeout`, as every function is.
"""

from __future__ import annotations

import logging
import re
from functools import lru_cache
from typing import Any

import math_verify as library
import sympy

from megarl.rewards.evaluated import LONGEST, contradicts, differ, small, tame
from megarl.rewards.numbers import join_thousands
from megarl.rewards.stated import boxed, final_part
from megarl.rewards.truths import checking
from megarl.types import Prompt, Rollout

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns of time limits that are off

_LATEX = library.LatexExtractionConfig(boxed_match_priority=0)
_NO_LIMIT = 0
_ANY = (_LATEX, library.ExprExtractionConfig())
_WORD = re.compile(r"[A-Za-z]{3,}")
_NO_LETTER = re.compile(r"\\(?:cdot|times|(?:text|math)[a-z]*)(?![a-z])|[^A-Za-z]")
_GLUED = re.compile(r"(####|answer:)(?=\S)|`", re.IGNORECASE)


def _check(prompt: Prompt) -> None:
    """What would take long is left to the process that compares, which can be stopped."""
    truth = _given(prompt)
    if not truth or small(truth):
        _truth(truth)


def _given(prompt: Prompt) -> str:
    r"""The text of a ground truth, without a box or currency: `\$18.90` is 18.90."""
    truth = str("" if prompt.ground_truth is None else prompt.ground_truth).strip()
    inside = boxed(truth)
    return (truth if inside is None else inside).replace(r"\$", "")


@checking(_check)
def math_verify(rollout: Rollout) -> float:
    r"""1.0 where the answer's result equals `prompt.ground_truth`, else 0.0.

    The result is what the last `\boxed{}` holds, or, where there is none, the formula or number that math-verify finds
    in the last 300 characters: one behind "answer is" before others, later ones before earlier ones. Where there are
    `<answer>` tags, only what is between them counts, or a box behind them. The ground truth is a text of LaTeX, with
    or without dollar signs or a box, or a number.

    Wrong is also what is longer than 300 characters, has more than 6 brackets within each other, or would have to be
    worked out first: integrals, sums, limits, numbers of a million bits; unless it is the ground truth itself. So are
    two things that math-verify takes: a false equation (`3=5` for 5), and a word of other order (`stop` for `post`),
    which it reads as a product of letters. A truth of three or more letters that are not in alphabetical order is a
    word; `abc` is a product.
    Raises ValueError for a ground truth that cannot be read.
    """
    return _compared(rollout, strict=False)


@checking(_check)
def math_verify_strict(rollout: Rollout) -> float:
    r"""As `math_verify`, but an answer without `\boxed{}` is wrong."""
    return _compared(rollout, strict=True)


def _compared(rollout: Rollout, strict: bool) -> float:
    truth = _given(rollout.prompt)
    gold = _truth(truth)
    answer = final_part(rollout.answer)
    found = boxed(answer)
    if found is None and strict:
        return 0.0
    if found is None:
        said = _read(_GLUED.sub(r"\1 ", answer[-LONGEST:].replace(r"\$", "")), _ANY)
    else:
        found = found.replace(r"\$", "").strip("* ").rstrip(".")
        if found == truth:
            return 1.0
        said = _read(_in_a_box(join_thousands(found)), (_LATEX,))
    if not said or contradicts(said[0]) or differ(gold[0], said[0]) or _is_other_word(truth, said):
        return 0.0
    return float(library.verify(gold, said, timeout_seconds=_NO_LIMIT))


def _is_other_word(truth: str, said: list[Any]) -> bool:
    """Whether the truth is a word, and the answer a product of letters that do not spell it."""
    if not _WORD.fullmatch(truth) or sorted(truth.lower()) == list(truth.lower()) or isinstance(said[0], sympy.Symbol):
        return False
    return _NO_LETTER.sub("", str(said[-1])).lower() != truth.lower()


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
