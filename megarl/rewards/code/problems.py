"""Hidden tests in the formats of common data sets, as a `Problem`. Pure; an unknown format is an error that says why.

    {"prompt", "test", "entry_point"}                               HumanEval, HumanEval+
    {"test_list", "test_setup_code"?, "test_imports"?}               MBPP; MBPP+ has `test`, a text
    {"inputs", "outputs", "fn_name"?}, or that as `input_output`     APPS, TACO, verl's and PRIME's
    {"public_test_cases"?, "private_test_cases", "metadata"?}        LiveCodeBench
    [{"input", "output", "fn_name"?, "testtype" | "type"?}, ..]      also as `test_cases` or `tests`
    ["assert ..", ..], or Python source with assertions or functions `test_..`

Each may be given as it is or as JSON. Packed tests are JSON, base64 of zlib of it, or of a pickle of it as in
LiveCodeBench. Nothing is unpickled: the text is read out of a pickle that holds one string.

Assertions are taken apart: `assert f(3) == [1, 2]` becomes the call `f(3)`, which is sent to the answer's box, and the
value `[1, 2]`, which stays here. Anything more, such as `assert abs(f(3) - 0.1) < 1e-6` or statements that depend on
one another, goes to a judge: a box of its own that runs the text of the test and exchanges only plain values with the
answer. The text is always the data set's, never the policy's.
"""

from __future__ import annotations

import ast
import base64
import binascii
import builtins
import json
import pickletools
import sys
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal

Comparison = Literal["equal", "json", "packed", "is", "true", "false"]
"""How a value is compared: by `==`; as JSON has it (`compare.matches_json`), or so that a list of one item stands for
the item, too, as in APPS (`packed`); by being that None, True or False; by its truth."""


@dataclass(frozen=True)
class ProgramTest:
    """The answer is a program, which reads `stdin` and prints `stdout`."""

    stdin: str
    stdout: str


@dataclass(frozen=True)
class CallTest:
    """The answer has a function. `source` is a call of it, an expression of Python in which the expected value does not
    occur; or it is called `name` with plain `arguments`."""

    expected: Any
    comparison: Comparison = "equal"
    source: str = ""
    name: str = ""
    arguments: tuple[Any, ...] = ()


@dataclass(frozen=True)
class AssertionTest:
    """Statements of Python that assert something about the answer's functions, and cannot be taken apart."""

    source: str


Test = ProgramTest | CallTest | AssertionTest


@dataclass(frozen=True)
class Problem:
    """tests: at least one; programs, or calls and judged ones."""

    tests: tuple[Test, ...]
    setup: str = ""
    """Python that is run before the answer, in its box: imports, classes that it is given. Holds no expected value."""
    post_setup: str = ""
    """The same, but run behind the answer, of which it has classes."""
    code_prefix: str = ""
    """What an answer that is no program of its own goes on from: a signature and a docstring."""
    assertion_setup: str = ""
    """Python that judged tests need, in a box of their own."""
    functions: tuple[str, ...] = ()
    """Of the answer, that judged tests call."""

    def select_tests(self, most: int) -> Mapping[int, Test]:
        """At most so many tests by their numbers, spread evenly over them, the first and the last among them."""
        count = len(self.tests)
        if count <= most:
            return dict(enumerate(self.tests))
        chosen = {round(number * (count - 1) / max(most - 1, 1)) for number in range(most)}
        return {number: self.tests[number] for number in sorted(chosen)}


