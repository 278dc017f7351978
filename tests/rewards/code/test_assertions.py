"""Split assertions into a call and an expected value, or keep them whole for the sandbox."""

from __future__ import annotations

import ast
from typing import Any

import pytest

from megarl.rewards.code.problems import (
    AssertionTest,
    CallTest,
    extract_call,
    parse_humaneval,
    parse_statements,
    parse_test_module,
)

pytestmark = pytest.mark.alone


@pytest.mark.parametrize(
    ("source", "call"),
    [
        ("assert f(1) == 2", CallTest(2, "equal", "f(1)")),
        ("assert f(1) == 2, 'no'", CallTest(2, "equal", "f(1)")),
        ("assert 2 == f(1)", CallTest(2, "equal", "f(1)")),
        (
            "assert (f([1, 'a'], key=-1)) == (1, [2.5], {'x'})",
            CallTest((1, [2.5], {"x"}), "equal", "f([1, 'a'], key=-1)"),
        ),
        ("assert f(f(1)) == {'a': None}", CallTest({"a": None}, "equal", "f(f(1))")),
        ("assert f([Pair(1, 2)]) == 3", CallTest(3, "equal", "f([Pair(1, 2)])")),
        ("assert f(1) is True", CallTest(True, "is", "f(1)")),
        ("assert f(1) is None", CallTest(None, "is", "f(1)")),
        ("assert f(1)", CallTest(None, "true", "f(1)")),
        ("assert not f(1)", CallTest(None, "false", "f(1)")),
    ],
)
def test_splits_assertions_into_call_and_value(source: str, call: CallTest) -> None:
    (statement,) = ast.parse(source).body
    assert extract_call(statement, {"f", "Pair"}) == call


@pytest.mark.parametrize(
    "source",
    [
        "assert abs(f(1) - 2) < 1e-6",
        "assert math.isclose(f(1), 2.5)",
        "assert f(1) == f(2)",
        "assert f(1) != 2",
        "assert f(1) is 2",
        "assert f(1) == 2 == 2",
        "assert f(1) == [2] * 3",
        "assert f(1) == 2 or f(1) == 3",
        "assert set(f(1)) == {2}",
        "assert f(1)[0] == 2",
        "assert f(1).x == 2",
        "assert len(f(1)) == 2",
        "assert f(1) in [2, 3]",
        "assert 1 == 1",
        "x = f(1)",
    ],
)
def test_keeps_other_assertions_whole(source: str) -> None:
    (statement,) = ast.parse(source).body
    assert extract_call(statement, {"f"}) is None


def test_parses_lists_of_assertions() -> None:
    result = parse_statements(["assert f(1) == 2", "assert math.isclose(f(2), 3)"], "import os\nlimit = 3")
    assert result.tests == (CallTest(2, "equal", "f(1)"), AssertionTest("assert math.isclose(f(2), 3)"))
    assert result.functions == ("f",) and result.assertion_setup == result.setup == "import math\nimport os\nlimit = 3"
    assert result.post_setup == result.code_prefix == ""


def test_runs_setup_that_needs_the_answer_after_it() -> None:
    result = parse_statements(["assert height(root) == 2"], "root = Node(1)\nroot.left = Node(2)")
    assert result.setup == "" and result.post_setup == "root = Node(1)\nroot.left = Node(2)"
    assert result.tests == (CallTest(2, "equal", "height(root)"),)


def test_allows_undefined_names_inside_calls() -> None:
    result = parse_statements(["assert f([Pair(1, 2)])", "assert third(f(1), 2) == 3.5"])
    assert result.tests == (CallTest(None, "true", "f([Pair(1, 2)])"), CallTest(3.5, "equal", "third(f(1), 2)"))


PROMPT = '''
import math

def helper(x):
    return math.floor(x)

def inc(x: int) -> int:
    """ Add one. """
'''


def parse_check(body: str, entry: str = "inc", prompt: str = PROMPT) -> Any:
    lines = "\n".join(f"    {line}" for line in body.splitlines())
    return parse_humaneval(f"METADATA = {{'a': 1}}\n\ndef check(candidate):\n{lines}\n\ncheck(inc)\n", entry, prompt)


