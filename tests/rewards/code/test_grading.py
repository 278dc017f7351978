"""Grade correct, wrong and broken answers in each test format."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest

from megarl.config import ConfigError, SandboxConfig
from megarl.rewards.code import GradeResult, Grading, grade, parse_problem
from megarl.rewards.code.grading import _choose_result_bytes
from megarl.rewards.code.problems import CallTest, ProgramTest
from megarl.sandbox.box import Sandbox
from megarl.sandbox.results import HarnessResult, Output, Result

sys.path.insert(0, str(Path(__file__).parent))
from plain_sandbox import PlainSandbox  # noqa: E402
from sandbox_grading import KINDS, QUICK, grade_code, run_in_sandbox  # noqa: E402

pytestmark = pytest.mark.alone

HUMANEVAL = {
    "prompt": "from typing import List\n\ndef half(x):\n    return x / 2\n\ndef mean(xs: List[float]) -> float:\n"
    '    """Mean"""\n',
    "entry_point": "mean",
    "test": "METADATA = {}\n\ndef check(candidate):\n    assert candidate([2, 4]) == 3\n"
    "    assert abs(candidate([0.1, 0.2]) - 0.15) < 1e-6\n    assert half(candidate([3, 5])) == 2.0\n",
}
HUMANEVAL_LOOP = {
    **HUMANEVAL,
    "test": "import random\ndef check(candidate):\n    for number in range(20):\n"
    "        xs = [random.random() for _ in range(3)]\n"
    "        assert abs(candidate(xs) - sum(xs) / 3) < 1e-9\n",
}
MBPP = {
    "test_list": [
        "assert words('b a') == ['a', 'b']",
        "assert set(words('c b')) == {'b', 'c'}",
        "assert words('') == []",
        "assert not words(' ')",
    ],
    "test_setup_code": "",
    "challenge_test_list": [],
}
TREE = {
    "test_setup_code": "root = Node(1)\nroot.left = Node(2)",
    "test_list": ["assert height(root) == 2", "assert height(Node(3)) == 1"],
}
LEETCODE = {"fn_name": "pair", "inputs": [[[1, 2, 3], 5], [[1], 7]], "outputs": [[1, 2], []]}
APPS = {"input_output": json.dumps({"fn_name": "double", "inputs": [[1], [2]], "outputs": [[2], [4]]})}
LIVECODE = {
    "public_test_cases": json.dumps([{"input": '"ab"\n2', "output": '"abab"', "testtype": "functional"}]),
    "private_test_cases": json.dumps([{"input": '"x"\n3', "output": '"xxx"', "testtype": "functional"}]),
    "metadata": json.dumps({"func_name": "repeat"}),
}
STDIN = {"inputs": ["3\n1 2 3\n", "1\n-5\n", "2\n1 1"], "outputs": ["6\n", "-5", "2\n"]}
FLOATS = [{"input": "1 3", "output": "0.333333", "testtype": "stdin"}]
PYTEST = (
    "from solution import inc\n\ndef test_one():\n    assert inc(1) == 2\n\ndef test_error():\n"
    "    try:\n        inc('a')\n    except TypeError:\n        return\n    assert False\n"
)

MEAN = "def mean(xs):\n    return sum(xs) / len(xs)"
WORDS = "def words(text):\n    return sorted(text.split())"
PAIR = """class Solution:
    def pair(self, nums: List[int], target: int) -> List[int]:
        seen = defaultdict(int)
        for i, x in enumerate(nums):
            if target - x in seen:
                return seen[target - x], i
            seen[x] = i
        return []
