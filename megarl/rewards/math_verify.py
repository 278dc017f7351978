r"""Mathematics (MATH, Hendrycks et al., arXiv:2103.03874): is the result equal to the ground truth, however written?

Uses the library math-verify, which parses LaTeX and plain expressions into sympy. Its timeouts use signals, which only
work in a main thread, so they are off. Instead, expressions that would be expensive to evaluate count as wrong:
`9^{9^{9}}` has 370 million digits, and no correct answer has that size. `reward.timeout` bounds the rest.
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

from megarl.rewards.functions import with_prompt_check
from megarl.rewards.stated_answer import extract_boxed, extract_final_part, join_thousands
from megarl.types import Prompt, Rollout

MAX_CHARS = 300
"""Maximum characters of an expression; the longest answer in MATH-500 has 159."""
MAX_DEPTH = 6
"""Maximum nesting depth of brackets; the parser's work may double with each level."""
MAX_BITS = 2.0**20
"""Maximum bits of a number; numbers of a million bits multiply in milliseconds."""
MAX_TERMS = 1000.0
"""Maximum terms of an expanded expression."""

_BRACKETS = {"{": 1, "(": 1, "[": 1, "}": -1, ")": -1, "]": -1}
_EXPENSIVE = re.compile(
    r"\\(?:i{1,3}nt|oint|sum|prod|coprod|lim|limsup|liminf|det|rank|nullity|trace|tr|adj|rref|gcd|lcm|choose)(?![a-zA-Z])"
    r"|\\begin\{[vV]matrix\}|\\operatorname|\\[a-z]?binom|\\frac\{(?:d|\\partial)"
)
_SMALL_BINOMIAL = re.compile(r"\\[dt]?binom\{(?:\d{1,4}|[a-z])\}\{(?:\d{1,4}|[a-z])\}")


def is_safe_to_parse(text: str) -> bool:
    """Return whether a text is cheap to parse: short, shallow, and without expensive operators. Runs in linear time."""
    if len(text) > MAX_CHARS:
        return False
    deepest = max(itertools.accumulate(_BRACKETS.get(char, 0) for char in text), default=0)
    is_expensive = _EXPENSIVE.search(_SMALL_BINOMIAL.sub("", text))
    return deepest <= MAX_DEPTH and not is_expensive and not ("matrix}" in text and "^" in text)


def is_safe_to_evaluate(expression: Any) -> bool:
    """Return whether a parsed expression is cheap to evaluate and compare: few bits, and few terms when expanded."""
    if isinstance(expression, str):
        return True
    parts = list(expression) if isinstance(expression, sympy.MatrixBase) else [expression]
    try:
        return all(_bits(part) <= MAX_BITS and _terms(part) <= MAX_TERMS for part in parts)
    except (TypeError, ValueError, OverflowError, RecursionError, AttributeError):  # NaN or infinity
        return False


def is_different(left: Any, right: Any, tolerance: float = 1e-4) -> bool:
    """Return whether two expressions are certainly unequal, without simplifying them, which may take minutes.

    They are if their values differ clearly at some assignment of their variables, or if one is a set or tuple of
    several elements and the other is not. False where this cannot tell: two sets, equations, texts, products of
    variables that may be words, and percentages. tolerance: relative to the larger value and to 1.
    """
    is_collection = [isinstance(part, sympy.Set | sympy.Tuple) and len(part.args) > 1 for part in (left, right)]
    if any(is_collection) and any(isinstance(part, sympy.Expr) for part in (left, right)):
        return True
    if not (isinstance(left, sympy.Expr) and isinstance(right, sympy.Expr)):
        return False
    for part in (left, right):
        # math-verify compares products of letters as words: it reads AB as A times B.
        factors = part.args if isinstance(part, sympy.Mul) else (part,)
        is_word = all(isinstance(factor, sympy.Symbol) for factor in factors)
        if is_word or isinstance(part, sympy.MatrixExpr) or part.has(sympy.UnevaluatedExpr):
            return False
    symbols = sorted(left.free_symbols | right.free_symbols, key=str)
    values = {symbol: sympy.Float(0.37 + 0.59 * number) for number, symbol in enumerate(symbols)}
    try:
        # mpmath values have no exponent limit
        left_value, right_value = (part.evalf(15, subs=values)._to_mpmath(53) for part in (left, right))
    except Exception:  # sympy raises many kinds for non-numeric values
        return False
    return bool(abs(left_value - right_value) > tolerance * max(1.0, abs(left_value), abs(right_value)))


