"""Reward function for code: extract the code from an answer and count the hidden tests that it passes.

Program and call tests run in one box, which receives the inputs but not the expected values. Assertion tests use two
boxes, one for the answer's functions and one for the test's text. A test passes only if its result arrives and is
correct: an exit status proves nothing, and whatever an answer prints, patches, or forges is just a result.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import cache, cached_property
from pathlib import Path
from time import monotonic
from typing import Any
from weakref import WeakKeyDictionary

from megarl.config import ConfigError
from megarl.rewards.code.answering import WALL_CLOCK_FACTOR
from megarl.rewards.code.plain import DecodeError, Opaque, decode, encode
from megarl.rewards.code.problems import AssertionTest, CallTest, Problem, ProgramTest, parse_problem
from megarl.rewards.stated_answer import extract_answer
from megarl.sandbox.box import Interpreter, Sandbox
from megarl.sandbox.results import Limits
from megarl.types import Prompt, Rollout
from megarl.types.reward_values import Reward

_RESULT_BYTES = (1 << 16, 1 << 18, 1 << 20, 1 << 22)
_MAX_OUTPUT_BYTES = 1 << 26
_AGAIN_S = 60.0
_MAX_REMEMBERED = 256
_last_checked: WeakKeyDictionary[Sandbox, dict[str, float]] = WeakKeyDictionary()  # when a setup last worked in a box
_STARTING_S = 2.0
_NAN = re.compile(r"(?i)(?<![a-z])(?:is)?nan(?![a-z])")  # a test that mentions NaN receives it
_MARK = "\x1emegarl "


@dataclass(frozen=True)
class Grading:
    """Settings of a grading run."""

    max_tests: int = 50
    """Maximum tests per problem; a larger problem is sampled evenly."""
    seconds: float = 6.0
    """CPU seconds per test, with up to four times as many on the wall clock. The first test that exceeds them is the
    last that runs; the remaining ones count as failed."""
    total_seconds: float = 30.0
    """Wall-clock seconds for all tests of an answer, without waiting for a free box."""
    memory_mb: int = 0
    """Memory of the box in MiB; 0 for `sandbox.memory_mb`."""

    def __post_init__(self) -> None:
        if self.max_tests < 1 or not (0 < self.seconds and 0 < self.total_seconds < math.inf) or self.memory_mb < 0:
            bounds = "max_tests must be at least 1, seconds and total_seconds above 0, memory_mb not below 0"
            raise ConfigError(f"{self}: {bounds}")

    def limits(self, output_bytes: int = 1 << 21, input_bytes: int = 0) -> Limits:
        """Return a box's limits. output_bytes: of all results. input_bytes: of the largest input."""
        disk_mb = 64 + (input_bytes >> 20)
        return Limits(self.total_seconds + _STARTING_S, self.memory_mb, disk_mb=disk_mb, output_bytes=output_bytes)


@dataclass(frozen=True)
class GradeResult:
    """Number of tests passed by one answer."""

    passed: int
    tests: int

    @property
    def pass_rate(self) -> float:
        return self.passed / self.tests


async def grade(code: str, problem: Problem, box: Sandbox, grading: Grading = Grading()) -> GradeResult:  # noqa: B008
    """Run the tests of a problem on code from `extract_code`. Raises ConfigError or RuntimeError if there is no working
    sandbox, and ValueError for invalid tests."""
    selected = problem.select_tests(grading.max_tests)
    if not code.strip():
        return GradeResult(0, len(selected))
    sources = [code]
    if problem.code_prefix:
        sources.append(f"{problem.code_prefix}\n{textwrap.indent(textwrap.dedent(code), '    ')}")
    direct = [test for test in selected.values() if not isinstance(test, AssertionTest)]
    assertions = [test for test in selected.values() if isinstance(test, AssertionTest)]
    passed = 0
    if direct:
        results = await _run_tests(sources, problem, direct, box, grading)
        if not results:
            await _check_sandbox(problem.setup, box, grading)
        for index, test in enumerate(direct):
            passed += _has_passed(test, results.get(index))
            await asyncio.sleep(0)  # comparing megabytes takes a while: let other tasks run
    if assertions:
        limits = grading.limits()
        async with await box.interpreter(limits) as judge, await box.interpreter(limits) as answer:
            passed += await _AssertionSession(judge, answer, grading).run(sources, problem, assertions)
    return GradeResult(passed, len(selected))