"""
SUM = "n = int(input())\nprint(sum(map(int, input().split())))"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("code", "ground_truth", "passed", "tests"),
    [
        (MEAN, HUMANEVAL, 3, 3),
        ("    return sum(xs) / len(xs)", HUMANEVAL, 3, 3),
        ("return sum(xs) / len(xs)\n", HUMANEVAL, 3, 3),
        (HUMANEVAL["prompt"] + "    return half(2 * sum(xs)) / len(xs)", HUMANEVAL, 3, 3),
        ("def mean(xs):\n    return sum(xs) // len(xs)", HUMANEVAL, 2, 3),
        ("def average(xs):\n    return 1", HUMANEVAL, 0, 3),
        (MEAN, HUMANEVAL_LOOP, 1, 1),
        ("def mean(xs):\n    return sum(xs)", HUMANEVAL_LOOP, 0, 1),
        (WORDS, MBPP, 4, 4),
        ("def words(text):\n    return text.split()", MBPP, 3, 4),
        ("def words(text):\n    return tuple(sorted(text.split()))", MBPP, 2, 4),
        ("def words(text):\n    return text.wrong", MBPP, 0, 4),
        ("class Node:\n    def __init__(self, x):\n        self.x, self.left, self.right = x, None, None\n"
         "def height(n):\n    return 1 + max(height(n.left), height(n.right)) if n else 0", TREE, 2, 2),
        (PAIR, LEETCODE, 2, 2),
        (PAIR.replace("return []", "return None"), LEETCODE, 1, 2),
        ("def double(x):\n    return 2 * x", APPS, 2, 2),
        ("def double(x):\n    return [2 * x]", APPS, 2, 2),
        ("def double(x):\n    return x * x + 1", APPS, 1, 2),
        ("def repeat(s, n):\n    print(s)\n    return s * n", LIVECODE, 2, 2),
        (SUM, STDIN, 3, 3),
        ("def main():\n    " + SUM.replace("\n", "\n    ") + "\nif __name__ == '__main__':\n    main()", STDIN, 3, 3),
        ("import sys\nd = sys.stdin.buffer.read().split()\nsys.stdout.write(str(sum(map(int, d[1:]))))\nexit()",
         STDIN, 3, 3),
        ("import threading\ndef main():\n    n = input()\n    print(sum(map(int, input().split())))\n"
         "threading.Thread(target=main).start()", STDIN, 3, 3),
        ("import atexit\n@atexit.register\ndef main():\n    n = input()\n    print(sum(map(int, input().split())))",
         STDIN, 3, 3),
        ("print(6)", STDIN, 1, 3),
        (SUM + "\nraise ValueError", STDIN, 0, 3),
        (SUM + "\nexit(3)", STDIN, 0, 3),
        ("n = int(input())\nx = int(input())\nprint(x)", STDIN, 1, 3),
        ("a, b = map(int, input().split())\nprint(a / b)", FLOATS, 1, 1),
        ("print(0.3334)", FLOATS, 0, 1),
        ("def inc(x):\n    return x + 1", PYTEST, 2, 2),
        ("def inc(x):\n    return 2", PYTEST, 1, 2),
        ("", MBPP, 0, 4),
        ("I do not know.", MBPP, 0, 4),
        ("x = '\ud800'\n" + WORDS, MBPP, 0, 4),
        ("\x00", STDIN, 0, 3),
    ],
)  # fmt: skip
def test_counts_passed_tests(kind: str, code: str, ground_truth: Any, passed: int, tests: int) -> None:
    assert grade_code(kind, code, ground_truth) == GradeResult(passed, tests)


@pytest.mark.parametrize(
    ("code", "passed"),
    [
        ("def f(x):\n    while x > 1: pass\n    return x", 2),
        ("import sys\ndef f(x):\n    return x if x != 2 else sys.exit(0)", 3),
        ("import os\ndef f(x):\n    return x if x != 2 else os._exit(0)", 3),
        ("def f(x):\n    return x if x != 2 else [0] * 10**7", 3),
        ("def f(x):\n    return x if x != 2 else f(x)", 3),
        ("import time\ntime.sleep(100)", 0),
        ("import sys\nsys.exit(0)", 0),
        ("input()\ndef f(x):\n    return x", 0),
    ],
)
def test_a_crash_or_timeout_fails_only_its_test(code: str, passed: int) -> None:
    ground_truth = [f"assert f({number}) == {number}" for number in range(4)]
    short = Grading(seconds=1.0, total_seconds=5.0)
    result = grade_code("bubblewrap", code, ground_truth, short)
    assert result.tests == 4 and (
        result.passed == passed or (passed == 3 and result.passed == 2 and "exit(0)\ndef" in code)
    )


def test_a_crash_in_a_whole_assertion_fails_later_tests() -> None:
    ground_truth = [f"assert abs(f({number}) - {number}) < 1" for number in range(4)]
    short = Grading(seconds=1.0, total_seconds=5.0)
    assert (
        grade_code(
            "bubblewrap", "import os\ndef f(x):\n    return x if x < 2 else os._exit(0)", ground_truth, short
        ).passed
        == 2
    )
    assert grade_code("bubblewrap", "def f(x):\n    while x > 1: pass\n    return x", ground_truth, short).passed == 2
    assert (
        grade_code(
            "bubblewrap", "import sys\ndef f(x):\n    return x if x != 2 else sys.exit(0)", ground_truth, short
        ).passed
        == 3
    )


@pytest.mark.parametrize(
    "settings",
    [{"max_tests": 0}, {"seconds": 0.0}, {"total_seconds": math.inf}, {"total_seconds": math.nan}, {"memory_mb": -1}],
)
def test_refuses_invalid_settings(settings: dict[str, Any]) -> None:
    with pytest.raises(
        ConfigError, match="max_tests must be at least 1, seconds and total_seconds above 0, memory_mb not below 0"
    ):
        Grading(**settings)


def test_time_limit_counts_cpu_seconds() -> None:
    """Waiting does not count: the wall clock may run to four times as many seconds."""
    code = "import time\ndef f(x):\n    time.sleep(3)\n    return x"
    assert grade_code(
        "bubblewrap", code, ["assert f(1) == 1"], Grading(seconds=2.0, total_seconds=20.0)
    ) == GradeResult(1, 1)


@pytest.mark.parametrize("kind", KINDS)
def test_grades_large_input_and_output(kind: str) -> None:
    text = " ".join(map(str, range(200_000)))
    ground_truth = {"inputs": [text, "1 2"], "outputs": [text.replace(" ", "\n"), "1\n2"]}
    code = "import sys\nprint(*sys.stdin.read().split(), sep='\\n')\nprint('x' * 10**6, file=sys.stderr)"
    assert grade_code(kind, code, ground_truth) == GradeResult(2, 2)


def test_max_tests_limits_the_tests() -> None:
    ground_truth = {"inputs": [str(number) for number in range(30)], "outputs": [str(number) for number in range(30)]}
    assert grade_code(
        "plain", "x = input()\nprint(x if x != '29' else 0)", ground_truth, Grading(max_tests=3)
    ) == GradeResult(2, 3)


def test_expected_values_never_enter_the_sandbox() -> None:
    box = PlainSandbox()
    markers = ("7364521", "0.7364522", "'w7364523'", "7364524\n")
    problems = [
        (["assert f(1) == 7364521", "assert f(2) == [7364521]"], markers[0]),
        ({"fn_name": "f", "inputs": [[1]], "outputs": [0.7364522]}, markers[1]),
        ({"fn_name": "f", "inputs": ["1"], "outputs": ['"w7364523"']}, markers[2]),
        ({"inputs": ["1"], "outputs": ["7364524\n"]}, markers[3]),
        (["assert not f(7)", "assert f(1) is True"], "True"),
    ]

    async def grade_all(_: Any) -> None:
        for ground_truth, _mark in problems:
            await grade("def f(x):\n    return x", parse_problem(ground_truth), box, QUICK)

    run_in_sandbox("plain", grade_all)
    jobs = [text for text in box.seen if text.startswith("{")]
    assert len(jobs) == len(problems)
    for job, (_, marker) in zip(jobs, problems, strict=True):
        assert marker.strip("'\n") not in job and "expected" not in job


def test_result_size_reveals_no_expected_value() -> None:
    yes_no = [ProgramTest("1", "YES"), ProgramTest("2", "NO")]
    assert (
        _choose_result_bytes(yes_no) == _choose_result_bytes(yes_no[:1]) == _choose_result_bytes(yes_no[1:]) == 1 << 16
    )
    assert _choose_result_bytes([CallTest("x" * 10_000), CallTest(1)]) == 1 << 18
    assert _choose_result_bytes([ProgramTest("", "x" * 10**8)]) == 1 << 22


@pytest.mark.parametrize(
    ("ground_truth", "message"),
    [
        (["assert abs(f(1) - 1) < 1"], None),
        (
            {"test_list": ["assert abs(f(1) - 1) < 1"], "test_setup_code": "import nowhere"},
            "the setup of its tests fails in the sandbox: ",
        ),
        ({"test_list": ["assert f(1) == 2"], "test_setup_code": "import nowhere"}, "the setup of its tests"),
        (["import nowhere\nassert abs(f(1) - 1) < 1"], "a test raised ModuleNotFoundError: No module named 'nowhere'"),
        (["def g():\n    return f(1)\nassert abs(g) == 1 or True"], None),
        (["def g():\n    return f(1)\nassert g"], "a test called no function of the answer, in 'def g():"),
    ],
)
def test_errors_in_tests_are_not_wrong_answers(ground_truth: Any, message: str | None) -> None:
    if message is None:
        assert grade_code("plain", "def f(x):\n    return x", ground_truth).tests == 1
        return
    with pytest.raises(ValueError) as error:
        grade_code("plain", "def f(x):\n    return x", ground_truth)
    assert message in str(error.value)


class SilentSandbox(PlainSandbox):
    """Return no results."""

    async def run_harness(self, harness: str, count: int, *_: Any, **__: Any) -> HarnessResult:
        return HarnessResult({}, count, Result(False, 1, b"", b"", 0.0, "exit"))


class ForgingSandbox(PlainSandbox):
    """Return the same value for every test."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value

    async def run_harness(self, harness: str, count: int, *_: Any, **__: Any) -> HarnessResult:
        return HarnessResult(dict.fromkeys(range(count), self.value), count, Result(True, 0, b"", b"", 0.0))


