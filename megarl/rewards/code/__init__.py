"""Reward for code: hidden tests, run in the sandbox.

    reward: {functions: [megarl.rewards.code:hidden_tests]}

`problems.py` parses the tests of common data sets, `scorer.py` extracts the code, and `grading.py` runs it and compares
the results outside the sandbox, where the expected answers stay. `plain.py`, `answering.py`, and `judging.py` also run
inside boxes.
"""

from megarl.rewards.code.grading import GradeResult, Grading, grade
from megarl.rewards.code.problems import parse_problem
from megarl.rewards.code.scorer import HiddenTests, extract_code, hidden_tests

__all__ = ["GradeResult", "Grading", "HiddenTests", "extract_code", "grade", "hidden_tests", "parse_problem"]