MOST = 1 << 28
"""Bytes that may come out, so that no small file fills the memory."""
_TEXTS = ("SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "UNICODE")
_FRAMING_OPCODES = ("PROTO", "FRAME", "MEMOIZE", "BINPUT", "LONG_BINPUT", "PUT", "STOP")


@lru_cache(maxsize=16)
def unpack_tests(text: str) -> Any:
    """What a text holds, not to be changed: once for the samples of a prompt. Raises ValueError for anything else."""
    start = text.lstrip()[:1]
    if start in ("[", "{", '"'):
        return _parse_json(text)
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise ValueError("it is neither JSON nor base64") from None
    machine = zlib.decompressobj()
    try:
        data = machine.decompress(data, MOST)
    except zlib.error as error:
        raise ValueError(f"it is base64, but not of zlib: {error}") from None
    if machine.unconsumed_tail:
        raise ValueError(f"it has more than {MOST >> 20} MiB")
    if not machine.eof:
        raise ValueError("it is cut off")
    found = _parse_json(read_pickled_text(data) if data[:1] == b"\x80" else data.decode(errors="replace"))
    return _parse_json(found) if isinstance(found, str) else found


def read_pickled_text(data: bytes) -> str:
    """The text that a pickle consists of. Raises ValueError for a pickle of anything else, which could do anything."""
    found: list[str] = []
    try:
        for operation, argument, _ in pickletools.genops(data):
            if operation.name in _TEXTS:
                found.append(str(argument))
            elif operation.name not in _FRAMING_OPCODES:
                raise ValueError(f"it is a pickle that is more than a text ({operation.name}), which is not read")
    except (UnicodeDecodeError, IndexError) as error:
        raise ValueError(f"it is a broken pickle: {error}") from None
    if len(found) != 1:
        raise ValueError(f"it is a pickle of {len(found)} texts, not of one")
    return found[0]


def _parse_json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"it is no JSON: {error}") from None


_BUILTIN = frozenset([*dir(builtins), "__name__"])
_ANSWER_MODULES = ("solution", "answer", "main", "__main__")
"""Modules that tests import the answer from."""
_MODULE_ALIASES = {"np": "numpy as np"}


def parse_statements(
    sources: Sequence[str], setup: str = "", shown: bool = True, functions: Sequence[str] = ()
) -> Problem:
    """Each source is a test: statements that assert something of functions that the answer has (MBPP's `test_list`).

    setup: Python that all of them need, and `shown` whether the answer may have it, too. functions: those that the
    answer has; where nobody says it, what is not defined is the answer's. Raises ValueError for what is no Python, and
    for a test that asks nothing of an answer, or may do so by a name that is missing.
    """
    trees = [_drop_trivial(parse_python(source, f"its test {source[:80]!r}")) for source in sources]
    missing = _collect_modules(trees) - collect_bound_names(parse_python(setup, "its setup"))
    setup = "\n".join([*(f"import {_MODULE_ALIASES.get(name, name)}" for name in sorted(missing)), setup]).strip()
    prepared = parse_python(setup, "its setup")
    known = _BUILTIN | collect_bound_names(prepared)
    tests: list[Test] = []
    names: set[str] = set()
    for source, tree in zip(sources, trees, strict=True):
        free = collect_read_names(tree) - known - collect_bound_names(tree)
        wanted = free & set(functions) if functions else free
        if not wanted:
            raise ValueError(f"its test {source[:80]!r} calls no function of an answer")
        simple = extract_call(tree.body[0], wanted, shown) if len(tree.body) == 1 else None
        if odd := _find_undefined(free, functions, simple):
            raise ValueError(f"its test {source[:80]!r} uses {', '.join(odd)}, which nothing defines")
        names |= wanted
        tests.append(simple or AssertionTest(ast.unparse(tree)))
    if not tests:
        raise ValueError("it has no tests")
    given = setup if shown else ""
    late = bool(collect_read_names(prepared) - known)  # of classes that the answer has
    return Problem(
        tuple(tests),
        setup="" if late else given,
        post_setup=given if late else "",
        assertion_setup=setup,
        functions=tuple(sorted(names)),
    )