def has_contradiction(expression: Any) -> bool:
    """Return whether an equation or a chain of them has different numbers on two sides, which may be rounded by 5 %."""
    chain = expression.args if isinstance(expression, And) else (expression,)
    if not all(isinstance(part, sympy.Eq) for part in chain):
        return False
    sides = [side for part in chain for side in part.args if isinstance(side, sympy.Expr) and not side.free_symbols]
    return any(
        is_different(left, right, tolerance=0.05 if left.has(sympy.Float) or right.has(sympy.Float) else 1e-4)
        for left, right in itertools.combinations(sides, 2)
    )


def _bits(node: Any) -> float:
    """Return an upper bound of the bits of an expression's largest number, before or after its point, or infinity."""
    if isinstance(node, sympy.Rational):
        return float(max(abs(int(node.p)).bit_length(), int(node.q).bit_length()))
    if isinstance(node, sympy.Float):
        _, _, exponent, digits = node._mpf_
        return max(1.0, abs(float(exponent + digits)))
    if isinstance(node, sympy.Pow | sympy.exp):
        base, exponent = (sympy.E, node.args[0]) if isinstance(node, sympy.exp) else node.args
        bits, size = _bits(base), _bits(exponent)
        return bits + size if exponent.free_symbols else bits * _bound_value(exponent, size)
    part_bits = [_bits(part) for part in node.args]
    if isinstance(node, sympy.factorial | sympy.gamma):
        return max(part_bits[0], 1.0) * _bound_value(node.args[0], part_bits[0])
    return max(1.0, sum(part_bits)) + len(part_bits)


def _bound_value(exponent: Any, size: float) -> float:
    """Return an upper bound of the absolute value of a number of this many bits."""
    if isinstance(exponent, sympy.Rational):
        return float(abs(exponent)) if size < 1000 else math.inf
    return 2.0**size if size < 1000 else math.inf


def _terms(node: Any) -> float:
    """Return an upper bound of the terms after expansion. The n-th power of k terms has C(n + k - 1, k - 1)."""
    part_terms = [_terms(part) for part in node.args]
    if isinstance(node, sympy.Mul):
        return math.prod(part_terms)
    if isinstance(node, sympy.Pow) and part_terms[0] > 1 and not node.args[1].free_symbols:
        times = _bound_value(node.args[1], _bits(node.args[1]))
        if isinstance(node.args[1], sympy.Rational):
            times = float(abs(node.args[1].p))
        if times > MAX_TERMS or part_terms[0] > MAX_TERMS:
            return math.inf
        return float(math.comb(math.ceil(times) + int(part_terms[0]) - 1, int(part_terms[0]) - 1))
    if isinstance(node, sympy.MatPow):
        return math.inf
    return max(1.0, sum(part_terms))


logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its timeouts are off

_LATEX = library.LatexExtractionConfig(boxed_match_priority=0)
_NO_LIMIT = 0
_ANY = (_LATEX, library.ExprExtractionConfig())
_WORD = re.compile(r"[A-Za-z]{3,}")
_NO_LETTER = re.compile(r"\\(?:cdot|times|(?:text|math)[a-z]*)(?![a-z])|[^A-Za-z]")
_GLUED = re.compile(r"(####|answer:)(?=\S)|`", re.IGNORECASE)


def _check(prompt: Prompt) -> None:
    """Check a ground truth if that is cheap; an expensive one is left to the scoring process, which can be killed."""
    truth = _extract_truth(prompt)
    if not truth or is_safe_to_parse(truth):
        _truth(truth)


