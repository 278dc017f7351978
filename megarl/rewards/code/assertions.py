"""Assertions of a data set, taken apart: the call goes to the answer, the expected value stays here.

`assert f(3) == [1, 2]` becomes the call `f(3)` and the value `[1, 2]`. What is more than that, `assert abs(f(3) - 0.1)
< 1e-6`, or statements that go on from one another, is left to a judge: a box of its own, where the text of the test
runs and gets no more of the answer than plain values. The texts are the data set's, never a policy's.
"""

from __future__ import annotations

import ast
import builtins
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from megarl.rewards.code.problems import Call, Judged, Problem, Test

_BUILTIN = frozenset([*dir(builtins), "__name__"])
_ANSWERS = ("solution", "answer", "main", "__main__")
"""Modules that tests import the answer from."""
_CALLED = {"np": "numpy as np"}


def of_statements(
    sources: Sequence[str], setup: str = "", shown: bool = True, functions: Sequence[str] = ()
) -> Problem:
    """Each source is a test: statements that assert something of functions that the answer has (MBPP's `test_list`).

    setup: Python that all of them need, and `shown` whether the answer may have it, too. functions: those that the
    answer has; where nobody says it, what is not defined is the answer's. Raises ValueError for what is no Python, and
    for a test that asks nothing of an answer, or may do so by a name that is missing.
    """
    trees = [_without_nothing(parsed(source, f"its test {source[:80]!r}")) for source in sources]
    missing = _modules(trees) - defined(parsed(setup, "its setup"))
    setup = "\n".join([*(f"import {_CALLED.get(name, name)}" for name in sorted(missing)), setup]).strip()
    prepared = parsed(setup, "its setup")
    known = _BUILTIN | defined(prepared)
    tests: list[Test] = []
    names: set[str] = set()
    for source, tree in zip(sources, trees, strict=True):
        free = read(tree) - known - defined(tree)
        wanted = free & set(functions) if functions else free
        if not wanted:
            raise ValueError(f"its test {source[:80]!r} calls no function of an answer")
        simple = taken_apart(tree.body[0], wanted, shown) if len(tree.body) == 1 else None
        if odd := _missing(free, functions, simple):
            raise ValueError(f"its test {source[:80]!r} uses {', '.join(odd)}, which nothing defines")
        names |= wanted
        tests.append(simple or Judged(ast.unparse(tree)))
    if not tests:
        raise ValueError("it has no tests")
    given = setup if shown else ""
    late = bool(read(prepared) - known)  # of classes that the answer has
    return Problem(
        tuple(tests),
        before="" if late else given,
        behind=given if late else "",
        judge=setup,
        names=tuple(sorted(names)),
    )


def of_module(source: str, setup: str = "") -> Problem:
    """Tests as a text of Python: each function `test_..`, or else each assertion at the top, is one; what is left is
    for all of them. `from solution import f` says what the answer has. Raises ValueError as above."""
    module = parsed(source, "its test")
    imports = [one for one in module.body if isinstance(one, ast.ImportFrom) and one.module in _ANSWERS]
    named = [alias.name for one in imports for alias in one.names if alias.name != "*"]
    body = [one for one in module.body if one not in imports]
    chosen: list[ast.stmt] = [one for one in body if isinstance(one, ast.FunctionDef) and one.name.startswith("test")]
    if not chosen and all(isinstance(one, ast.Assert | ast.Import | ast.ImportFrom) or _text(one) for one in body):
        chosen = [one for one in body if isinstance(one, ast.Assert) and not _says_nothing(one)]
    if not chosen:
        return of_statements([ast.unparse(ast.Module(body, []))], setup, False, named)
    others = ast.unparse(ast.Module([one for one in body if one not in chosen], []))
    return of_statements(list(map(_as_statements, chosen)), f"{setup}\n{others}", False, named)


def of_check(test: str, entry: str, prompt: str) -> Problem:
    """HumanEval's: `test` defines `check(candidate)`, `entry` names the function, `prompt` is what it goes on from.

    Where `check` has assertions alone, each is a test. Raises ValueError as above.
    """
    module = parsed(test, "its test")
    checks = [one for one in module.body if isinstance(one, ast.FunctionDef) and one.name == "check"]
    if not checks or len(checks[-1].args.args) != 1:
        raise ValueError("its `test` defines no function check(candidate)")
    if not entry.isidentifier():
        raise ValueError(f"its `entry_point` {entry[:80]!r} is no name of a function")
    check = checks[-1]
    candidate = check.args.args[0].arg
    others = ast.unparse(ast.Module([one for one in module.body if one is not check and not _runs(one)], []))
    body = [_Renamed(candidate, entry).visit(one) for one in check.body]
    body = [one for one in body if not isinstance(one, ast.Pass) and not _text(one)]
    if all(isinstance(one, ast.Assert) for one in body):
        sources = [ast.unparse(one) for one in body if not _says_nothing(one)]
    else:
        check.args, check.body = ast.parse("lambda: 0", mode="eval").body.args, body  # type: ignore[attr-defined]
        sources = [_as_statements(check)]
    given = _without(prompt, entry)
    return replace(of_statements(sources, f"{given}\n{others}", False, [entry]), before=given, beginning=prompt)


