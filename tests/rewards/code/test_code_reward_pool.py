"""Grade answers end to end: reward processes, the sandbox and tests in data set formats."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

from megarl.rewards.functions import load_functions
from megarl.rewards.reward_pool import RewardPool
from megarl.types.reward_values import Reward, RewardFailure

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
from answer_rollouts import make_rollout  # noqa: E402
from code_attacks import ATTACKS  # noqa: E402
from sandbox_grading import run_in_sandbox  # noqa: E402

pytestmark = pytest.mark.alone

NAMES = ["megarl.rewards.code:hidden_tests", "megarl.rewards.by_source:by_source"]
PROGRAMS = {"inputs": ["3\n", "40 2\n"], "outputs": ["3", "42"]}
WHOLE_ASSERTIONS = {"test_list": ["assert f(1) == 1", "assert abs(f(2.5) - 2.5) < 1e-9"]}


async def do_nothing(_: object) -> None: ...


@pytest.mark.skipif(shutil.which("bwrap") is None, reason="this machine has no bubblewrap")
def test_grades_answers_in_reward_processes(tmp_path: Path) -> None:
    run_in_sandbox("bubblewrap", do_nothing)  # skips the test if this machine has no sandbox
    solution = "```python\nprint(sum(map(int, input().split())))\n```"
    cases = [
        (solution, PROGRAMS, Reward(1.0, {"passed": 1.0})),
        ("```python\nprint(3)\n```", PROGRAMS, Reward(0.0, {"passed": 0.5})),
        ("```python\ndef f(x): return x\n```", json.dumps(WHOLE_ASSERTIONS), Reward(1.0, {"passed": 1.0})),
        ("```python\ndef f(x): return int(x)\n```", WHOLE_ASSERTIONS, Reward(0.0, {"passed": 0.5})),
        (f"```python\n{ATTACKS['os._exit at once']}\n```", WHOLE_ASSERTIONS, Reward(0.0, {"passed": 0.0})),
        (f"```python\n{ATTACKS['always equal, a number']}\n```", WHOLE_ASSERTIONS, Reward(0.0, {"passed": 0.0})),
        ("I do not know.", PROGRAMS, Reward(0.0, {"passed": 0.0})),
    ]
    pool = RewardPool(load_functions(NAMES), NAMES, 120.0, 2, tmp_path / "logs/rewards_0.log")
    try:
        futures = [
            pool.submit(make_rollout(answer, ground_truth, "taco"))
            for answer, ground_truth, _ in cases
            for _ in range(2)
        ]
        result = [item.result(300) for item in futures]
        invalid = pool.submit(make_rollout(solution, "42", "taco")).result(300)
    finally:
        pool.close()
    expected = [reward for *_, reward in cases for _ in range(2)]
    for name in ("hidden_tests", "by_source"):
        assert [Reward(item[name].reward, dict(item[name].parts)) for item in result] == expected
        assert isinstance(invalid[name], RewardFailure) and "calls no function of an answer" in invalid[name].reason
