"""Parse the test formats of data sets."""

from __future__ import annotations

import base64
import json
import pickle
import zlib
from typing import Any

import numpy as np
import pytest

from megarl.rewards.code.problems import DEFAULT_IMPORTS, AssertionTest, CallTest, Problem, ProgramTest, parse_problem

pytestmark = pytest.mark.alone

PROGRAM_TESTS = (ProgramTest("1\n", "2\n"), ProgramTest("3", "4"))
ADD = {"testtype": "functional", "input": "1\n[2]", "output": "[1, 2]"}
ADD_TEST = CallTest([1, 2], "json", name="add", arguments=(1, [2]))
PACKED_TESTS = base64.b64encode(zlib.compress(pickle.dumps(json.dumps([ADD, ADD])))).decode()


@pytest.mark.parametrize(
    "ground_truth",
    [
        {"inputs": ["1\n", "3"], "outputs": ["2\n", "4"]},
        {"inputs": ["1\n", "3"], "outputs": ["2\n", "4"], "fn_name": None},
        {"inputs": ["1\n", ["3"]], "outputs": ["2\n", ["4"]]},
        {"inputs": ["1\n", 3], "outputs": ["2\n", 4]},
        {"inputs": np.array(["1\n", "3"]), "outputs": np.array(["2\n", "4"])},
        {"input_output": json.dumps({"inputs": ["1\n", "3"], "outputs": ["2\n", "4"]})},
        [{"input": "1\n", "output": "2\n"}, {"input": "3", "output": "4"}],
        [{"input": "1\n", "output": "2\n", "testtype": "stdin"}, {"input": "3", "output": "4", "testtype": "stdin"}],
        {"test_cases": [{"input": "1\n", "output": "2\n"}, {"input": "3", "output": "4"}]},
        {"tests": np.array([{"input": "1\n", "output": "2\n"}, {"input": "3", "output": "4"}])},
        {
            "verification_info": {
                "language": "python",
                "test_cases": [
                    {"type": "stdin_stdout", "input": "1\n", "output": "2\n", "fn_name": None},
                    {"type": "stdin_stdout", "input": "3", "output": "4", "fn_name": None},
                ],
            }
        },
        {
            "public_test_cases": '[{"input": "1\\n", "output": "2\\n", "testtype": "stdin"}]',
            "private_test_cases": '[{"input": "3", "output": "4", "testtype": "stdin"}]',
            "metadata": "{}",
        },
    ],
)
def test_parses_program_tests(ground_truth: Any) -> None:
    assert parse_problem(ground_truth) == Problem(PROGRAM_TESTS)
    if "array" not in repr(ground_truth):
        assert parse_problem(json.dumps(ground_truth)) == Problem(PROGRAM_TESTS)


@pytest.mark.parametrize(
    "ground_truth",
    [
        {"fn_name": "add", "inputs": [[1, [2]], [1, [2]]], "outputs": [[1, 2], [1, 2]]},
        {"fn_name": "Solution().add", "inputs": ["1\n[2]", "1\n[2]\n"], "outputs": ["[1, 2]", "[1, 2]"]},
        {
            "public_test_cases": json.dumps([ADD]),
            "private_test_cases": json.dumps([ADD]),
            "metadata": '{"func_name": "add"}',
        },
        {"private_test_cases": PACKED_TESTS, "metadata": {"func_name": "add"}},
        {"test_cases": [{"type": "function_call", "fn_name": "add", "input": [1, [2]], "output": [1, 2]}] * 2},
        [{**ADD, "metadata": {"func_name": "add"}}] * 2,
    ],
)
def test_parses_function_tests(ground_truth: Any) -> None:
    assert parse_problem(ground_truth) == Problem((ADD_TEST, ADD_TEST), setup=DEFAULT_IMPORTS)


def test_recognizes_packed_expected_values() -> None:
    result = parse_problem({"fn_name": "f", "inputs": [[1], [2]], "outputs": [[5], [6]]})
    assert [item.comparison for item in result.tests if isinstance(item, CallTest)] == ["packed", "packed"]
    result = parse_problem({"fn_name": "f", "inputs": [[1], []], "outputs": [[5], [6, 7]]})
    assert result.tests == (CallTest([5], "json", name="f", arguments=(1,)), CallTest([6, 7], "json", name="f"))


