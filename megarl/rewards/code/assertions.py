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

_BUILTIN = frozenset(dir(builtins))


def of_statements(sources: Sequence[str], setup: str = "", shown: bool = True) -> Problem:
    """Each source is a test: statements that assert something of functions that the answer has (MBPP's `test_list`).

    setup: Python that all of them need, and `shown` whether the answer may have it, too. Raises ValueError for what is
    no Python, and for a test that says nothing of an answer.
    """
    trees = [_without_nothing(parsed(source, f"its test {source[:80]!r}")) for source in sources]
    setup = "\n".join([*_imports(trees), setup]).strip()
    known = _BUILTIN | defined(parsed(setup, "its setup"))
    tests: list[Test] = []
    names: set[str] = set()
    for source, tree in zip(sources, trees, strict=True):
        wanted = called(tree) - known - defined(tree)
        if not wanted:
            raise ValueError(f"its test {source[:80]!r} calls no function of an answer")
        names |= wanted
        simple = taken_apart(tree.body[0], wanted, shown) if len(tree.body) == 1 else None
        tests.append(simple or Judged(ast.unparse(tree)))
    if not tests:
        raise ValueError("it has no tests")
    return Problem(tuple(tests), before=setup if shown else "", judge=setup, names=tuple(sorted(names)))


def of_module(source: str, setup: str = "") -> Problem:
    """Tests as a text of Python: each function `test_..`, or else each assertion at the top, is one; what is left is
    for all of them. Raises ValueError as above."""
    body = [one for one in parsed(source, "its test").body if not _imports_the_answer(one)]
    functions = [one for one in body if isinstance(one, ast.FunctionDef) and one.name.startswith("test")]
    if functions:
        if taking := [one.name for one in functions if one.args.args]:
            raise ValueError(f"its test {taking[0]} takes arguments, which nobody gives it")
        others = ast.unparse(ast.Module([one for one in body if one not in functions], []))
        return of_statements([_as_statements(one) for one in functions], f"{setup}\n{others}", shown=False)
    straight = all(isinstance(one, ast.Assert | ast.Import | ast.ImportFrom) for one in body)
    if straight:
        asserts = [one for one in body if isinstance(one, ast.Assert) and not _says_nothing(one)]
        others = ast.unparse(ast.Module([one for one in body if not isinstance(one, ast.Assert)], []))
        return of_statements(list(map(ast.unparse, asserts)), f"{setup}\n{others}", shown=False)
    return of_statements([ast.unparse(ast.Module(body, []))], setup, shown=False)


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
    return replace(of_statements(sources, f"{given}\n{others}", shown=False), before=given, beginning=prompt)


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


def called(tree: ast.AST) -> set[str]:
    """Names that something in there reads: functions are handed on, too, as in `map(f, values)`."""
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}


def _calls(node: ast.expr, names: set[str], shown: bool) -> bool:
    """Whether it is a call of one of the names, and of nothing that the answer's box lacks."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name) or node.func.id not in names:
        return False
    return shown or not called(node) - names - _BUILTIN


def _says_nothing(statement: ast.stmt) -> bool:
    """`assert True, "..."`"""
    return isinstance(statement, ast.Assert) and isinstance(statement.test, ast.Constant) and bool(statement.test.value)


def _without_nothing(tree: ast.Module) -> ast.Module:
    return ast.Module([one for one in tree.body if not _says_nothing(one)], [])


def _imports(trees: Sequence[ast.Module]) -> list[str]:
    """Of modules whose members the tests name, as data sets often leave it to whoever runs them."""
    bases = {
        node.value.id
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
    }
    bases -= set().union(*map(defined, trees))
    modules = [f"import {name}" for name in sorted(bases & sys.stdlib_module_names)]
    return [*modules, *(["import numpy as np"] if "np" in bases else [])]


def _text(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def _runs(statement: ast.stmt) -> bool:
    """A call at the top of HumanEval's tests, of `check` itself."""
    return isinstance(statement, ast.Expr) and "check" in called(statement)


def _imports_the_answer(statement: ast.stmt) -> bool:
    """`from solution import f`: it is there without."""
    return isinstance(statement, ast.ImportFrom) and statement.module in ("solution", "answer", "main", "__main__")


def _as_statements(function: ast.FunctionDef) -> str:
    if len(function.body) == 1 and isinstance(function.body[0], ast.Assert):
        return ast.unparse(function.body[0])
    return f"{ast.unparse(function)}\n{function.name}()"


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
