"""The share of words in the language of the prompt, with hand-counted words."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from megarl.rewards.functions import check_function
from megarl.rewards.language_consistency import count_words, language_consistency

sys.path.insert(0, str(Path(__file__).parent))
from answer_rollouts import HOSTILE, make_rollout  # noqa: E402

pytestmark = pytest.mark.alone

ENGLISH, CHINESE, RUSSIAN = "What is the sum of these?", "这些数的和是多少", "Чему равна сумма"


def score(answer: str, question: str = ENGLISH, language: str = "") -> float:
    rollout = make_rollout(answer, None)
    extra = {"language": language} if language else {}
    prompt = replace(rollout.prompt, messages=({"role": "user", "content": question},), extra=extra)
    return language_consistency(replace(rollout, prompt=prompt))


@pytest.mark.parametrize(
    ("text", "counts"),
    [
        ("Wait, let me think.", {"LATIN": 4}),
        ("所以 the answer 是", {"CJK": 3, "LATIN": 2}),
        ("x + y = 3, so $\\frac{abc}{2}$ and \\sqrt of `code here`", {"LATIN": 3}),
        ("Ответ: 5", {"CYRILLIC": 1}),
        ("これは本", {"CJK": 4}),
        ("<think> 12 </think>", {}),
    ],
)
def test_counts_words_by_script(text: str, counts: dict[str, int]) -> None:
    assert count_words(text) == counts


def test_share_of_the_chain_of_thought() -> None:
    mixed = "<think>So the sum 是十</think><answer>答案</answer>"
    assert score(mixed) == 3 / 5
    assert score(mixed, CHINESE) == 2 / 5
    assert score(mixed, RUSSIAN) == 0.0
    assert score(mixed, RUSSIAN, language="en") == 3 / 5
    assert score("So the sum 是十</think> 答案") == 3 / 5, "the template has written <think>"
    assert score("The sum is ten") == 1.0, "without tags, all of the answer counts"
    assert score("<think>1 + 1 = 2</think>") == 0.0


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_answers_have_a_reward_in_range(text: str) -> None:
    assert 0.0 <= score(HOSTILE[text]) <= 1.0


def test_is_a_reward_function() -> None:
    assert check_function(language_consistency, "language_consistency")
