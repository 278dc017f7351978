"""Reward for code: hidden tests, run in the sandbox.

    reward: {functions: [megarl.rewards.code:hidden_tests]}

`problems.py` parses the tests of common data sets. `grading.py` extracts the code, runs it, and compares the results
outside the sandbox, where the expected answers stay. `plain.py`, `answering.py`, and `judging.py` also run inside
boxes.
"""

from megarl.rewards.code.grading import GradeResult, Grading, HiddenTests, extract_code, grade, hidden_tests
from megarl.rewards.code.problems import parse_problem

__all__ = ["GradeResult", "Grading", "HiddenTests", "extract_code", "grade", "hidden_tests", "parse_problem"]