def parse_test_module(source: str, setup: str = "") -> Problem:
    """Tests as a text of Python: each function `test_..`, or else each assertion at the top, is one; what is left is
    for all of them. `from solution import f` says what the answer has. Raises ValueError as above."""
    module = parse_python(source, "its test")
    imports = [one for one in module.body if isinstance(one, ast.ImportFrom) and one.module in _ANSWER_MODULES]
    named = [alias.name for one in imports for alias in one.names if alias.name != "*"]
    body = [one for one in module.body if one not in imports]
    chosen: list[ast.stmt] = [one for one in body if isinstance(one, ast.FunctionDef) and one.name.startswith("test")]
    if not chosen and all(isinstance(one, ast.Assert | ast.Import | ast.ImportFrom) or _is_text(one) for one in body):
        chosen = [one for one in body if isinstance(one, ast.Assert) and not _is_trivial(one)]
    if not chosen:
        return parse_statements([ast.unparse(ast.Module(body, []))], setup, False, named)
    others = ast.unparse(ast.Module([one for one in body if one not in chosen], []))
    return parse_statements(list(map(_as_statements, chosen)), f"{setup}\n{others}", False, named)


def parse_humaneval(test: str, entry: str, prompt: str) -> Problem:
    """HumanEval's: `test` defines `check(candidate)`, `entry` names the function, `prompt` is what it goes on from.

    Where `check` has assertions alone, each is a test. Raises ValueError as above.
    """
    module = parse_python(test, "its test")
    checks = [one for one in module.body if isinstance(one, ast.FunctionDef) and one.name == "check"]
    if not checks or len(checks[-1].args.args) != 1:
        raise ValueError("its `test` defines no function check(candidate)")
    if not entry.isidentifier():
        raise ValueError(f"its `entry_point` {entry[:80]!r} is no name of a function")
    check = checks[-1]
    candidate = check.args.args[0].arg
    others = ast.unparse(ast.Module([one for one in module.body if one is not check and not _is_check_call(one)], []))
    body = [_Renamed(candidate, entry).visit(one) for one in check.body]
    body = [one for one in body if not isinstance(one, ast.Pass) and not _is_text(one)]
    if all(isinstance(one, ast.Assert) for one in body):
        sources = [ast.unparse(one) for one in body if not _is_trivial(one)]
    else:
        check.args, check.body = ast.parse("lambda: 0", mode="eval").body.args, body  # type: ignore[attr-defined]
        sources = [_as_statements(check)]
    given = _drop_function(prompt, entry)
    return replace(parse_statements(sources, f"{given}\n{others}", False, [entry]), setup=given, code_prefix=prompt)


def extract_call(statement: ast.stmt, names: set[str], shown: bool = True) -> CallTest | None:
    """A call whose value is compared with a literal, if the assertion is no more than that.

    shown: whether the answer's box has the names that the test's setup defines, so that arguments may use them.
    """
    if not isinstance(statement, ast.Assert):
        return None
    test = statement.test
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not) and _is_call_of(test.operand, names, shown):
        return CallTest(None, "false", ast.unparse(test.operand))
    if _is_call_of(test, names, shown):
        return CallTest(None, "true", ast.unparse(test))
    if not isinstance(test, ast.Compare) or len(test.ops) != 1:
        return None
    sides = [test.left, test.comparators[0]]
    for call, other in (sides, sides[::-1]):
        if not _is_call_of(call, names, shown):
            continue
        try:
            expected = ast.literal_eval(other)
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            continue
        if isinstance(test.ops[0], ast.Eq):
            return CallTest(expected, "equal", ast.unparse(call))
        if isinstance(test.ops[0], ast.Is) and (expected is None or isinstance(expected, bool)):
            return CallTest(expected, "is", ast.unparse(call))
    return None


def parse_python(source: str, what: str) -> ast.Module:
    """Raises ValueError, which begins with `what`, for no Python."""
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        raise ValueError(f"{what} is no Python: {error}") from None


