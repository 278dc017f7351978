"""The function of each data set, by the prompt's data source."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from megarl.rewards.by_source import SOURCES, BySource, by_source
from megarl.rewards.code import hidden_tests
from megarl.rewards.functions import check_function, load_functions

sys.path.insert(0, str(Path(__file__).parent))
from said import said  # noqa: E402

pytestmark = pytest.mark.alone

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("source", "right", "truth", "rewards"),
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
def test_each_source_has_its_own(source, right, truth, rewards):
    assert (by_source(said(right, truth, source)), by_source(said("no", truth, source))) == rewards


@pytest.mark.parametrize("source", ["", "lighteval/math", "openai/gsm8k/main", "codecontest", "xaime"])
def test_an_unknown_one_is_named(source):
    with pytest.raises(
        ValueError, match=f"^no reward for the data source {source!r}; name .* \\(known: openai/gsm8k, "
    ):
        by_source(said("1", "1", source))


def test_as_a_reward_function():
    functions = load_functions(["megarl.rewards.by_source:by_source"])
    assert functions == {"by_source": by_source}
    assert check_function(by_source, "by_source")(said("#### 72", "72", "openai/gsm8k")) == 1.0


def test_sources_of_ones_own():
    mine = BySource({**SOURCES, "lab/*": len_of, "lab/maths*": one, "lab/x": zero})
    assert [mine(said("abc", None, source)) for source in ("lab/a", "lab/maths-2", "lab/x", "lab/xy")] == [3, 1, 0, 3]
    assert mine.function_for("openai/gsm8k") is SOURCES["openai/gsm8k"]


async def later(rollout):
    return len(rollout.answer)


def test_a_coroutine_function_is_awaited():
    mine = BySource({"lab/a": later, "lab/b": one})
    assert [mine(said("abc", None, source)) for source in ("lab/a", "lab/b", "lab/a")] == [3, 1, 3]
    assert (
        by_source.function_for("livecodebench/code_generation_lite") is hidden_tests is by_source.function_for("taco")
    )


def len_of(rollout):
    return len(rollout.answer)


def one(rollout):
    return 1


def zero(rollout):
    return 0