def _extract_truth(prompt: Prompt) -> str:
    r"""Return a ground truth's text without a box or currency: `\$18.90` becomes 18.90."""
    truth = str("" if prompt.ground_truth is None else prompt.ground_truth).strip()
    boxed = extract_boxed(truth)
    return (truth if boxed is None else boxed).replace(r"\$", "")


@with_prompt_check(_check)
def math_verify(rollout: Rollout, strict: bool = False) -> float:
    r"""Return 1.0 if the answer's result equals `prompt.ground_truth`, else 0.0.

    The result is the content of the last `\boxed{}` or, without one, the formula or number that math-verify finds in
    the last 300 characters: one after "answer is" is preferred, then the latest. With `<answer>` tags, only the text
    between them counts, or a box after them. The ground truth is LaTeX, with or without dollar signs or a box, or a
    number.

    An expression is wrong, unless it is the ground truth's very text, if it is longer than 300 characters, nests more
    than 6 brackets, or needs to be worked out first: integrals, sums, limits, numbers of a million bits. Two things
    that math-verify accepts are wrong as well: a false equation (`3=5` for 5), and a word with reordered letters
    (`stop` for `post`), which it reads as a product. A truth of three or more letters that are not in alphabetical
    order is a word; `abc` is a product. Raises ValueError for a ground truth that cannot be parsed.
    """
    truth = _extract_truth(rollout.prompt)
    gold = _truth(truth)
    answer = extract_final_part(rollout.answer)
    boxed = extract_boxed(answer)
    if boxed is None and strict:
        return 0.0
    if boxed is None:
        parsed = _parse_answer(_GLUED.sub(r"\1 ", answer[-MAX_CHARS:].replace(r"\$", "")), _ANY)
    else:
        boxed = boxed.replace(r"\$", "").strip("* ").rstrip(".")
        if boxed == truth:
            return 1.0
        parsed = _parse_answer(_wrap_in_box(join_thousands(boxed)), (_LATEX,))
    if not parsed or has_contradiction(parsed[0]) or is_different(gold[0], parsed[0]) or _is_other_word(truth, parsed):
        return 0.0
    return float(library.verify(gold, parsed, timeout_seconds=_NO_LIMIT))


@with_prompt_check(_check)
def math_verify_strict(rollout: Rollout) -> float:
    r"""As `math_verify`, but an answer without `\boxed{}` is wrong."""
    return math_verify(rollout, strict=True)


def _is_other_word(truth: str, parsed: list[Any]) -> bool:
    """Return whether the truth is a word and the answer is a product of letters that do not spell it."""
    is_word = _WORD.fullmatch(truth) and sorted(truth.lower()) != list(truth.lower())
    if not is_word or isinstance(parsed[0], sympy.Symbol):
        return False
    return _NO_LETTER.sub("", str(parsed[-1])).lower() != truth.lower()


@lru_cache(maxsize=4096)
def _truth(text: str) -> list[Any]:
    """Parse a ground truth, once for all samples of a prompt."""
    parsed: list[Any] = []
    if text:
        wrapped = text if "$" in text else _wrap_in_box(text)
        parsed = library.parse(wrapped, extraction_config=list(_ANY), parsing_timeout=_NO_LIMIT)
    if not parsed:
        raise ValueError(f"the ground truth {text[:200]!r} is not mathematics that can be parsed")
    return parsed


def _parse_answer(text: str, targets: tuple[Any, ...]) -> list[Any]:
    """Parse an answer into an expression and its text. Returns an empty list if that is not safe to evaluate."""
    if not is_safe_to_parse(text.removeprefix(r"\boxed{").removesuffix("}")):
        return []
    parsed: list[Any] = library.parse(text, extraction_config=list(targets), parsing_timeout=_NO_LIMIT)
    return parsed if all(map(is_safe_to_evaluate, parsed)) else []


def _wrap_in_box(text: str) -> str:
    """Wrap a formula so that math-verify finds it: alone, in a box, without math delimiters."""
    for mark in ("$", r"\[", r"\]", r"\(", r"\)"):
        text = text.replace(mark, " ")
    return f"\\boxed{{{text}}}"