async def _check_sandbox(problem_setup: str, box: Sandbox, grading: Grading) -> None:
    """Raise RuntimeError if the sandbox is broken, rather than the answer wrong, or ValueError if the setup is.

    Runs a known-correct answer, at most once per minute and setup.
    """
    last_checked = _last_checked.setdefault(box, {})
    for setup in ("", problem_setup):
        if monotonic() - last_checked.get(setup, -math.inf) < _AGAIN_S:
            continue
        trivial_problem = Problem((), setup=setup)
        if not await _run_tests(["def f(): return 1"], trivial_problem, [CallTest(1, source="f()")], box, grading):
            if setup:
                raise ValueError("the setup of its tests fails in the sandbox")
            raise RuntimeError("the sandbox returns nothing, even for a function known to be right")
        last_checked[setup] = monotonic()
    if len(last_checked) > _MAX_REMEMBERED:
        last_checked.clear()


async def _run_tests(
    sources: list[str], problem: Problem, tests: Sequence[ProgramTest | CallTest], box: Sandbox, grading: Grading
) -> Mapping[int, Any]:
    result_bytes = _choose_result_bytes(tests)
    job = {
        "kind": "programs" if isinstance(tests[0], ProgramTest) else "calls",
        "sources": sources,
        "setup": problem.setup,
        "post_setup": problem.post_setup,
        "seconds": grading.seconds,
        "max_bytes": result_bytes,
        "tests": [{"number": index, **_request(test)} for index, test in enumerate(tests)],
    }
    harness = embed_modules("plain", "answering")
    harness += f"{embed_module_ref('answering')}.main(send, json.load(sys.stdin.buffer))"
    input_bytes = max(
        len(test.stdin.encode(errors="replace") if isinstance(test, ProgramTest) else b"") for test in tests
    )
    limits = grading.limits(min(_MAX_OUTPUT_BYTES, 2 * result_bytes * len(tests) + _RESULT_BYTES[0]), input_bytes)
    return (await box.run_harness(harness, len(tests), stdin=json.dumps(job).encode(), limits=limits)).results


def _request(test: ProgramTest | CallTest) -> dict[str, Any]:
    """Return what the box is told of a test, which includes nothing expected."""
    if isinstance(test, ProgramTest):
        return {"stdin": test.stdin}
    if test.source:
        return {"source": test.source}
    return {"name": test.name, "args": [encode(argument) for argument in test.arguments], "kwargs": {}}


def _choose_result_bytes(tests: Sequence[ProgramTest | CallTest]) -> int:
    """Return the size limit of a result: the same for all tests, because a size could give away an answer ("NO")."""
    longest = max(len(test.stdout) if isinstance(test, ProgramTest) else len(repr(test.expected)) for test in tests)
    return next((size for size in _RESULT_BYTES if size >= 8 * longest), _RESULT_BYTES[-1])


def _has_passed(test: ProgramTest | CallTest, outcome: Any) -> bool:
    """Compare a result, arbitrary data from the box, with the expectation."""
    if not isinstance(outcome, dict):
        return False
    if isinstance(test, ProgramTest):
        printed = outcome.get("out")
        exited_cleanly = type(outcome.get("status")) is int and outcome["status"] == 0
        return exited_cleanly and isinstance(printed, str) and matches_output(test.stdout, printed)
    try:
        return "value" in outcome and is_correct(test, decode(outcome["value"]))
    except DecodeError:
        return False


