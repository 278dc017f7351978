"""How many hidden tests an answer passes. The verdict is computed here, on values that came out of its box.

Programs and calls run in one box, which is told what to run and not what to expect. Judged tests have two: the
answer's, where its functions are called, and the judge's, where the test's text is run; what one asks of the other goes
through here as plain values. A test has passed when its result has come, and is right: no exit status says so, and
nothing that an answer prints, patches or forges is anything else than a result.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Any
from weakref import WeakKeyDictionary

from megarl.config import ConfigError
from megarl.rewards.code import boxed
from megarl.rewards.code.answering import WALL_CLOCK_FACTOR
from megarl.rewards.code.compare import is_correct, matches_output
from megarl.rewards.code.plain import DecodeError, decode, encode
from megarl.rewards.code.problems import AssertionTest, CallTest, Problem, ProgramTest
from megarl.sandbox.box import Interpreter, Sandbox
from megarl.sandbox.results import Limits

_RESULT_BYTES_RANGE = (1 << 16, 1 << 22)
_MAX_OUTPUT_BYTES = 1 << 26
_AGAIN_S = 60.0
_MOST_SEEN = 256
_last_checked: WeakKeyDictionary[Sandbox, dict[str, float]] = (
    WeakKeyDictionary()
)  # when a box was known to work with a setup
_STARTING_S = 2.0
_NAN = re.compile(r"(?i)(?<![a-z])(?:is)?nan(?![a-z])")  # a test that looks for it gets it
_MARK = "\x1emegarl "


@dataclass(frozen=True)
class Grading:
    """How tests are run."""

    max_tests: int = 50
    """Tests of a problem that are run; of more, as many spread evenly over them."""
    seconds: float = 6.0
    """CPU seconds of each test, and up to four times as many on the clock. One that takes longer is the last that is
    run: the others have not passed."""
    total_seconds: float = 30.0
    """Seconds of all tests of an answer together, on the clock, without waiting for a turn."""
    memory_mb: int = 0
    """Of the box; 0 for `sandbox.memory_mb`."""

    def __post_init__(self) -> None:
        if self.max_tests < 1 or not (0 < self.seconds and 0 < self.total_seconds < math.inf) or self.memory_mb < 0:
            raise ConfigError(f"{self}: most must be at least 1, seconds and total above 0, memory_mb not below 0")

    def limits(self, room: int = 1 << 21, given: int = 0) -> Limits:
        """room: bytes of results. given: bytes of the largest input."""
        disk = 64 + (given >> 20)
        return Limits(self.total_seconds + _STARTING_S, self.memory_mb, disk_mb=disk, output_bytes=room)


@dataclass(frozen=True)
class GradeResult:
    """Of one answer."""

    passed: int
    tests: int

    @property
    def pass_rate(self) -> float:
        return self.passed / self.tests


async def grade(code: str, problem: Problem, box: Sandbox, how: Grading = Grading()) -> GradeResult:  # noqa: B008
    """Run the tests on some code, as `answers.extract_code` finds it; none passes where that is empty.

    Raises ConfigError or RuntimeError where there can be no box, and ValueError for tests that are wrong themselves.
    """
    chosen = problem.select_tests(how.max_tests)
    if not code.strip():
        return GradeResult(0, len(chosen))
    sources = [code]
    if problem.code_prefix:
        sources.append(f"{problem.code_prefix}\n{textwrap.indent(textwrap.dedent(code), '    ')}")
    simple = {number: test for number, test in chosen.items() if not isinstance(test, AssertionTest)}
    judged = {number: test for number, test in chosen.items() if isinstance(test, AssertionTest)}
    passed = await _grade_direct(sources, problem, simple, box, how) if simple else 0
    if judged:
        passed += await _grade_assertions(sources, problem, judged, box, how)
    return GradeResult(passed, len(chosen))


async def _grade_direct(
    sources: list[str], problem: Problem, tests: Mapping[int, ProgramTest | CallTest], box: Sandbox, how: Grading
) -> int:
    found = await _run_tests(sources, problem, list(tests.values()), box, how)
    if not found:
        await _check_sandbox(problem.setup, box, how)
    passed = 0
    for place, test in enumerate(tests.values()):
        passed += _has_passed(test, found.get(place))
        await asyncio.sleep(0)  # megabytes take a while, and others wait
    return passed


async def _check_sandbox(before: str, box: Sandbox, how: Grading) -> None:
    """See that something comes of an answer that is known to be right, so that what fails is not taken for a wrong one.

    Asked once in a while. Raises RuntimeError where nothing does, ValueError where that is the fault of `before`.
    """
    seen = _last_checked.setdefault(box, {})
    for given in ("", before):
        if monotonic() - seen.get(given, -math.inf) < _AGAIN_S:
            continue
        known = Problem((), setup=given)
        if not await _run_tests(["def f(): return 1"], known, [CallTest(1, source="f()")], box, how):
            if given:
                raise ValueError("the setup of its tests does not run in the sandbox")
            raise RuntimeError("nothing comes out of the sandbox, not even of a function that is known to be right")
        seen[given] = monotonic()
    if len(seen) > _MOST_SEEN:
        seen.clear()


async def _run_tests(
    sources: list[str], problem: Problem, tests: Sequence[ProgramTest | CallTest], box: Sandbox, how: Grading
) -> Mapping[int, Any]:
    room = _choose_result_bytes(tests)
    job = {
        "kind": "programs" if isinstance(tests[0], ProgramTest) else "calls",
        "sources": sources,
        "before": problem.setup,
        "behind": problem.post_setup,
        "seconds": how.seconds,
        "room": room,
        "tests": [{"number": place, **_request(test)} for place, test in enumerate(tests)],
    }
    harness = boxed.embed_modules("plain", "answering")
    harness += f"{boxed.embed_module_ref('answering')}.main(send, json.load(sys.stdin.buffer))"
    given = max(len(test.stdin.encode(errors="replace")) if isinstance(test, ProgramTest) else 0 for test in tests)
    limits = how.limits(min(_MAX_OUTPUT_BYTES, 2 * room * len(tests) + _RESULT_BYTES_RANGE[0]), given)
    return (await box.run_harness(harness, len(tests), stdin=json.dumps(job).encode(), limits=limits)).results


def _request(test: ProgramTest | CallTest) -> dict[str, Any]:
    """What the box is told of a test: nothing of what is expected."""
    if isinstance(test, ProgramTest):
        return {"stdin": test.stdin}
    if test.source:
        return {"source": test.source}
    return {"name": test.name, "args": [encode(one) for one in test.arguments], "kwargs": {}}


def _choose_result_bytes(tests: Sequence[ProgramTest | CallTest]) -> int:
    """Characters that a test's result may have; the same for all, since "NO" is shorter than "YES"."""
    longest = max(len(test.stdout) if isinstance(test, ProgramTest) else len(repr(test.expected)) for test in tests)
    room = _RESULT_BYTES_RANGE[0]
    while room < 8 * longest and room < _RESULT_BYTES_RANGE[1]:
        room *= 4
    return room


