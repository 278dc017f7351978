r"""Mathematics (MATH and similar): is the result equal to the ground truth, however it is written?

Uses the library math-verify (Hugging Face, Apache 2.0), which parses LaTeX and plain expressions into sympy: 1/2 equals
0.5 and \frac{2}{4}, 50\% as well, x+1 equals 1+x, {1,2} equals {2,1}. MATH is Hendrycks et al., arXiv:2103.03874.

The library's time limits are signals, which only work in a main thread. They are off. Instead, expressions that would
be expensive to evaluate count as wrong: `9^{9^{9}}` has 370 million digits, `\binom{10^9}{10^8}` as many, and no right
answer is of that size. The rest is bounded by `reward.timeout`, as for every function.
"""

from __future__ import annotations

import itertools
import logging
import math
import re
from functools import lru_cache
from typing import Any

import math_verify as library
import sympy
from latex2sympy2_extended.logic import And

from megarl.rewards.ground_truths import with_prompt_check
from megarl.rewards.stated_answer import extract_boxed, extract_final_part, join_thousands
from megarl.types import Prompt, Rollout

LONGEST = 300
"""Characters; the longest answer in MATH-500 has 159."""
DEEPEST = 6
"""Brackets within each other; the parser's work may double with each."""
MOST_BITS = 2.0**20
"""Of a number, a million of which multiply in milliseconds."""
MOST_TERMS = 1000.0
"""Of an expression, multiplied out."""

_BRACKETS = {"{": 1, "(": 1, "[": 1, "}": -1, ")": -1, "]": -1}
_EXPENSIVE = re.compile(
    r"\\(?:i{1,3}nt|oint|sum|prod|coprod|lim|limsup|liminf|det|rank|nullity|trace|tr|adj|rref|gcd|lcm|choose)(?![a-zA-Z])"
    r"|\\begin\{[vV]matrix\}|\\operatorname|\\[a-z]?binom|\\frac\{(?:d|\\partial)"
)
_SMALL_BINOMIAL = re.compile(r"\\[dt]?binom\{(?:\d{1,4}|[a-z])\}\{(?:\d{1,4}|[a-z])\}")


def is_safe_to_parse(text: str) -> bool:
    """Whether a text may be parsed: short, not deep, nothing that stands for many operations. Linear."""
    if len(text) > LONGEST:
        return False
    depth = deepest = 0
    for sign in text:
        depth += _BRACKETS.get(sign, 0)
        deepest = max(deepest, depth)
    many = _EXPENSIVE.search(_SMALL_BINOMIAL.sub("", text))
    return deepest <= DEEPEST and not many and not ("matrix}" in text and "^" in text)


def is_safe_to_evaluate(expression: Any) -> bool:
    """Whether what the parser made of it may be evaluated and compared: neither a number in it nor the sum that it
    comes to is long."""
    if isinstance(expression, str):
        return True
    parts = list(expression) if isinstance(expression, sympy.MatrixBase) else [expression]
    try:
        return all(_bits(part) <= MOST_BITS and _terms(part) <= MOST_TERMS for part in parts)
    except (TypeError, ValueError, OverflowError, RecursionError, AttributeError):  # of a number that is none
        return False


def is_different(one: Any, other: Any, within: float = 1e-4) -> bool:
    """Whether two expressions have clearly different values where their variables are some numbers, or one is a set or
    tuple of several and the other is none. Then they are not equal, and need not be simplified to know that, which may
    take minutes. False also where this says nothing: of two sets, equations, texts, products of variables that may be
    words, and percentages, which count as their numbers, too. within: relative to the larger, and to 1."""
    several = [isinstance(part, sympy.Set | sympy.Tuple) and len(part.args) > 1 for part in (one, other)]
    if any(several) and any(isinstance(part, sympy.Expr) for part in (one, other)):
        return True
    if not (isinstance(one, sympy.Expr) and isinstance(other, sympy.Expr)):
        return False
    if any(
        isinstance(part, sympy.MatrixExpr) or _is_symbol_product(part) or part.has(sympy.UnevaluatedExpr)
        for part in (one, other)
    ):
        return False
    symbols = sorted(one.free_symbols | other.free_symbols, key=str)
    values = {symbol: sympy.Float(0.37 + 0.59 * number) for number, symbol in enumerate(symbols)}
    try:
        first, second = (part.evalf(15, subs=values)._to_mpmath(53) for part in (one, other))  # beyond any exponent
    except Exception:  # sympy has many for what is no number
        return False
    return bool(abs(first - second) > within * max(1.0, abs(first), abs(second)))


def has_contradiction(expression: Any) -> bool:
    """Whether it is an equation, or a chain of them, with different numbers on two sides. A decimal may be rounded, by
    up to 5 %."""
    chain = expression.args if isinstance(expression, And) else (expression,)
    if not all(isinstance(part, sympy.Eq) for part in chain):
        return False
    sides = [side for part in chain for side in part.args if isinstance(side, sympy.Expr) and not side.free_symbols]
    return any(
        is_different(one, other, within=0.05 if one.has(sympy.Float) or other.has(sympy.Float) else 1e-4)
        for one, other in itertools.combinations(sides, 2)
    )


def _is_symbol_product(expression: Any) -> bool:
    """Whether it may be letters that math-verify compares as such: AB is read as A times B."""
    parts = expression.args if isinstance(expression, sympy.Mul) else (expression,)
    return all(isinstance(part, sympy.Symbol) for part in parts)


