"""Grade-school mathematics (GSM8K): is the final answer the right number?"""

from __future__ import annotations

import re
from decimal import Decimal

from megarl.rewards.functions import with_prompt_check
from megarl.rewards.stated_answer import (
    extract_boxed,
    extract_final_part,
    extract_tagged,
    find_box,
    find_numbers,
    has_false_equation,
    join_thousands,
    parse_number,
)
from megarl.types import Prompt, Rollout

_NOT_THE_NUMBER = re.compile(r"\\(?:text|mathrm|mbox)\s*\{[^{}]*\}|\^\s*(?:\{[^{}]*\}|\w)")  # units and their exponents
_WORDS = re.compile(r"\\(?:text|mathrm|mbox)(?=\s*\{)")
_MINUS = re.compile(r"^[\s$*]*[-\N{MINUS SIGN}]\s+(?=[$0-9.])")


def parse_truth(prompt: Prompt) -> Decimal:
    """Return the ground truth. Raises ValueError if it is not a number."""
    truth = parse_number(prompt.ground_truth)
    if truth is None:
        raise ValueError(f"the ground truth {prompt.ground_truth!r} is not a number")
    return truth


@with_prompt_check(parse_truth)
def gsm8k(rollout: Rollout, strict: bool = False) -> float:
    r"""Return 1.0 if the answer's number equals `prompt.ground_truth`, else 0.0.

    The number is the one after the last `####` or in the last `\boxed{}`, whichever comes later; else the one between
    `<answer>` tags; else, unless `strict`, the last number of the answer. With tags, marks before them do not count.
    `3 = 5` states no result. Raises ValueError for a ground truth that is not a number.
    """
    return float(final_number(rollout.answer, strict) == parse_truth(rollout.prompt))


@with_prompt_check(parse_truth)
def gsm8k_strict(rollout: Rollout) -> float:
    r"""As `gsm8k`, but an answer without `####`, `\boxed{}`, or `<answer>` tags is wrong."""
    return gsm8k(rollout, strict=True)


def final_number(answer: str, strict: bool) -> Decimal | None:
    """Return the number that a text states as its result. Unless `strict`, an unmarked result is its last number."""
    is_tagged = extract_tagged(answer, "answer") is not None
    answer = extract_final_part(answer)
    hashes, box = answer.rfind("####"), find_box(answer)
    result = ""
    if box > hashes:
        result = extract_boxed(answer) or ""
    elif hashes >= 0:
        result = answer[hashes + 4 :].lstrip().partition("\n")[0]
    elif is_tagged:
        result = answer
    if has_false_equation(_strip_latex(result)):
        return None
    plain = join_thousands(_strip_latex(result))
    last_side = plain.rpartition("=")[2]
    plain = _MINUS.sub("-", last_side if parse_number(last_side) is not None else plain)
    # Without another number, \text{42} is one and not a unit.
    if numbers := find_numbers(plain) or find_numbers(_strip_latex(_WORDS.sub("", result))):
        return numbers[0] if hashes > box else numbers[-1]
    numbers = [] if strict else find_numbers(_strip_latex(answer))
    return numbers[-1] if numbers else None


def _strip_latex(text: str) -> str:
    r"""Remove LaTeX that hides a number: 1{,}080, 1\,080, \$5, 5\text{ cm}^2."""
    text = _NOT_THE_NUMBER.sub(" ", text)
    return text.replace("{,}", ",").replace("\\,", ",").replace("\\!", "").replace("\\$", "$").replace("**", "")