def _has_passed(test: ProgramTest | CallTest, found: Any) -> bool:
    """found: whatever the box has sent, of which nothing is believed but what it is compared with."""
    if not isinstance(found, dict):
        return False
    if isinstance(test, ProgramTest):
        printed = found.get("out")
        well = type(found.get("status")) is int and found["status"] == 0
        return well and isinstance(printed, str) and matches_output(test.stdout, printed)
    if "value" not in found:
        return False
    try:
        return is_correct(test, decode(found["value"]))
    except DecodeError:
        return False


async def _grade_assertions(
    sources: list[str], problem: Problem, tests: Mapping[int, AssertionTest], box: Sandbox, how: Grading
) -> int:
    """Two interpreters, one of the answer and one of the tests. Raises ValueError for a test that is wrong itself."""
    passed = 0
    async with contextlib.AsyncExitStack() as stack:
        judge = await stack.enter_async_context(await box.interpreter(how.limits()))
        answer = await stack.enter_async_context(await box.interpreter(how.limits()))
        turns = _AssertionSession(judge, answer, how)
        if not await turns.load_answer(sources, problem):
            return 0
        for test in tests.values():
            found = await turns.run_test(problem, test)
            if found is None:
                break
            passed += found
    return passed


class _AssertionSession:
    """One asks, the other answers, until the test has ended or the time."""

    def __init__(self, judge: Interpreter, answer: Interpreter, how: Grading) -> None:
        self.test_interpreter, self.answer_interpreter = judge, answer
        self.grading = how
        self.remaining_seconds = how.total_seconds

    async def load_answer(self, sources: list[str], problem: Problem) -> bool:
        """Whether the answer could be loaded."""
        for who, names in (
            (self.test_interpreter, ("plain", "judging")),
            (self.answer_interpreter, ("plain", "answering")),
        ):
            prepared = await who.run(
                boxed.embed_modules(*names), _STARTING_S + WALL_CLOCK_FACTOR * self.grading.seconds
            )
            if not prepared.ok:
                raise RuntimeError(f"an interpreter of the sandbox does not run: {prepared.stderr or prepared.reason}")
        alone = boxed.embed_data({"sources": [""], "before": problem.setup, "behind": ""})
        prepared = await self.answer_interpreter.run(
            f"{boxed.embed_module_ref('answering')}.load(**{alone})", WALL_CLOCK_FACTOR * self.grading.seconds
        )
        if not prepared.ok:
            raise ValueError(f"the setup of its tests does not run in the sandbox: {prepared.stderr[-300:]}")
        given = boxed.embed_data({"sources": sources, "before": problem.setup, "behind": problem.post_setup})
        loaded = await self.answer_interpreter.run(
            f"_megarl = {boxed.embed_module_ref('answering')}.load(**{given})", WALL_CLOCK_FACTOR * self.grading.seconds
        )
        self.remaining_seconds -= loaded.seconds
        return loaded.ok

    async def run_test(self, problem: Problem, test: AssertionTest) -> bool | None:
        """Whether it has passed; None where nothing can be asked any more."""
        nan = _NAN.search(problem.assertion_setup + test.source) is not None
        given = boxed.embed_data(
            {"setup": problem.assertion_setup, "source": test.source, "names": problem.functions, "nan": nan}
        )
        said = await self._evaluate(self.test_interpreter, f"{boxed.embed_module_ref('judging')}.begin(**{given})")
        while said is not None and "passed" not in said:
            asked = {name: said[name] for name in ("name", "args", "kwargs")}
            replied = await self._evaluate(
                self.answer_interpreter,
                f"{boxed.embed_module_ref('answering')}.reply(_megarl, {boxed.embed_data(asked)})",
            )
            reply = boxed.embed_data({"lost": True} if replied is None else replied)
            said = await self._evaluate(self.test_interpreter, f"{boxed.embed_module_ref('judging')}.step({reply})")
            if replied is None:
                return None
        if said is not None and said.get("wrong"):
            raise ValueError(f"{said['wrong']}, in {test.source[:200]!r}")
        return None if said is None else said["passed"] is True

    async def _evaluate(self, who: Interpreter, expression: str) -> dict[str, Any] | None:
        """The line that an expression gives; None where there is no time left, or none came."""
        if self.remaining_seconds <= 0:
            return None
        code = f"print('\\n' + {_MARK!r} + {expression}, flush=True)"
        output = await who.run(code, min(WALL_CLOCK_FACTOR * self.grading.seconds, self.remaining_seconds))
        self.remaining_seconds -= output.seconds
        lines = output.stdout.split(_MARK)
        try:
            found = json.loads(lines[-1]) if output.ok and len(lines) > 1 else None
        except (ValueError, RecursionError):
            return None
        return found if isinstance(found, dict) else None
