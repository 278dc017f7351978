"""Short textual answers, compared as in SQuAD.

Rajpurkar et al., SQuAD (arXiv:1606.05250), section 6.1: exact match and token F1, ignoring punctuation and articles,
the maximum over all accepted answers.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np

from megarl.rewards.functions import with_prompt_check
from megarl.rewards.stated_answer import extract_answer
from megarl.types import Rollout

_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


@with_prompt_check(lambda prompt: parse_truths(prompt.ground_truth))
def exact_match(rollout: Rollout) -> float:
    """Return 1.0 if the answer equals one of `prompt.ground_truth` word for word, else 0.0.

    The answer is the content of the `<answer>` tags, or the policy's whole last message. Ignores case, ASCII
    punctuation, the articles a, an, the, and white space. The ground truth is a text, a list of texts, or a mapping
    with such a list as its `target` or `text`. Raises ValueError for anything else.
    """
    answer = normalize(extract_answer(rollout.answer))
    return float(answer in [normalize(truth) for truth in parse_truths(rollout.prompt.ground_truth)])


@with_prompt_check(lambda prompt: parse_truths(prompt.ground_truth))
def f1(rollout: Rollout) -> float:
    """Return the token F1 of the answer, from 0.0 to 1.0, the maximum over the ground truths.

    With n words in common, counted with multiplicity: 2 n / (words of the answer + words of the truth). If either has
    no words: 1.0 if both have none, else 0.0. Extraction and normalization are those of `exact_match`.
    """
    answer = Counter(normalize(extract_answer(rollout.answer)).split())
    scores = []
    for text in parse_truths(rollout.prompt.ground_truth):
        truth = Counter(normalize(text).split())
        num_words = answer.total() + truth.total()
        scores.append(2 * (answer & truth).total() / num_words if answer and truth else float(num_words == 0))
    return max(scores)


def normalize(text: str) -> str:
    """Lower the case, drop punctuation, then articles, and collapse white space."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def parse_truths(ground_truth: Any) -> list[str]:
    """Return all accepted answers. Raises ValueError if there are none."""
    answers: Any = ground_truth
    if isinstance(ground_truth, Mapping):
        answers = ground_truth.get("target", ground_truth.get("text"))
    if isinstance(answers, np.ndarray):  # from parquet files
        answers = answers.tolist()
    if isinstance(answers, str | int | float) and not isinstance(answers, bool):
        answers = [answers]
    is_list = isinstance(answers, list | tuple) and len(answers) > 0
    if not is_list or not all(isinstance(answer, str | int | float) for answer in answers):
        raise ValueError(f"the ground truth {str(ground_truth)[:200]!r} is neither a text nor a list of them")
    return [str(answer) for answer in answers]