class _AssertionSession:
    """Relays calls between tests and an answer, which run in two interpreters, until the tests or the time end."""

    def __init__(self, test_interpreter: Interpreter, answer_interpreter: Interpreter, grading: Grading) -> None:
        self.test_interpreter, self.answer_interpreter = test_interpreter, answer_interpreter
        self.call_seconds = WALL_CLOCK_FACTOR * grading.seconds
        self.remaining_seconds = grading.total_seconds

    async def run(self, sources: list[str], problem: Problem, tests: Sequence[AssertionTest]) -> int:
        """Load the answer, run the tests, and return how many have passed. Raises ValueError for an invalid test."""
        for interpreter, name in ((self.test_interpreter, "judging"), (self.answer_interpreter, "answering")):
            prepared = await interpreter.run(embed_modules("plain", name), _STARTING_S + self.call_seconds)
            if not prepared.ok:
                raise RuntimeError(f"the sandbox's interpreter does not start: {prepared.stderr or prepared.reason}")
        load = f"{embed_module_ref('answering')}.load"
        setup_data = embed_data({"sources": [""], "setup": problem.setup, "post_setup": ""})
        prepared = await self.answer_interpreter.run(f"{load}(**{setup_data})", self.call_seconds)
        if not prepared.ok:
            raise ValueError(f"the setup of its tests fails in the sandbox: {prepared.stderr[-300:]}")
        answer_data = embed_data({"sources": sources, "setup": problem.setup, "post_setup": problem.post_setup})
        loaded = await self.answer_interpreter.run(f"_megarl = {load}(**{answer_data})", self.call_seconds)
        self.remaining_seconds -= loaded.seconds
        num_passed = 0
        for test in tests if loaded.ok else ():
            is_passed = await self._run_test(problem, test)
            if is_passed is None:
                break
            num_passed += is_passed
        return num_passed

    async def _run_test(self, problem: Problem, test: AssertionTest) -> bool | None:
        """Run a test. Returns whether it passed, or None if no further test can run."""
        judging, answering = embed_module_ref("judging"), embed_module_ref("answering")
        allow_nan = _NAN.search(problem.assertion_setup + test.source) is not None
        arguments = {"setup": problem.assertion_setup, "source": test.source, "names": problem.functions}
        test_data = embed_data({**arguments, "allow_nan": allow_nan})
        message = await self._evaluate(self.test_interpreter, f"{judging}.begin(**{test_data})")
        while message is not None and "passed" not in message:
            call = embed_data({name: message[name] for name in ("name", "args", "kwargs")})
            outcome = await self._evaluate(self.answer_interpreter, f"{answering}.reply(_megarl, {call})")
            reply = embed_data({"lost": True} if outcome is None else outcome)
            message = await self._evaluate(self.test_interpreter, f"{judging}.step({reply})")
            if outcome is None:
                return None
        if message is not None and message.get("wrong"):
            raise ValueError(f"{message['wrong']}, in {test.source[:200]!r}")
        return None if message is None else message["passed"] is True

    async def _evaluate(self, interpreter: Interpreter, expression: str) -> dict[str, Any] | None:
        """Return the message that an expression yields, or None if time has run out or none arrived."""
        if self.remaining_seconds <= 0:
            return None
        code = f"print('\\n' + {_MARK!r} + {expression}, flush=True)"
        output = await interpreter.run(code, min(self.call_seconds, self.remaining_seconds))
        self.remaining_seconds -= output.seconds
        try:
            message = json.loads(output.stdout.rpartition(_MARK)[2]) if output.ok and _MARK in output.stdout else None
        except (ValueError, RecursionError):
            return None
        return message if isinstance(message, dict) else None


_PACKAGE = __name__.rpartition(".")[0]


@cache
def embed_modules(*names: str) -> str:
    """Return Python source that makes these modules of this folder importable under their full names."""
    parts = ["import json, sys, types"]
    for name in names:
        source = Path(__file__).with_name(f"{name}.py").read_text(encoding="utf-8")
        full = f"{_PACKAGE}.{name}"
        parts += [
            f"module = sys.modules[{full!r}] = types.ModuleType({full!r})",
            f"exec(compile({source!r}, {full!r}, 'exec'), module.__dict__)",
        ]
    return "\n".join(parts) + "\n"


