"""Attacks on the grader earn no reward, whatever they do to the interpreter that runs them.

The expected secret never enters the sandbox of an answer. Some attacks search for it, others forge results. Each runs
against split assertions, whole assertions and programs.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from megarl.rewards.code import GradeResult, Grading

sys.path.insert(0, str(Path(__file__).parent))
from code_attacks import ATTACKS  # noqa: E402
from sandbox_grading import KINDS, grade_code  # noqa: E402

pytestmark = pytest.mark.alone

SECRET = "Zq7-4815162342"
HALVES = SECRET[:4], SECRET[4:]
SHORT = Grading(seconds=1.5, total_seconds=4.0)

CALLS = [f"assert f(3) == {SECRET!r}", f"assert f([4, 2]) == {[SECRET]!r}"]
WHOLE_ASSERTIONS = [
    f"for one in map(f, [3, 4]):\n    assert one.lower() == {SECRET.lower()!r}",
    "assert not abs(f(5) - 815162342.25) > 1e-6",
    "values = [3, 1]\nassert f(values) == sorted(values)[::2] + ['z']",
]
PROGRAMS = {"inputs": ["3\n"], "outputs": [SECRET]}
STYLES = {"calls": (CALLS, 2), "whole assertions": (WHOLE_ASSERTIONS, 3), "programs": (PROGRAMS, 1)}


def test_searches_find_a_planted_secret() -> None:
    """The searches work: they find a secret in this process."""
    assert HALVES[0] not in "".join(ATTACKS.values()) and HALVES[1] not in "".join(ATTACKS.values())
    names: dict[str, Any] = {}
    secrets = [SECRET]
    exec(ATTACKS["all objects"].replace('__name__ == "__main__"', "False"), names)
    assert names["hunt"]() == SECRET and secrets
    exec(ATTACKS["the stack"].replace('__name__ == "__main__"', "False"), names)
    assert names["hunt"]() == SECRET


@pytest.mark.nightly
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("attack", ATTACKS)
def test_attacks_earn_nothing(attack: str, style: str) -> None:
    """Only in a real sandbox, because attacks would harm this machine."""
    ground_truth, tests = STYLES[style]
    assert grade_code("bubblewrap", ATTACKS[attack], ground_truth, SHORT) == GradeResult(0, tests)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("style", STYLES)
def test_correct_answers_pass(style: str, kind: str) -> None:
    ground_truth, tests = STYLES[style]
    answer = (
        f"def f(x):\n    if x == 5: return 815162342.25\n    if x == [3, 1]: return [1, 'z']\n"
        f"    return [{SECRET!r}] if isinstance(x, list) else {SECRET!r}\n"
        f"if __name__ == '__main__': print({SECRET!r})"
    )
    assert grade_code(kind, answer, ground_truth, SHORT) == GradeResult(tests, tests)
