"""A reward for code: hidden tests, run in the sandbox.

    reward: {functions: [megarl.rewards.code:hidden_tests]}

`problems.py` reads the tests of the usual data sets, `scorer.py` finds the code; `grading.py` runs it and compares what
came out here, where the expected answers stay. `plain.py`, `answering.py` and `judging.py` run in boxes, too. May
import `sandbox/` and what rewards may.
"""

from megarl.rewards.code.grading import Graded, Grading, grade
from megarl.rewards.code.problems import problem_of
from megarl.rewards.code.scorer import HiddenTests, code_of, hidden_tests

__all__ = ["Graded", "Grading", "HiddenTests", "code_of", "grade", "hidden_tests", "problem_of"]