def _bits(node: Any) -> float:
    """So many bits has the largest number in it at most, before or behind the point; infinite for what is endless."""
    if isinstance(node, sympy.Rational):
        return float(max(abs(int(node.p)).bit_length(), int(node.q).bit_length()))
    if isinstance(node, sympy.Float):
        _, _, exponent, digits = node._mpf_
        return max(1.0, abs(float(exponent + digits)))
    if isinstance(node, sympy.Pow | sympy.exp):
        base, exponent = (sympy.E, node.args[0]) if isinstance(node, sympy.exp) else node.args
        bits, size = _bits(base), _bits(exponent)
        return bits + size if exponent.free_symbols else bits * _bound_value(exponent, size)
    inner = [_bits(part) for part in node.args]
    if isinstance(node, sympy.factorial | sympy.gamma):
        return max(inner[0], 1.0) * _bound_value(node.args[0], inner[0])
    return max(1.0, sum(inner)) + len(inner)


def _bound_value(exponent: Any, size: float) -> float:
    """No less than a number of so many bits, in absolute value."""
    if isinstance(exponent, sympy.Rational):
        return float(abs(exponent)) if size < 1000 else math.inf
    return 2.0**size if size < 1000 else math.inf


def _terms(node: Any) -> float:
    """So many terms it has at most, multiplied out. Of n factors of k terms, C(n + k - 1, k - 1)."""
    inner = [_terms(part) for part in node.args]
    if isinstance(node, sympy.Mul):
        return math.prod(inner)
    if isinstance(node, sympy.Pow) and inner[0] > 1 and not node.args[1].free_symbols:
        times = _bound_value(node.args[1], _bits(node.args[1]))
        if isinstance(node.args[1], sympy.Rational):
            times = float(abs(node.args[1].p))
        if times > MOST_TERMS or inner[0] > MOST_TERMS:
            return math.inf
        return float(math.comb(math.ceil(times) + int(inner[0]) - 1, int(inner[0]) - 1))
    if isinstance(node, sympy.MatPow):
        return math.inf
    return max(1.0, sum(inner))


logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns of time limits that are off

_LATEX = library.LatexExtractionConfig(boxed_match_priority=0)
_NO_LIMIT = 0
_ANY = (_LATEX, library.ExprExtractionConfig())
_WORD = re.compile(r"[A-Za-z]{3,}")
_NO_LETTER = re.compile(r"\\(?:cdot|times|(?:text|math)[a-z]*)(?![a-z])|[^A-Za-z]")
_GLUED = re.compile(r"(####|answer:)(?=\S)|`", re.IGNORECASE)


def _check(prompt: Prompt) -> None:
    """What would take long is left to the process that compares, which can be stopped."""
    truth = _extract_truth(prompt)
    if not truth or is_safe_to_parse(truth):
        _truth(truth)


def _extract_truth(prompt: Prompt) -> str:
    r"""The text of a ground truth, without a box or currency: `\$18.90` is 18.90."""
    truth = str("" if prompt.ground_truth is None else prompt.ground_truth).strip()
    inside = extract_boxed(truth)
    return (truth if inside is None else inside).replace(r"\$", "")


@with_prompt_check(_check)
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


@with_prompt_check(_check)
def math_verify_strict(rollout: Rollout) -> float:
    r"""As `math_verify`, but an answer without `\boxed{}` is wrong."""
    return _compared(rollout, strict=True)


def _compared(rollout: Rollout, strict: bool) -> float:
    truth = _extract_truth(rollout.prompt)
    gold = _truth(truth)
    answer = extract_final_part(rollout.answer)
    found = extract_boxed(answer)
    if found is None and strict:
        return 0.0
    if found is None:
        said = _parse_answer(_GLUED.sub(r"\1 ", answer[-LONGEST:].replace(r"\$", "")), _ANY)
    else:
        found = found.replace(r"\$", "").strip("* ").rstrip(".")
        if found == truth:
            return 1.0
        said = _parse_answer(_wrap_in_box(join_thousands(found)), (_LATEX,))
    if not said or has_contradiction(said[0]) or is_different(gold[0], said[0]) or _is_other_word(truth, said):
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
        wrapped = text if "$" in text else _wrap_in_box(text)
        found = library.parse(wrapped, extraction_config=list(_ANY), parsing_timeout=_NO_LIMIT)
    if not found:
        raise ValueError(f"the ground truth {text[:200]!r} is no mathematics that could be read")
    return found


def _parse_answer(text: str, targets: tuple[Any, ...]) -> list[Any]:
    """What a policy's text is: an expression and its own letters; nothing where it may not be worked out."""
    if not is_safe_to_parse(text.removeprefix(r"\boxed{").removesuffix("}")):
        return []
    found: list[Any] = library.parse(text, extraction_config=list(targets), parsing_timeout=_NO_LIMIT)
    return found if all(map(is_safe_to_evaluate, found)) else []


def _wrap_in_box(text: str) -> str:
    r"""A formula as math-verify finds it: alone, in a box, without marks of its own."""
    for mark in ("$", r"\[", r"\]", r"\(", r"\)"):
        text = text.replace(mark, " ")
    return f"\\boxed{{{text}}}"