def taken_apart(statement: ast.stmt, names: set[str], shown: bool = True) -> Call | None:
    """A call whose value is compared with a literal, if the assertion is no more than that.

    shown: whether the answer's box has the names that the test's setup defines, so that arguments may use them.
    """
    if not isinstance(statement, ast.Assert):
        return None
    test = statement.test
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not) and _calls(test.operand, names, shown):
        return Call(None, "false", ast.unparse(test.operand))
    if _calls(test, names, shown):
        return Call(None, "true", ast.unparse(test))
    if not isinstance(test, ast.Compare) or len(test.ops) != 1:
        return None
    sides = [test.left, test.comparators[0]]
    for call, other in (sides, sides[::-1]):
        if not _calls(call, names, shown):
            continue
        try:
            expected = ast.literal_eval(other)
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            continue
        if isinstance(test.ops[0], ast.Eq):
            return Call(expected, "equal", ast.unparse(call))
        if isinstance(test.ops[0], ast.Is) and (expected is None or isinstance(expected, bool)):
            return Call(expected, "is", ast.unparse(call))
    return None


def parsed(source: str, what: str) -> ast.Module:
    """Raises ValueError, which begins with `what`, for no Python."""
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        raise ValueError(f"{what} is no Python: {error}") from None


def defined(tree: ast.AST) -> set[str]:
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


def read(tree: ast.AST) -> set[str]:
    """Names that something in there reads: functions are not only called, as in `map(f, values)`."""
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}


def _calls(node: ast.expr, names: set[str], shown: bool) -> bool:
    """Whether it is a call of one of the names, and of nothing that the answer's box lacks."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name) or node.func.id not in names:
        return False
    return shown or not read(node) - names - _BUILTIN


def _says_nothing(statement: ast.stmt) -> bool:
    """`assert True, "..."`"""
    return isinstance(statement, ast.Assert) and isinstance(statement.test, ast.Constant) and bool(statement.test.value)


def _without_nothing(tree: ast.Module) -> ast.Module:
    return ast.Module([one for one in tree.body if not _says_nothing(one)], [])


def _modules(trees: Sequence[ast.Module]) -> set[str]:
    """Those whose members the tests name, as data sets often leave it to whoever runs them to import them."""
    bases = {
        node.value.id
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
    }
    return (bases - set().union(*map(defined, trees))) & (sys.stdlib_module_names | _CALLED.keys())


def _missing(free: set[str], functions: Sequence[str], simple: Call | None) -> list[str]:
    """Of the names that nothing defines, those that may be what a test compares by: `assert close(f(1), 2)`. An answer
    that had them would judge itself. Where it has to give a value, or they are classes, that is no matter."""
    if functions:
        return sorted(free - set(functions))
    if simple is not None and simple.by == "equal" and simple.expected is not None:
        if not isinstance(simple.expected, bool):
            return []
    functional = [name for name in sorted(free) if simple is None or not name[0].isupper()]
    return functional if len(functional) > 1 else []


def _text(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def _runs(statement: ast.stmt) -> bool:
    """A call at the top of HumanEval's tests, of `check` itself."""
    return isinstance(statement, ast.Expr) and "check" in read(statement)


def _as_statements(test: ast.stmt) -> str:
    if not isinstance(test, ast.FunctionDef):
        return ast.unparse(test)
    if taking := test.args.args:
        raise ValueError(f"its test {test.name} takes {taking[0].arg}, which nobody gives it")
    if len(test.body) == 1 and isinstance(test.body[0], ast.Assert):
        return ast.unparse(test.body[0])
    return f"{ast.unparse(test)}\n{test.name}()"


def _without(prompt: str, entry: str) -> str:
    """A prompt's imports and other functions: without the one that is asked for."""
    body = parsed(prompt, "its `prompt`").body
    return ast.unparse(ast.Module([one for one in body if getattr(one, "name", None) != entry], []))


class _Renamed(ast.NodeTransformer):
    """A parameter's name, replaced by the function's."""

    def __init__(self, old: str, new: str) -> None:
        self.old, self.new = old, new

    def visit_Name(self, node: ast.Name) -> Any:
        return ast.copy_location(ast.Name(self.new, node.ctx), node) if node.id == self.old else node
