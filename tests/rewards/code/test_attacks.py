"""Answers that want a reward and do not have the answer. None gets one, whatever it does to the interpreter it is in.

The secret that is expected is in no box that an answer runs in, so most of these look for what is not there; the others
forge what is taken for data. Each is tried on tests that are taken apart, on judged ones and on programs.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from megarl.rewards.code import GradeResult, Grading

sys.path.insert(0, str(Path(__file__).parent))
from code_attacks import ATTACKS  # noqa: E402
from grading_boxes import KINDS, graded  # noqa: E402

pytestmark = pytest.mark.alone

SECRET = "Zq7-4815162342"
HALVES = SECRET[:4], SECRET[4:]
SHORT = Grading(seconds=1.5, total_seconds=4.0)

CALLS = [f"assert f(3) == {SECRET!r}", f"assert f([4, 2]) == {[SECRET]!r}"]
JUDGED = [
    f"for one in map(f, [3, 4]):\n    assert one.lower() == {SECRET.lower()!r}",
    "assert not abs(f(5) - 815162342.25) > 1e-6",
    "values = [3, 1]\nassert f(values) == sorted(values)[::2] + ['z']",
]
PROGRAMS = {"inputs": ["3\n"], "outputs": [SECRET]}
STYLES = {"calls": (CALLS, 2), "judged": (JUDGED, 3), "programs": (PROGRAMS, 1)}


def test_the_attacks_would_find_it() -> None:
    """The hunts are not idle: each finds the secret where it is there."""
    assert HALVES[0] not in "".join(ATTACKS.values()) and HALVES[1] not in "".join(ATTACKS.values())
    names: dict[str, Any] = {}
    planted = [SECRET]
    exec(ATTACKS["all objects"].replace('__name__ == "__main__"', "False"), names)
    assert names["hunt"]() == SECRET and planted
    exec(ATTACKS["the stack"].replace('__name__ == "__main__"', "False"), names)
    assert names["hunt"]() == SECRET


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("attack", ATTACKS)
def test_an_attack_earns_nothing(attack: str, style: str) -> None:
    """In a real box alone: in a plain process they do harm."""
    truth, tests = STYLES[style]
    assert graded("bubblewrap", ATTACKS[attack], truth, SHORT) == GradeResult(0, tests)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("style", STYLES)
def test_who_has_the_answer_gets_it(style: str, kind: str) -> None:
    """The tests are no harder than that."""
    truth, tests = STYLES[style]
    answer = (
        f"def f(x):\n    if x == 5: return 815162342.25\n    if x == [3, 1]: return [1, 'z']\n"
        f"    return [{SECRET!r}] if isinstance(x, list) else {SECRET!r}\n"
        f"if __name__ == '__main__': print({SECRET!r})"
    )
    assert graded(kind, answer, truth, SHORT) == GradeResult(tests, tests)