def test_splits_humaneval_assertions() -> None:
    result = parse_check(
        '"""docs"""\nassert candidate(1) == 2, "no"\nassert True, "x"\nassert helper(candidate(2)) == 3\npass'
    )
    assert result.tests == (CallTest(2, "equal", "inc(1)"), AssertionTest("assert helper(inc(2)) == 3"))
    assert result.functions == ("inc",) and result.code_prefix == PROMPT
    assert "def helper" in result.setup and "def inc" not in result.setup and "METADATA" not in result.setup
    assert (
        "def helper" in result.assertion_setup
        and "METADATA" in result.assertion_setup
        and "def inc" not in result.assertion_setup
    )
    assert "check" not in result.assertion_setup


def test_keeps_humaneval_loops_whole() -> None:
    result = parse_check("for i in range(3):\n    assert candidate(i) == i + 1\nassert candidate(9) == 10")
    (test,) = result.tests
    assert (
        isinstance(test, AssertionTest) and test.source.startswith("def check():") and test.source.endswith("\ncheck()")
    )
    assert "candidate" not in test.source and test.source.count("inc(") == 2


def test_keeps_calls_with_metadata_arguments_whole() -> None:
    result = parse_check("assert candidate(METADATA['a']) == 2")
    assert result.tests == (AssertionTest("assert inc(METADATA['a']) == 2"),)


def test_parses_test_modules() -> None:
    result = parse_test_module("import os\nassert f(1) == 2\nassert f(2) == 3\n")
    assert (
        result.tests == (CallTest(2, "equal", "f(1)"), CallTest(3, "equal", "f(2)"))
        and result.assertion_setup == "import os"
    )
    result = parse_test_module("values = [1, 2]\nfor one in values:\n    assert f(one) == one + 1\n")
    assert len(result.tests) == 1 and isinstance(result.tests[0], AssertionTest) and result.functions == ("f",)
    result = parse_test_module(
        "from solution import f, g\nimport math\n\ndef test_a():\n    assert f(1) == 2\n\n"
        "def test_b():\n    x = g(1)\n    assert math.sqrt(x) == f(x)\n"
    )
    assert result.tests[0] == CallTest(2, "equal", "f(1)") and result.functions == ("f", "g")
    assert result.tests[1] == AssertionTest("def test_b():\n    x = g(1)\n    assert math.sqrt(x) == f(x)\ntest_b()")
    assert result.setup == "" and result.assertion_setup == "import math"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: parse_statements(["assert f(1) =="]), "its test 'assert f(1) ==' is not valid Python: "),
        (lambda: parse_statements(["assert 1 == 1"]), "its test 'assert 1 == 1' calls no function of an answer"),
        (lambda: parse_statements(["assert True"]), "calls no function of an answer"),
        (lambda: parse_statements([]), "it has no tests"),
        (lambda: parse_statements(["assert f(1) == 1"], "def"), "its setup is not valid Python"),
        (lambda: parse_statements(["assert close(f(1), 2)"]), "uses close, f, which nothing defines"),
        (lambda: parse_statements(["assert close(f(1), 2) == True"]), "uses close, f, which nothing defines"),
        (lambda: parse_statements(["assert close(f(1), 2) is None"]), "uses close, f, which nothing defines"),
        (lambda: parse_statements(["assert abs(f(1) - LIMIT) < 1"]), "uses LIMIT, f, which nothing defines"),
        (
            lambda: parse_test_module("from solution import f\nassert close(f(1), 2)"),
            "uses close, which nothing defines",
        ),
        (
            lambda: parse_test_module("def test_a(x):\n    assert f(x)"),
            "its test test_a takes x, which is not provided",
        ),
        (lambda: parse_test_module("x = 1"), "calls no function of an answer"),
        (lambda: parse_humaneval("def verify(f): pass", "f", ""), "its `test` defines no function check(candidate)"),
        (lambda: parse_humaneval("def check(): pass", "f", ""), "its `test` defines no function check(candidate)"),
        (lambda: parse_check("assert candidate(1) == 2", "a b"), "its `entry_point` 'a b' is not a function name"),
        (lambda: parse_check("assert candidate(1) == 2", "inc", "def"), "its `prompt` is not valid Python"),
        (lambda: parse_check("assert tolerant(candidate(1), 2)"), "uses tolerant, which nothing defines"),
        (lambda: parse_check("pass"), "it has no tests"),
    ],
)
def test_refuses_problems_without_valid_tests(make: Any, message: str) -> None:
    with pytest.raises(ValueError) as error:
        make()
    assert message in str(error.value)
