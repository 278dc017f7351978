"""Parse hidden tests in the formats of common data sets, which `SCORERS.md` lists, into a `Problem`.

Nothing is unpickled: packed tests are parsed out of a pickle that holds one string. Simple assertions are decomposed:
`assert f(3) == [1, 2]` becomes the call `f(3)`, which goes to the answer's box, and the value `[1, 2]`, which stays
outside. Anything more complex runs in a second box, which exchanges only plain values with the answer.
"""

from __future__ import annotations

import ast
import base64
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
"""How to compare a value: with `==`; as JSON (`grading.matches_json`); as JSON where a list of one item also stands for
the item, as in APPS (`packed`); by identity with None, True, or False (`is`); or by truth value."""


@dataclass(frozen=True)
class ProgramTest:
    """The answer is a program that reads `stdin` and must print `stdout`."""

    stdin: str
    stdout: str


@dataclass(frozen=True)
class CallTest:
    """A call of the answer's function: a Python expression `source`, or a call of `name` with plain `arguments`."""

    expected: Any
    comparison: Comparison = "equal"
    source: str = ""
    name: str = ""
    arguments: tuple[Any, ...] = ()


@dataclass(frozen=True)
class AssertionTest:
    """Python statements that assert something about the answer's functions and cannot be decomposed into calls."""

    source: str


Test = ProgramTest | CallTest | AssertionTest


@dataclass(frozen=True)
class Problem:
    """Tests of one prompt. tests: at least one; either all programs, or a mix of calls and assertions."""

    tests: tuple[Test, ...]
    setup: str = ""
    """Python executed before the answer, in its box: imports, given classes. Contains no expected value."""
    post_setup: str = ""
    """As `setup`, but executed after the answer, because it uses classes of the answer."""
    code_prefix: str = ""
    """Signature and docstring that an answer continues if it is not a complete program."""
    assertion_setup: str = ""
    """Python that assertion tests need, in their own box."""
    functions: tuple[str, ...] = ()
    """Functions of the answer that assertion tests call."""

    def select_tests(self, max_tests: int) -> Mapping[int, Test]:
        """Return at most `max_tests` tests by index, evenly spaced, the first and the last included."""
        count = len(self.tests)
        if count <= max_tests:
            return dict(enumerate(self.tests))
        indices = {round(number * (count - 1) / max(max_tests - 1, 1)) for number in range(max_tests)}
        return {number: self.tests[number] for number in sorted(indices)}


