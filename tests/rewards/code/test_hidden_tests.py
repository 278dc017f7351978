"""The hidden-tests reward function, called as in a run."""

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
from answer_rollouts import make_rollout  # noqa: E402
from plain_sandbox import PlainSandbox  # noqa: E402

pytestmark = pytest.mark.alone

TRUTH = ["assert f(1) == 2", "assert f(2) == 3", "assert f(5) == 7"]
TWO_PASS = "Like so:\n```python\ndef f(x):\n    return x + 1\n```"
ALL_PASS = "```python\ndef f(x):\n    return x + 1 + (x > 4)\n```\nIt prints `2`."


def score(scorer: HiddenTests, answer: str, ground_truth: Any) -> Any:
    scorer.__dict__["_box"] = PlainSandbox()
    (result,) = reward_process.score([make_rollout(answer, ground_truth)], {"tests": scorer}, timeout=60.0)
    return result["tests"]


def test_loads_by_name() -> None:
    assert load_functions(["megarl.rewards.code:hidden_tests"]) == {"hidden_tests": hidden_tests}
    assert is_async(hidden_tests) and check_function(hidden_tests, "it") is hidden_tests


@pytest.mark.parametrize("as_text", [False, True])
def test_rewards_only_answers_that_pass_all_tests(as_text: bool) -> None:
    ground_truth = json.dumps(TRUTH) if as_text else TRUTH
    assert score(HiddenTests(), ALL_PASS, ground_truth) == Reward(1.0, {"passed": 1.0}, ())
    assert score(HiddenTests(), TWO_PASS, ground_truth) == Reward(0.0, {"passed": 2 / 3}, ())
    assert score(HiddenTests(), "I do not know", ground_truth) == Reward(0.0, {"passed": 0.0}, ())


def test_partial_credit_rewards_the_share() -> None:
    assert score(HiddenTests(partial_credit=True), TWO_PASS, TRUTH) == Reward(2 / 3, {"passed": 2 / 3}, ())
    assert score(HiddenTests(Grading(max_tests=1), partial_credit=True), TWO_PASS, TRUTH) == Reward(
        1.0, {"passed": 1.0}, ()
    )


@pytest.mark.parametrize(
    "ground_truth", [None, "42", {"test_list": []}, ["assert close(f(1), 2)"], {"inputs": [], "outputs": []}]
)
def test_invalid_ground_truths_are_failures(ground_truth: Any) -> None:
    result = score(HiddenTests(), ALL_PASS, ground_truth)
    assert isinstance(result, RewardFailure) and "it raised ValueError: " in result.reason


def test_page_example_runs() -> None:
    page = Path(__file__).parents[3] / "megarl/rewards/SCORERS.md"
    lines = page.read_text(encoding="utf-8").splitlines()
    code = [line.strip() for line in lines if line.startswith("    ") and "HiddenTests" in line]
    names: dict[str, Any] = {}
    exec("\n".join(code), names)
    assert names["mine"].partial_credit and names["mine"].grading == Grading(max_tests=20, seconds=2, total_seconds=20)


def test_scores_concurrently() -> None:
    scorer = HiddenTests()
    scorer.__dict__["_box"] = PlainSandbox()

    async def score_all() -> list[Reward]:
        return await asyncio.gather(
            *(scorer(make_rollout(ALL_PASS if number % 2 else TWO_PASS, TRUTH)) for number in range(8))
        )

    assert [item.reward for item in asyncio.run(score_all())] == [0.0, 1.0] * 4