def test_a_broken_sandbox_is_an_error() -> None:
    async def grade_once(_: Any) -> GradeResult:
        return await grade("def f(x): return x", parse_problem(["assert f(1) == 1"]), SilentSandbox())

    with pytest.raises(RuntimeError, match="the sandbox returns nothing"):
        run_in_sandbox("plain", grade_once)


def test_a_sandbox_service_cannot_run_whole_assertions() -> None:
    async def grade_once(_: Any) -> GradeResult:
        box = Sandbox(SandboxConfig(backend="http://127.0.0.1:9"))
        return await grade("def f(x): return x", parse_problem(["assert abs(f(1)) == 1"]), box)

    with pytest.raises(ConfigError, match="keeps no state between calls"):
        run_in_sandbox("plain", grade_once)


DEEP: Any = 1
for _ in range(500):
    DEEP = ["list", DEEP]
FORGERIES = [
    None,
    True,
    "passed",
    1,
    [],
    {"passed": True},
    {"value": True},
    {"value": ["opaque", "True"]},
    {"value": ["float", "nan"]},
    {"value": ["iterator", 17]},
    {"value": ["set", *[["float", "nan"]] * 50]},
    {"value": DEEP},
    {"value": {"expected": 17}},
    {"value": math.nan},
    {"value": ["list"], "status": 0, "out": ""},
    {"out": "", "status": False},
    {"out": ["17"], "status": 0},
    {"out": 17, "status": 0},
    {"out": "17", "status": 0.0},
    {"out": "17"},
    {"late": False},
]