MAX_BYTES = 1 << 28
"""Maximum decompressed bytes, so that a small file cannot exhaust memory."""
_TEXTS = ("SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "UNICODE")
_FRAMING_OPCODES = ("PROTO", "FRAME", "MEMOIZE", "BINPUT", "LONG_BINPUT", "PUT", "STOP")


@lru_cache(maxsize=16)
def unpack_tests(text: str) -> Any:
    """Decode packed tests. Cached for the samples of a prompt, so do not mutate the result. Raises ValueError."""
    if text.lstrip()[:1] in ("[", "{", '"'):
        return _parse_json(text, "it")
    try:
        data = base64.b64decode(text, validate=True)
    except ValueError:
        raise ValueError("it is neither JSON nor base64") from None
    decompressor = zlib.decompressobj()
    try:
        data = decompressor.decompress(data, MAX_BYTES)
    except zlib.error as error:
        raise ValueError(f"it is base64, but not of zlib: {error}") from None
    if decompressor.unconsumed_tail:
        raise ValueError(f"it has more than {MAX_BYTES >> 20} MiB")
    if not decompressor.eof:
        raise ValueError("it is truncated")
    text = read_pickled_text(data) if data[:1] == b"\x80" else data.decode(errors="replace")
    value = _parse_json(text, "it")
    return _parse_json(value, "it") if isinstance(value, str) else value


def read_pickled_text(data: bytes) -> str:
    """Return the string that a pickle consists of. Raises ValueError for any other pickle, which could run code."""
    texts: list[str] = []
    try:
        for operation, argument, _ in pickletools.genops(data):
            if operation.name in _TEXTS:
                texts.append(str(argument))
            elif operation.name not in _FRAMING_OPCODES:
                raise ValueError(f"it is a pickle of more than text ({operation.name}), which is not supported")
    except (UnicodeDecodeError, IndexError) as error:
        raise ValueError(f"it is a broken pickle: {error}") from None
    if len(texts) != 1:
        raise ValueError(f"it is a pickle of {len(texts)} strings, not of one")
    return texts[0]


def _parse_json(text: str, subject: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{subject} is not JSON: {error}") from None


_BUILTIN = frozenset([*dir(builtins), "__name__"])
_ANSWER_MODULES = ("solution", "answer", "main", "__main__")
"""Names of modules from which tests import the answer."""
_MODULE_ALIASES = {"np": "numpy as np"}


def parse_statements(
    sources: Sequence[str], setup: str = "", setup_visible: bool = True, functions: Sequence[str] = ()
) -> Problem:
    """Parse tests, each the source of statements that assert something of the answer's functions (MBPP's `test_list`).

    setup: Python that all tests need. setup_visible: whether the answer may have it, too. functions: the answer's
    functions; if empty, every undefined name is one. Raises ValueError for invalid Python, and for a test that calls no
    function of the answer or uses an undefined name that it may compare with.
    """
    trees = [parse_python(source, f"its test {source[:80]!r}") for source in sources]
    for tree in trees:
        tree.body = [statement for statement in tree.body if not _is_trivial(statement)]
    # Data sets often leave importing the modules whose members the tests use to the harness.
    attributes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    modules = {node.value.id for node in attributes if isinstance(node.value, ast.Name)}
    modules &= sys.stdlib_module_names | _MODULE_ALIASES.keys()
    modules -= set().union(*map(collect_bound_names, [*trees, parse_python(setup, "its setup")]))
    setup = "\n".join([*(f"import {_MODULE_ALIASES.get(name, name)}" for name in sorted(modules)), setup]).strip()
    setup_tree = parse_python(setup, "its setup")
    defined_names = _BUILTIN | collect_bound_names(setup_tree)
    tests: list[Test] = []
    function_names: set[str] = set()
    for source, tree in zip(sources, trees, strict=True):
        free = collect_read_names(tree) - defined_names - collect_bound_names(tree)
        called_functions = free & set(functions) if functions else free
        if not called_functions:
            raise ValueError(f"its test {source[:80]!r} calls no function of an answer")
        call_test = extract_call(tree.body[0], called_functions, setup_visible) if len(tree.body) == 1 else None
        if undefined := _find_undefined(free, functions, call_test):
            raise ValueError(f"its test {source[:80]!r} uses {', '.join(undefined)}, which nothing defines")
        function_names |= called_functions
        tests.append(call_test or AssertionTest(ast.unparse(tree)))
    if not tests:
        raise ValueError("it has no tests")
    answer_setup = setup if setup_visible else ""
    needs_answer = bool(collect_read_names(setup_tree) - defined_names)  # its setup uses classes of the answer
    return Problem(
        tuple(tests),
        setup="" if needs_answer else answer_setup,
        post_setup=answer_setup if needs_answer else "",
        assertion_setup=setup,
        functions=tuple(sorted(function_names)),
    )


def parse_test_module(source: str, setup: str = "") -> Problem:
    """Parse Python source: each function `test_..` is a test, or without any each top-level assertion.

    The remaining statements are the setup of all tests. `from solution import f` names the answer's functions. Raises
    ValueError as `parse_statements` does.
    """
    module = parse_python(source, "its test")
    imports = [node for node in module.body if isinstance(node, ast.ImportFrom) and node.module in _ANSWER_MODULES]
    functions = [alias.name for node in imports for alias in node.names if alias.name != "*"]
    body = [node for node in module.body if node not in imports]
    test_nodes: list[ast.stmt] = []
    test_nodes += [node for node in body if isinstance(node, ast.FunctionDef) and node.name.startswith("test")]
    simple = ast.Assert | ast.Import | ast.ImportFrom
    if not test_nodes and all(isinstance(node, simple) or _is_text(node) for node in body):
        test_nodes = [node for node in body if isinstance(node, ast.Assert) and not _is_trivial(node)]
    if not test_nodes:
        return parse_statements([ast.unparse(ast.Module(body, []))], setup, False, functions)
    shared_setup = ast.unparse(ast.Module([node for node in body if node not in test_nodes], []))
    return parse_statements(list(map(_as_statements, test_nodes)), f"{setup}\n{shared_setup}", False, functions)


def parse_humaneval(test: str, entry_point: str, prompt: str) -> Problem:
    """Parse HumanEval's format.

    `test` defines `check(candidate)`, `entry_point` names the function, and `prompt` is the code that the answer
    continues. If `check` consists of assertions, each becomes a test. Raises ValueError as `parse_statements` does.
    """
    module = parse_python(test, "its test")
    checks = [node for node in module.body if isinstance(node, ast.FunctionDef) and node.name == "check"]
    if not checks or len(checks[-1].args.args) != 1:
        raise ValueError("its `test` defines no function check(candidate)")
    if not entry_point.isidentifier():
        raise ValueError(f"its `entry_point` {entry_point[:80]!r} is not a function name")
    check = checks[-1]
    candidate = check.args.args[0].arg
    calls = [node for node in module.body if isinstance(node, ast.Expr) and "check" in collect_read_names(node)]
    helpers = ast.unparse(ast.Module([node for node in module.body if node is not check and node not in calls], []))
    for node in ast.walk(check):
        if isinstance(node, ast.Name) and node.id == candidate:
            node.id = entry_point
    body = [node for node in check.body if not isinstance(node, ast.Pass) and not _is_text(node)]
    if all(isinstance(node, ast.Assert) for node in body):
        sources = [ast.unparse(node) for node in body if not _is_trivial(node)]
    else:
        check.args, check.body = ast.parse("lambda: 0", mode="eval").body.args, body  # type: ignore[attr-defined]
        sources = [_as_statements(check)]
    # The prompt's imports and other functions, without the requested one.
    context = [node for node in parse_python(prompt, "its `prompt`").body if getattr(node, "name", "") != entry_point]
    answer_setup = ast.unparse(ast.Module(context, []))
    return replace(
        parse_statements(sources, f"{answer_setup}\n{helpers}", False, [entry_point]),
        setup=answer_setup,
        code_prefix=prompt,
    )


def extract_call(statement: ast.stmt, names: set[str], setup_visible: bool = True) -> CallTest | None:
    """Return the call test of an assertion that compares a call with a literal, or asserts its truth; else None.

    setup_visible: whether the answer's box has the names that the setup defines, so that arguments may use them.
    """
    if not isinstance(statement, ast.Assert):
        return None
    test = statement.test
    comparison: Comparison = "true"
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        comparison, test = "false", test.operand
    if _is_call_of(test, names, setup_visible):
        return CallTest(None, comparison, ast.unparse(test))
    if comparison == "false" or not isinstance(test, ast.Compare) or len(test.ops) != 1:
        return None
    sides = [test.left, test.comparators[0]]
    for call, other in (sides, sides[::-1]):
        if not _is_call_of(call, names, setup_visible):
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
    """Parse Python source. Raises ValueError, with `what` as the beginning of the message."""
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        raise ValueError(f"{what} is not valid Python: {error}") from None


def collect_bound_names(tree: ast.AST) -> set[str]:
    """Return the names that a tree binds, in any scope."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.ExceptHandler):
            names.add(node.name or "")
        elif isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            names.add(node.id)
        elif isinstance(node, ast.alias):
            names.add((node.asname or node.name).partition(".")[0])
        elif isinstance(node, ast.arg):
            names.add(node.arg)
    return names


def collect_read_names(tree: ast.AST) -> set[str]:
    """Return the names that a tree reads. Functions are not only called, as in `map(f, values)`."""
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}


def _is_call_of(node: ast.expr, names: set[str], setup_visible: bool) -> bool:
    """Return whether a node calls one of the names and uses nothing that the answer's box lacks."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name) or node.func.id not in names:
        return False
    return setup_visible or not collect_read_names(node) - names - _BUILTIN


def _is_trivial(statement: ast.stmt) -> bool:
    """Return whether a statement is like `assert True, "..."`."""
    return isinstance(statement, ast.Assert) and isinstance(statement.test, ast.Constant) and bool(statement.test.value)


def _find_undefined(free_names: set[str], functions: Sequence[str], call_test: CallTest | None) -> list[str]:
    """Return the undefined names that a test may compare with, as in `assert close(f(1), 2)`: an answer that defined
    them would grade itself. They are harmless if the answer must produce a value, or if they are classes."""
    if functions:
        return sorted(free_names - set(functions))
    if call_test is not None and call_test.comparison == "equal" and not isinstance(call_test.expected, bool | None):
        return []
    suspects = [name for name in sorted(free_names) if call_test is None or not name[0].isupper()]
    return suspects if len(suspects) > 1 else []


def _is_text(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def _as_statements(test: ast.stmt) -> str:
    if not isinstance(test, ast.FunctionDef):
        return ast.unparse(test)
    if parameters := test.args.args:
        raise ValueError(f"its test {test.name} takes {parameters[0].arg}, which is not provided")
    if len(test.body) == 1 and isinstance(test.body[0], ast.Assert):
        return ast.unparse(test.body[0])
    return f"{ast.unparse(test)}\n{test.name}()"


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
"""Imports that function-completion sites provide."""
_NESTED_KEYS = ("input_output", "test_cases", "verification_info", "reward_model", "ground_truth", "tests")
_FORMATS = "HumanEval's, MBPP's, APPS's or LiveCodeBench's keys, a list of tests, or assertions"


def parse_problem(truth: Any) -> Problem:
    """Parse the tests of a ground truth. Raises ValueError, with the reason, if it holds none."""
    return _parse_text(truth) if isinstance(truth, str) else _parse_value(to_plain(truth))


@lru_cache(maxsize=64)
def _parse_text(text: str) -> Problem:
    """Parse the tests of a text, once for all samples of a prompt."""
    if not text.strip():
        raise ValueError("the ground truth is empty; it must hold tests")
    if text.lstrip()[0] not in "[{":
        return parse_test_module(text)
    try:
        return _parse_value(json.loads(text))
    except json.JSONDecodeError as error:
        raise ValueError(f"the ground truth is not JSON: {error}") from None
    except RecursionError:
        raise ValueError("the ground truth is JSON that is too deep") from None


def _parse_value(truth: Any) -> Problem:
    if isinstance(truth, Mapping):
        return _parse_mapping(truth)
    if isinstance(truth, str):
        return _parse_text(truth)
    if isinstance(truth, list) and truth and all(isinstance(item, str) for item in truth):
        return parse_statements(truth)
    if _is_list_of_mappings(truth):
        return _build_from_cases(truth, "")
    raise ValueError(f"the ground truth has no tests in a known format, but {_shown(truth)}; known are {_FORMATS}")


def _is_list_of_mappings(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, Mapping) for item in value)


def _parse_mapping(truth: Mapping[str, Any]) -> Problem:
    if "inputs" in truth and "outputs" in truth:
        return _build_from_lists(_read_list(truth, "inputs"), _read_list(truth, "outputs"), _name(truth.get("fn_name")))
    if "test_list" in truth:
        imports = _read_list(truth, "test_imports") if truth.get("test_imports") else []
        setup = "\n".join([*map(str, imports), str(truth.get("test_setup_code") or truth.get("setup_code") or "")])
        sources = _read_list(truth, "test_list")
        if not all(isinstance(item, str) for item in sources):
            raise ValueError("its `test_list` is not a list of assertions")
        return parse_statements(sources, setup)
    if "entry_point" in truth and "test" in truth:
        for key in ("test", "entry_point"):
            if not isinstance(truth[key], str):
                raise ValueError(f"its `{key}` is {_shown(truth[key])}, not a text")
        return parse_humaneval(truth["test"], truth["entry_point"], str(truth.get("prompt") or ""))
    if "public_test_cases" in truth or "private_test_cases" in truth:
        metadata = truth.get("metadata") or {}
        metadata = _parse_json(metadata, "its `metadata`") if isinstance(metadata, str) else metadata
        name = _name(metadata.get("func_name") if isinstance(metadata, Mapping) else None)
        keys = ("public_test_cases", "private_test_cases")
        return _build_from_cases([case for key in keys for case in _parse_cases(truth.get(key), key)], name)
    if "test" in truth and isinstance(truth["test"], str):
        return parse_test_module(truth["test"], "\n".join(map(str, truth.get("test_imports") or [])))
    for key in _NESTED_KEYS:
        if truth.get(key) not in (None, ""):
            if _is_list_of_mappings(truth[key]):
                return _build_from_cases(truth[key], _name(truth.get("fn_name")))
            return _parse_value(truth[key])
    raise ValueError(f"the ground truth has the keys {_shown(list(truth))}; known are {_FORMATS}")


def _parse_cases(value: Any, key: str) -> list[Any]:
    if value in (None, ""):
        return []
    try:
        cases = unpack_tests(value) if isinstance(value, str) else value
    except ValueError as error:
        raise ValueError(f"its `{key}` cannot be read: {error}") from None
    if not isinstance(cases, list) or not all(isinstance(case, Mapping) for case in cases):
        raise ValueError(f"its `{key}` is not a list of tests, but {_shown(cases)}")
    return cases


def _build_from_cases(cases: Sequence[Mapping[str, Any]], name: str) -> Problem:
    """Build a problem from a list of single tests, which must all be of the same kind."""
    if not cases:
        raise ValueError("it has no tests")
    for number, case in enumerate(cases):
        if "input" not in case or "output" not in case:
            raise ValueError(f"its test {number} has the keys {_shown(list(case))}, not `input` and `output`")
    kinds = {str(case.get("testtype") or case.get("type") or "") for case in cases}
    names = set()
    for case in cases:
        metadata = case.get("metadata")
        inner_name = metadata.get("func_name") if isinstance(metadata, Mapping) else None
        names.add(_name(case.get("fn_name") or inner_name) or name)
    is_functional = bool(kinds & {"functional", "function_call", "function"}) or (kinds == {""} and names != {""})
    if len(kinds) > 1 or len(names) > 1:
        raise ValueError(f"its tests are of several kinds ({_shown(sorted(kinds | names))}); they must be of one")
    if is_functional and names == {""}:
        raise ValueError("its tests call a function, but its name is missing: `fn_name`, or `metadata.func_name`")
    inputs, outputs = [case["input"] for case in cases], [case["output"] for case in cases]
    return _build_from_lists(inputs, outputs, names.pop() if is_functional else "")


def _build_from_lists(inputs: Sequence[Any], outputs: Sequence[Any], name: str) -> Problem:
    if len(inputs) != len(outputs):
        raise ValueError(f"it has {len(inputs)} inputs and {len(outputs)} outputs")
    if not inputs:
        raise ValueError("it has no tests")
    pairs = zip(inputs, outputs, strict=True)
    if not name:
        return Problem(tuple(ProgramTest(_to_stdio(i, "input"), _to_stdio(o, "output")) for i, o in pairs))
    calls: list[tuple[tuple[Any, ...], Any]] = []
    for number, (arguments, expected) in enumerate(pairs):
        if isinstance(arguments, str):
            lines = arguments.strip("\n").split("\n") if arguments.strip() else []
            value = _line(expected, number) if isinstance(expected, str) else expected
            calls.append((tuple(_line(line, number) for line in lines), value))
        elif isinstance(arguments, list):
            calls.append((tuple(arguments), expected))
        else:
            raise ValueError(f"its input {number} is {_shown(arguments)}, not a list of arguments or lines of JSON")
    is_packed = all(isinstance(expected, list) and len(expected) == 1 for _, expected in calls)
    comparison: Comparison = "packed" if is_packed else "json"
    tests = [CallTest(value, comparison, name=name, arguments=arguments) for arguments, value in calls]
    return Problem(tuple(tests), setup=DEFAULT_IMPORTS)


def _line(text: str, number: int) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise ValueError(f"its test {number} has a line that is not JSON: {_shown(text)}") from None


def _to_stdio(value: Any, what: str) -> str:
    """Return a program's input or output as text."""
    if isinstance(value, list):
        return "\n".join(_to_stdio(item, what) for item in value)
    if isinstance(value, bool | Mapping) or value is None:
        raise ValueError(f"an {what} of its tests is {_shown(value)}, not a text; is `fn_name` missing?")
    return str(value)


def _read_list(truth: Mapping[str, Any], key: str) -> list[Any]:
    items = _parse_json(truth[key], f"its `{key}`") if isinstance(truth[key], str) else truth[key]
    if not isinstance(items, list):
        raise ValueError(f"its `{key}` is {_shown(items)}, not a list")
    return items


def _name(value: Any) -> str:
    """Return a function's name; for a method `Solution().f`, the method's name."""
    if value in (None, ""):
        return ""
    name = str(value).rpartition(".")[2]
    if not name.isidentifier():
        raise ValueError(f"{_shown(value)} is not a function name")
    return name


def to_plain(value: Any) -> Any:
    """Convert to JSON types, including the NumPy arrays that parquet files yield for lists."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(item) for item in value]
    return value


def _shown(value: Any) -> str:
    return repr(value[:100]) if isinstance(value, str) else json.dumps(value, default=str)[:100]
