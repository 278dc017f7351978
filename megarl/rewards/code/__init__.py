"""Reward for code: hidden tests, run in the sandbox. `plain`, `answering` and `judging` also run inside boxes."""

from megarl.rewards.code.grading import GradeResult, Grading, HiddenTests, extract_code, grade, hidden_tests
from megarl.rewards.code.problems import parse_problem

__all__ = ["GradeResult", "Grading", "HiddenTests", "extract_code", "grade", "hidden_tests", "parse_problem"]