def test_parses_mbpp() -> None:
    row = {
        "task_id": 1,
        "text": "..",
        "code": "..",
        "test_list": ["assert f(1) == 2"],
        "test_setup_code": "",
        "challenge_test_list": [],
    }
    assert parse_problem(row) == Problem((CallTest(2, "equal", "f(1)"),), functions=("f",))
    row = {"test_list": np.array(["assert math.isclose(f(1), 2)"]), "test_imports": np.array(["import math"])}
    assert parse_problem(row).tests == (AssertionTest("assert math.isclose(f(1), 2)"),)
    assert parse_problem(["assert f(1) == 2"]) == parse_problem(json.dumps(["assert f(1) == 2"]))
    assert parse_problem("assert f(1) == 2\n").tests == (CallTest(2, "equal", "f(1)"),)


def test_parses_humaneval() -> None:
    row = {
        "task_id": "HumanEval/0",
        "prompt": "def f(x):\n    ''' .. '''\n",
        "entry_point": "f",
        "canonical_solution": "",
        "test": "def check(candidate):\n    assert candidate(1) == 2\n",
    }
    assert parse_problem(row).tests == (CallTest(2, "equal", "f(1)"),)
    plus = {"task_id": "Mbpp/2", "test_list": [], "test": "x = [1]\nfor one in x:\n    assert f(one) == 2\n"}
    assert len(parse_problem({key: plus[key] for key in ("task_id", "test")}).tests) == 1


def test_selects_evenly_spaced_tests() -> None:
    result = parse_problem({"inputs": list(map(str, range(100))), "outputs": list(map(str, range(100)))})
    assert list(result.select_tests(100)) == list(range(100)) and list(result.select_tests(1000)) == list(range(100))
    assert list(result.select_tests(4)) == [0, 33, 66, 99] and list(result.select_tests(1)) == [0]
    assert result.select_tests(4)[33] == ProgramTest("33", "33") and len(result.select_tests(50)) == 50


@pytest.mark.parametrize(
    ("ground_truth", "message"),
    [
        (None, "the ground truth has no tests in a known format, but null"),
        ("", "the ground truth is empty"),
        ("   ", "the ground truth is empty"),
        (3, "no tests in a known format, but 3"),
        ([], "no tests in a known format, but []"),
        ({}, "the ground truth has the keys []; known are"),
        ({"answer": 3}, 'the ground truth has the keys ["answer"]'),
        ("42", "calls no function of an answer"),
        ("The answer is 42", "its test is not valid Python"),
        ("{'inputs': []}", "the ground truth is not JSON"),
        ("[" * 100_000, "the ground truth is JSON that is too deep"),
        ({"inputs": ["1"], "outputs": []}, "it has 1 inputs and 0 outputs"),
        ({"inputs": [], "outputs": []}, "it has no tests"),
        ({"inputs": "1", "outputs": ["1"]}, "its `inputs` is 1, not a list"),
        ({"inputs": ["1"], "outputs": [None]}, "an output of its tests is null, not a text; is `fn_name` missing?"),
        ({"inputs": [[True]], "outputs": ["1"]}, "an input of its tests is true, not a text; is `fn_name` missing?"),
        ({"inputs": [1], "outputs": ["1"], "fn_name": "f"}, "its input 0 is 1, not a list of arguments"),
        ({"inputs": ["1\nx"], "outputs": ["1"], "fn_name": "f"}, "its test 0 has a line that is not JSON: 'x'"),
        ({"inputs": ["1"], "outputs": ["1"], "fn_name": "f()"}, "'f()' is not a function name"),
        ({"input_output": "[}"}, "the ground truth is not JSON"),
        ({"test_list": "x"}, "its `test_list` is not JSON"),
        ({"test_list": [1]}, "its `test_list` is not a list of assertions"),
        ({"test_list": []}, "it has no tests"),
        ({"test": 3, "entry_point": "f"}, "its `test` is 3, not a text"),
        ({"private_test_cases": "hello!"}, "its `private_test_cases` cannot be read: it is neither JSON nor base64"),
        ({"private_test_cases": "3"}, "its `private_test_cases` cannot be read"),
        ({"private_test_cases": "{}"}, "its `private_test_cases` is not a list of tests, but {}"),
        ({"private_test_cases": ""}, "it has no tests"),
        ({"private_test_cases": json.dumps([ADD])}, "its tests call a function, but its name is missing"),
        ([{"input": "1"}], 'its test 0 has the keys ["input"], not `input` and `output`'),
        ([ADD, {**ADD, "testtype": "stdin"}], "its tests are of several kinds"),
        ([{**ADD, "fn_name": "f"}, {**ADD, "fn_name": "g"}], "its tests are of several kinds"),
    ],
)
def test_refuses_ground_truths_without_tests(ground_truth: Any, message: str) -> None:
    with pytest.raises(ValueError) as error:
        parse_problem(ground_truth)
    assert message in str(error.value)
