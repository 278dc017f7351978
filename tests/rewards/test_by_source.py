"""Choose the reward function by the data source of the prompt."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from megarl.rewards.by_source import SOURCES, BySource, by_source
from megarl.rewards.code import hidden_tests
from megarl.rewards.functions import check_function, load_functions

sys.path.insert(0, str(Path(__file__).parent))
from answer_rollouts import make_rollout  # noqa: E402

pytestmark = pytest.mark.alone

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("source", "correct", "ground_truth", "rewards"),
    [
        ("openai/gsm8k", "#### 72", "72", (1.0, 0.0)),
        ("lighteval/MATH", r"\boxed{\frac{1}{2}}", "0.5", (1.0, 0.0)),
        ("DigitalLearningGmbH/MATH-lighteval", r"\boxed{1}", "1", (1.0, 0.0)),
        ("numina_olympiads", r"\boxed{x^2}", "x*x", (1.0, 0.0)),
        ("math_dapo", "Answer: 34", "34", (1.0, -1.0)),
        ("aime2024", "Answer: 34", "34", (1.0, -1.0)),
        ("aime_2025", "Answer: 34", "34", (1.0, -1.0)),
        ("searchR1_nq", "<answer>Paris</answer>", {"target": ["Paris"]}, (1.0, 0.0)),
        ("rajpurkar/squad", "Paris", ["Paris"], (1.0, 0.0)),
        ("cais/mmlu", "Answer: C", "C", (1.0, 0.0)),
    ],
)
def test_scores_with_the_function_of_the_source(source, correct, ground_truth, rewards):
    assert (
        by_source(make_rollout(correct, ground_truth, source)),
        by_source(make_rollout("no", ground_truth, source)),
    ) == rewards


@pytest.mark.parametrize("source", ["", "lighteval/math", "openai/gsm8k/main", "codecontest", "xaime"])
def test_errors_name_unknown_sources(source):
    with pytest.raises(
        ValueError, match=f"^no reward for the data source {source!r}; name .* \\(known: openai/gsm8k, "
    ):
        by_source(make_rollout("1", "1", source))


def test_loads_as_a_reward_function():
    functions = load_functions(["megarl.rewards.by_source:by_source"])
    assert functions == {"by_source": by_source}
    assert check_function(by_source, "by_source")(make_rollout("#### 72", "72", "openai/gsm8k")) == 1.0


def test_accepts_custom_sources():
    reward = BySource({**SOURCES, "lab/*": answer_length, "lab/maths*": always_one, "lab/x": always_zero})
    assert [reward(make_rollout("abc", None, source)) for source in ("lab/a", "lab/maths-2", "lab/x", "lab/xy")] == [
        3,
        1,
        0,
        3,
    ]
    assert reward.function_for("openai/gsm8k") is SOURCES["openai/gsm8k"]


async def async_length(rollout):
    return len(rollout.answer)


def test_awaits_coroutine_functions():
    reward = BySource({"lab/a": async_length, "lab/b": always_one})
    assert [reward(make_rollout("abc", None, source)) for source in ("lab/a", "lab/b", "lab/a")] == [3, 1, 3]
    assert (
        by_source.function_for("livecodebench/code_generation_lite") is hidden_tests is by_source.function_for("taco")
    )


def answer_length(rollout):
    return len(rollout.answer)


def always_one(rollout):
    return 1


def always_zero(rollout):
    return 0