def collect_bound_names(tree: ast.AST) -> set[str]:
    """Names that something in there binds, in whatever scope."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            found.add(node.id)
        elif isinstance(node, ast.alias):
            found.add((node.asname or node.name).partition(".")[0])
        elif isinstance(node, ast.arg):
            found.add(node.arg)
        elif isinstance(node, ast.ExceptHandler) and node.name:
            found.add(node.name)
    return found


def collect_read_names(tree: ast.AST) -> set[str]:
    """Names that something in there reads: functions are not only called, as in `map(f, values)`."""
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}


def _is_call_of(node: ast.expr, names: set[str], shown: bool) -> bool:
    """Whether it is a call of one of the names, and of nothing that the answer's box lacks."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name) or node.func.id not in names:
        return False
    return shown or not collect_read_names(node) - names - _BUILTIN


def _is_trivial(statement: ast.stmt) -> bool:
    """`assert True, "..."`"""
    return isinstance(statement, ast.Assert) and isinstance(statement.test, ast.Constant) and bool(statement.test.value)


def _drop_trivial(tree: ast.Module) -> ast.Module:
    return ast.Module([one for one in tree.body if not _is_trivial(one)], [])


def _collect_modules(trees: Sequence[ast.Module]) -> set[str]:
    """Those whose members the tests name, as data sets often leave it to whoever runs them to import them."""
    bases = {
        node.value.id
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
    }
    return (bases - set().union(*map(collect_bound_names, trees))) & (sys.stdlib_module_names | _MODULE_ALIASES.keys())


def _find_undefined(free: set[str], functions: Sequence[str], simple: CallTest | None) -> list[str]:
    """Of the names that nothing defines, those that may be what a test compares by: `assert close(f(1), 2)`. An answer
    that had them would judge itself. Where it has to give a value, or they are classes, that is no matter."""
    if functions:
        return sorted(free - set(functions))
    if simple is not None and simple.comparison == "equal" and simple.expected is not None:
        if not isinstance(simple.expected, bool):
            return []
    functional = [name for name in sorted(free) if simple is None or not name[0].isupper()]
    return functional if len(functional) > 1 else []


