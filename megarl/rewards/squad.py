"""Short answers in words, compared as SQuAD compares them.

Rajpurkar et al., SQuAD (arXiv:1606.05250), section 6.1: exact match and token F1, ignoring punctuation and articles,
the best over all answers that count as right.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np

from megarl.rewards.ground_truths import with_prompt_check
from megarl.rewards.stated_answer import extract_answer
from megarl.types import Rollout

_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


@with_prompt_check(lambda prompt: parse_truths(prompt.ground_truth))
def exact_match(rollout: Rollout) -> float:
    """1.0 where the answer is one of those of `prompt.ground_truth`, word for word, else 0.0.

    The answer is what is between `<answer>` tags, or all that the policy said last. Lower and upper case, ASCII
    punctuation, the articles a, an, the and white space make no difference. The ground truth is a text, a list of them,
    or a mapping with such a list as its `target` or `text`. Raises ValueError for what is none of these.
    """
    said = normalize(extract_answer(rollout.answer))
    return float(said in [normalize(truth) for truth in parse_truths(rollout.prompt.ground_truth)])


@with_prompt_check(lambda prompt: parse_truths(prompt.ground_truth))
def f1(rollout: Rollout) -> float:
    """Harmonic mean of precision and recall of the answer's words, the best over the ground truths, from 0.0 to 1.0.

    With n words in common, each as often as it is in both: 2 n / (words of the answer + words of the truth). Where
    either has no words, 1.0 if both have none. What the answer is and what makes no difference is as of `exact_match`.
    """
    said = Counter(normalize(extract_answer(rollout.answer)).split())
    return max(_f1(said, Counter(normalize(truth).split())) for truth in parse_truths(rollout.prompt.ground_truth))


def normalize(text: str) -> str:
    """In lower case, without punctuation, then without articles, words one space apart."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def parse_truths(given: Any) -> list[str]:
    """All answers that count as right. Raises ValueError where there is none."""
    found: Any = given
    if isinstance(given, Mapping):
        found = given.get("target", given.get("text"))
    if isinstance(found, np.ndarray):  # as parquet files have them
        found = found.tolist()
    if isinstance(found, str | int | float) and not isinstance(found, bool):
        found = [found]
    if not isinstance(found, list | tuple) or not found or not all(isinstance(one, str | int | float) for one in found):
        raise ValueError(f"the ground truth {str(given)[:200]!r} is neither a text nor a list of them")
    return [str(one) for one in found]


def _f1(said: Counter[str], truth: Counter[str]) -> float:
    words = said.total() + truth.total()
    if not said or not truth:
        return float(words == 0)
    return 2 * (said & truth).total() / words