def embed_module_ref(name: str) -> str:
    """Return an expression for the module that still works if the answer has rebound names."""
    return f"__import__('sys').modules[{f'{_PACKAGE}.{name}'!r}]"


def embed_data(value: Mapping[str, Any]) -> str:
    """Return an expression for a value: JSON in a Python string literal, ASCII only."""
    return f"__import__('json').loads({json.dumps(value)!r})"


TOLERANCE = 1e-6
"""Tolerance for an expected float: relative to its magnitude, absolute below 1."""
_NUMBER = re.compile(r"[+-]?(?:\d{1,400}\.?\d{0,400}|\.\d{1,400})(?:[eE][+-]?\d{1,3})?", re.ASCII)
_INTEGER = re.compile(r"[+-]?\d+", re.ASCII)


def is_correct(test: CallTest, value: Any) -> bool:
    """Return whether a value from `decode` is the expected one. NaN never is."""
    try:
        if isinstance(value, Opaque):
            return False
        if test.comparison == "json":
            return matches_json(test.expected, value)
        if test.comparison == "packed":
            return matches_json(test.expected, value) or matches_json(test.expected[0], value)
        if test.comparison == "is":
            return type(value) is type(test.expected) and bool(value == test.expected)
        if test.comparison == "equal":
            return bool(value == test.expected)
        return not hasattr(value, "__next__") and bool(value) is (test.comparison == "true")
    except (TypeError, ValueError, RecursionError, OverflowError):  # an opaque value inside a container
        return False


def matches_json(expected: Any, value: Any) -> bool:
    """Compare as JSON would serialize the value: tuples are lists, keys are strings. Floats have a tolerance."""
    if isinstance(expected, float) and not isinstance(value, bool) and isinstance(value, int | float):
        return is_close(expected, value)
    if isinstance(expected, list):
        if not isinstance(value, list | tuple) or len(value) != len(expected):
            return False
        return all(matches_json(item, other) for item, other in zip(expected, value, strict=True))
    if isinstance(expected, dict):
        if not isinstance(value, dict) or len(value) != len(expected):
            return False
        named = {_key(key): item for key, item in value.items()}
        return named.keys() == expected.keys() and all(matches_json(item, named[key]) for key, item in expected.items())
    return bool(value == expected)


def _key(key: Any) -> Any:
    """Return a dict key as JSON writes it."""
    if key is None or (isinstance(key, int) and key.bit_length() < 10_000):
        return json.dumps(key)
    return repr(key) if isinstance(key, float) else key


