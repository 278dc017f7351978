"""The reward function, as a run calls it."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from megarl.config.plugins import is_async
from megarl.rewards import reward_process
from megarl.rewards.code import Grading, HiddenTests, hidden_tests
from megarl.rewards.functions import check_function, load_functions
from megarl.types.reward_values import Reward, RewardFailure

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
from plain_boxes import PlainBoxes  # noqa: E402
from said import said  # noqa: E402

pytestmark = pytest.mark.alone

TRUTH = ["assert f(1) == 2", "assert f(2) == 3", "assert f(5) == 7"]
TWO = "Like so:\n```python\ndef f(x):\n    return x + 1\n```"
ALL = "```python\ndef f(x):\n    return x + 1 + (x > 4)\n```\nIt prints `2`."


def of(scorer: HiddenTests, answer: str, truth: Any) -> Any:
    scorer.__dict__["_box"] = PlainBoxes()
    (result,) = reward_process.score([said(answer, truth)], {"tests": scorer}, timeout=60.0)
    return result["tests"]


def test_it_is_found_by_its_name() -> None:
    assert load_functions(["megarl.rewards.code:hidden_tests"]) == {"hidden_tests": hidden_tests}
    assert is_async(hidden_tests) and check_function(hidden_tests, "it") is hidden_tests


@pytest.mark.parametrize("as_text", [False, True])
def test_all_or_nothing(as_text: bool) -> None:
    truth = json.dumps(TRUTH) if as_text else TRUTH
    assert of(HiddenTests(), ALL, truth) == Reward(1.0, {"passed": 1.0}, ())
    assert of(HiddenTests(), TWO, truth) == Reward(0.0, {"passed": 2 / 3}, ())
    assert of(HiddenTests(), "I do not know", truth) == Reward(0.0, {"passed": 0.0}, ())


def test_the_share() -> None:
    assert of(HiddenTests(partial_credit=True), TWO, TRUTH) == Reward(2 / 3, {"passed": 2 / 3}, ())
    assert of(HiddenTests(Grading(max_tests=1), partial_credit=True), TWO, TRUTH) == Reward(1.0, {"passed": 1.0}, ())


@pytest.mark.parametrize(
    "truth", [None, "42", {"test_list": []}, ["assert close(f(1), 2)"], {"inputs": [], "outputs": []}]
)
def test_a_ground_truth_without_tests_is_no_wrong_answer(truth: Any) -> None:
    result = of(HiddenTests(), ALL, truth)
    assert isinstance(result, RewardFailure) and "it raised ValueError: " in result.reason


def test_the_example_of_the_page() -> None:
    page = Path(__file__).parents[3] / "megarl/rewards/SCORERS.md"
    lines = page.read_text(encoding="utf-8").splitlines()
    code = [line.strip() for line in lines if line.startswith("    ") and "HiddenTests" in line]
    names: dict[str, Any] = {}
    exec("\n".join(code), names)
    assert names["mine"].partial_credit and names["mine"].grading == Grading(max_tests=20, seconds=2, total_seconds=20)


def test_many_at_once() -> None:
    scorer = HiddenTests()
    scorer.__dict__["_box"] = PlainBoxes()

    async def all_of_them() -> list[Reward]:
        return await asyncio.gather(*(scorer(said(ALL if number % 2 else TWO, TRUTH)) for number in range(8)))

    assert [item.reward for item in asyncio.run(all_of_them())] == [0.0, 1.0] * 4