@pytest.mark.parametrize(
    "ground_truth", [["assert f(3) == 17"], ["assert f(3) is False"], {"inputs": ["3"], "outputs": ["17"]}]
)
@pytest.mark.parametrize("value", FORGERIES, ids=range(len(FORGERIES)))
def test_forged_results_fail(ground_truth: Any, value: Any) -> None:
    async def grade_once(_: Any) -> GradeResult:
        return await grade("x", parse_problem(ground_truth), ForgingSandbox(value))

    assert run_in_sandbox("plain", grade_once) == GradeResult(0, 1)


class ForgedSession:
    """An interpreter session that prints forged output."""

    def __init__(self, stdout: Any) -> None:
        self.stdout = stdout

    async def run(self, code: str, seconds: float | None = None) -> Output:
        return Output(True, self.stdout, "", 0.1)

    async def __aenter__(self) -> ForgedSession:
        return self

    async def __aexit__(self, *_: object) -> None: ...


@pytest.mark.parametrize(
    "stdout",
    [
        "",
        "\x1emegarl ",
        "\x1emegarl {",
        "\x1emegarl []",
        "\x1emegarl {}",
        '\x1emegarl {"passed": true}',
        '\x1emegarl {"value": ["opaque", "x"]}',
        '\x1emegarl {"value": ["float", "NaN"]}',
        '\x1emegarl {"raised": "StopIteration"}',
        '\x1emegarl {"raised": 3}',
        "\x1emegarl " + "[" * 100_000,
        '\x1emegarl {"value": 1e999}',
    ],
)
def test_forged_interpreter_output_fails(stdout: str) -> None:
    class ForgingInterpreter(PlainSandbox):
        sessions = 0

        async def interpreter(self, *_: Any, **__: Any) -> Any:
            self.sessions += 1
            return ForgedSession(stdout) if self.sessions == 2 else await super().interpreter()

    async def grade_once(_: Any) -> GradeResult:
        return await grade("x", parse_problem(["assert not abs(f(1) - 17) > 1e-6"]), ForgingInterpreter())

    assert run_in_sandbox("plain", grade_once) == GradeResult(0, 1)