def is_close(expected: float, value: float) -> bool:
    """Compare within `TOLERANCE`. Infinities only equal each other; NaN equals nothing."""
    try:
        return math.isclose(expected, value, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
    except OverflowError:  # an integer too large for a float
        return False


def matches_output(expected: str, printed: str) -> bool:
    """Compare line by line, ignoring trailing spaces and trailing empty lines, else word by word.

    Numbers with a point compare by value: with a tolerance if one is expected, exactly against an expected integer.
    """
    expected_lines, printed_lines = _lines(expected), _lines(printed)
    if expected_lines == printed_lines:
        return True
    if len(expected_lines) != len(printed_lines):
        return False
    lines = [
        (expected.split(), printed.split()) for expected, printed in zip(expected_lines, printed_lines, strict=True)
    ]
    return all(len(expected) == len(printed) and all(map(_same_word, expected, printed)) for expected, printed in lines)


def _lines(text: str) -> list[str]:
    return "\n".join(line.rstrip() for line in text.split("\n")).rstrip("\n").split("\n")


def _same_word(expected: str, printed: str) -> bool:
    if expected == printed:
        return True
    if not _NUMBER.fullmatch(printed) or _INTEGER.fullmatch(printed) and _INTEGER.fullmatch(expected):
        return False
    if _INTEGER.fullmatch(expected):
        return Decimal(expected) == Decimal(printed)
    return bool(_NUMBER.fullmatch(expected)) and is_close(float(expected), float(printed))


MAX_CODE_CHARS = 200_000
"""Maximum characters of code."""
_FENCE = "```"
_TAG = re.compile(r"[ \t]*([\w+#.-]{0,20})[ \t]*(?:\{[^}\n]{0,80}\})?[ \t]*\r?", re.ASCII)
_MAX_TAG_CHARS = 120
_END = re.compile(r"^[ \t]{0,12}```", re.MULTILINE)
_PYTHON = ("python", "py", "python3")


def extract_code(answer: str) -> str:
    """Return the code of an answer, dedented; empty if there is none or it exceeds MAX_CODE_CHARS characters.

    Prefers the last fenced block marked as Python, then the last unmarked block, then the last block; without blocks,
    the content of the `<answer>` tags, or the whole answer. An unclosed block extends to the end. Text before
    `</think>` is ignored.
    """
    text = answer.rpartition("</think>")[2]
    blocks = _blocks(text)
    code = extract_answer(text) if "</answer>" in text else text
    for tags in (_PYTHON, ("",), tuple(tag for tag, _ in blocks)):
        if matching := [block for tag, block in blocks if tag in tags]:
            code = matching[-1]
            break
    code = code.strip("\n\r")
    return textwrap.dedent(code) if 0 < len(code) <= MAX_CODE_CHARS and not code.isspace() else ""


def _blocks(text: str) -> list[tuple[str, str]]:
    """Return (tag, content) of each fenced block, which ends at the next fence, preferably on a new line."""
    blocks, position = [], 0
    closing_fences: Iterator[int] = (match.end() for match in _END.finditer(text))
    end = next(closing_fences, -1)
    while (start := text.find(_FENCE, position)) >= 0:
        line = text.find("\n", start, start + _MAX_TAG_CHARS)
        tag = _TAG.fullmatch(text, start + len(_FENCE), line) if line >= 0 else None
        if tag is None:  # inside a line
            position = start + len(_FENCE)
            continue
        while 0 <= end <= line:
            end = next(closing_fences, -1)
        stop = end - len(_FENCE) if end >= 0 else text.find(_FENCE, line)
        blocks.append((tag[1].lower(), text[line + 1 :] if stop < 0 else text[line + 1 : stop]))
        if stop < 0:
            break
        position = stop + len(_FENCE)
    return blocks


class HiddenTests:
    """Reward function with configurable grading:

        mine = HiddenTests(Grading(max_tests=20, seconds=2), partial_credit=True)      # name it as my_module:mine

    partial_credit: the reward is the fraction of tests passed; otherwise 1.0 if all pass, else 0.0.
    """

    sandboxed = True

    def __init__(self, grading: Grading = Grading(), partial_credit: bool = False) -> None:  # noqa: B008
        self.grading, self.partial_credit = grading, partial_credit

    async def __call__(self, rollout: Rollout) -> Reward:
        """Score a rollout. The sub-part `passed` is the fraction of tests passed. Raises as `grade` and `check`."""
        problem = parse_problem(rollout.prompt.ground_truth)
        result = await grade(extract_code(rollout.answer), problem, self._box, self.grading)
        reward = result.pass_rate if self.partial_credit else float(result.passed == result.tests)
        return Reward(reward, parts={"passed": result.pass_rate})

    @staticmethod
    def check(prompt: Prompt) -> None:
        """Raise ValueError if the prompt's ground truth holds no tests."""
        parse_problem(prompt.ground_truth)

    @cached_property
    def _box(self) -> Sandbox:
        """Sandbox with the settings of this process's run, which are known only when it is called."""
        return Sandbox.from_environment()


hidden_tests = HiddenTests()
"""Return 1.0 if the answer's code passes all hidden tests of `prompt.ground_truth`, else 0.0."""