def _is_text(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def _is_check_call(statement: ast.stmt) -> bool:
    """A call at the top of HumanEval's tests, of `check` itself."""
    return isinstance(statement, ast.Expr) and "check" in collect_read_names(statement)


def _as_statements(test: ast.stmt) -> str:
    if not isinstance(test, ast.FunctionDef):
        return ast.unparse(test)
    if taking := test.args.args:
        raise ValueError(f"its test {test.name} takes {taking[0].arg}, which nobody gives it")
    if len(test.body) == 1 and isinstance(test.body[0], ast.Assert):
        return ast.unparse(test.body[0])
    return f"{ast.unparse(test)}\n{test.name}()"


def _drop_function(prompt: str, entry: str) -> str:
    """A prompt's imports and other functions: without the one that is asked for."""
    body = parse_python(prompt, "its `prompt`").body
    return ast.unparse(ast.Module([one for one in body if getattr(one, "name", None) != entry], []))


class _Renamed(ast.NodeTransformer):
    """A parameter's name, replaced by the function's."""

    def __init__(self, old: str, new: str) -> None:
        self.old, self.new = old, new

    def visit_Name(self, node: ast.Name) -> Any:
        return ast.copy_location(ast.Name(self.new, node.ctx), node) if node.id == self.old else node


DEFAULT_IMPORTS = """\
import bisect, collections, functools, heapq, itertools, math, operator, random, re, string, sys
from bisect import *
from collections import *
from functools import *
from heapq import *
from itertools import *
from math import *
from typing import *
from builtins import pow
"""
"""What sites with functions to write have imported already."""
_NESTED_KEYS = ("input_output", "test_cases", "verification_info", "reward_model", "ground_truth", "tests")
_FORMATS = "HumanEval's, MBPP's, APPS's or LiveCodeBench's keys, a list of tests, or assertions"


def parse_problem(truth: Any) -> Problem:
    """The tests that a ground truth holds. Raises ValueError, with the reason, for what holds none."""
    return _parse_text(truth) if isinstance(truth, str) else _parse_value(to_plain(truth))


@lru_cache(maxsize=64)
def _parse_text(text: str) -> Problem:
    """Once for the samples of a prompt."""
    if not text.strip():
        raise ValueError("the ground truth is empty; it must hold tests")
    if text.lstrip()[0] in "[{":
        try:
            return _parse_value(json.loads(text))
        except json.JSONDecodeError as error:
            raise ValueError(f"the ground truth is no JSON: {error}") from None
        except RecursionError:
            raise ValueError("the ground truth is JSON that is too deep") from None
    return parse_test_module(text)


def _parse_value(truth: Any) -> Problem:
    if isinstance(truth, Mapping):
        return _parse_mapping(truth)
    if isinstance(truth, str):
        return _parse_text(truth)
    if isinstance(truth, list) and truth and all(isinstance(one, str) for one in truth):
        return parse_statements(truth)
    if isinstance(truth, list) and truth and all(isinstance(one, Mapping) for one in truth):
        return _build_from_cases(truth, "")
    raise ValueError(f"the ground truth has no tests that are known, but {_shown(truth)}; known are {_FORMATS}")


def _parse_mapping(truth: Mapping[str, Any]) -> Problem:
    if "inputs" in truth and "outputs" in truth:
        return _build_from_lists(_read_list(truth, "inputs"), _read_list(truth, "outputs"), _name(truth.get("fn_name")))
    if "test_list" in truth:
        imports = _read_list(truth, "test_imports") if truth.get("test_imports") else []
        setup = "\n".join([*map(str, imports), str(truth.get("test_setup_code") or truth.get("setup_code") or "")])
        sources = _read_list(truth, "test_list")
        if not all(isinstance(one, str) for one in sources):
            raise ValueError("its `test_list` is no list of assertions")
        return parse_statements(sources, setup)
    if "entry_point" in truth and "test" in truth:
        return parse_humaneval(
            _text_field(truth, "test"), _text_field(truth, "entry_point"), str(truth.get("prompt") or "")
        )
    if "public_test_cases" in truth or "private_test_cases" in truth:
        about = _json_field(truth.get("metadata") or {}, "metadata")
        name = _name(about.get("func_name") if isinstance(about, Mapping) else None)
        cases = [
            case for key in ("public_test_cases", "private_test_cases") for case in _parse_cases(truth.get(key), key)
        ]
        return _build_from_cases(cases, name)
    if "test" in truth and isinstance(truth["test"], str):
        return parse_test_module(truth["test"], "\n".join(map(str, truth.get("test_imports") or [])))
    for key in _NESTED_KEYS:
        if truth.get(key) not in (None, ""):
            inner = truth[key]
            if isinstance(inner, list) and inner and all(isinstance(one, Mapping) for one in inner):
                return _build_from_cases(inner, _name(truth.get("fn_name")))
            return _parse_value(inner)
    raise ValueError(f"the ground truth has the keys {_shown(list(truth))}; known are {_FORMATS}")


def _parse_cases(value: Any, key: str) -> list[Any]:
    if value in (None, ""):
        return []
    try:
        found = unpack_tests(value) if isinstance(value, str) else value
    except ValueError as error:
        raise ValueError(f"its `{key}` cannot be read: {error}") from None
    if not isinstance(found, list) or not all(isinstance(one, Mapping) for one in found):
        raise ValueError(f"its `{key}` is no list of tests, but {_shown(found)}")
    return found


def _build_from_cases(cases: Sequence[Mapping[str, Any]], name: str) -> Problem:
    """Tests one by one. All are of the same kind."""
    if not cases:
        raise ValueError("it has no tests")
    for number, case in enumerate(cases):
        if "input" not in case or "output" not in case:
            raise ValueError(f"its test {number} has the keys {_shown(list(case))}, not `input` and `output`")
    kinds = {str(case.get("testtype") or case.get("type") or "") for case in cases}
    names = {_name(case.get("fn_name") or _inner_name(case)) or name for case in cases}
    functional = bool(kinds & {"functional", "function_call", "function"}) or (kinds == {""} and names != {""})
    if len(kinds) > 1 or len(names) > 1:
        raise ValueError(f"its tests are of several kinds ({_shown(sorted(kinds | names))}); they must be of one")
    if functional and names == {""}:
        raise ValueError("its tests call a function, but nothing says its name: `fn_name`, or `metadata.func_name`")
    inputs, outputs = [case["input"] for case in cases], [case["output"] for case in cases]
    return _build_from_lists(inputs, outputs, names.pop() if functional else "")


def _inner_name(case: Mapping[str, Any]) -> Any:
    about = case.get("metadata")
    return about.get("func_name") if isinstance(about, Mapping) else None


def _build_from_lists(inputs: Sequence[Any], outputs: Sequence[Any], name: str) -> Problem:
    if len(inputs) != len(outputs):
        raise ValueError(f"it has {len(inputs)} inputs and {len(outputs)} outputs")
    if not inputs:
        raise ValueError("it has no tests")
    pairs = zip(inputs, outputs, strict=True)
    if not name:
        return Problem(tuple(ProgramTest(_to_stdio(one, "input"), _to_stdio(other, "output")) for one, other in pairs))
    calls: list[tuple[tuple[Any, ...], Any]] = []
    for number, (given, expected) in enumerate(pairs):
        if isinstance(given, str):
            lines = given.strip("\n").split("\n") if given.strip() else []
            value = _line(expected, number) if isinstance(expected, str) else expected
            calls.append((tuple(_line(line, number) for line in lines), value))
        elif isinstance(given, list):
            calls.append((tuple(given), expected))
        else:
            raise ValueError(f"its input {number} is {_shown(given)}, not a list of arguments or lines of JSON")
    packed = all(isinstance(expected, list) and len(expected) == 1 for _, expected in calls)
    by: Comparison = "packed" if packed else "json"
    return Problem(
        tuple(CallTest(value, by, name=name, arguments=given) for given, value in calls), setup=DEFAULT_IMPORTS
    )


def _line(text: str, number: int) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise ValueError(f"its test {number} has a line that is no JSON: {_shown(text)}") from None


def _to_stdio(value: Any, what: str) -> str:
    """What a program reads or prints."""
    if isinstance(value, list):
        return "\n".join(_to_stdio(one, what) for one in value)
    if isinstance(value, bool | Mapping) or value is None:
        raise ValueError(f"an {what} of its tests is {_shown(value)}, not a text; is `fn_name` missing?")
    return str(value)


def _read_list(truth: Mapping[str, Any], key: str) -> list[Any]:
    found = _json_field(truth[key], key)
    if not isinstance(found, list):
        raise ValueError(f"its `{key}` is {_shown(found)}, not a list")
    return found


def _text_field(truth: Mapping[str, Any], key: str) -> str:
    if not isinstance(truth[key], str):
        raise ValueError(f"its `{key}` is {_shown(truth[key])}, not a text")
    return str(truth[key])


def _json_field(value: Any, key: str) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"its `{key}` is no JSON: {error}") from None


def _name(value: Any) -> str:
    """Of a function; of a method `Solution().f`, its own."""
    if value in (None, ""):
        return ""
    name = str(value).rpartition(".")[2]
    if not name.isidentifier():
        raise ValueError(f"{_shown(value)} is no name of a function")
    return name


def to_plain(value: Any) -> Any:
    """As JSON has it, also what parquet files make of lists: arrays of numpy."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(item) for item in value]
    return value


def _shown(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return repr(text[:100]) if isinstance(value, str) else text[:100]
