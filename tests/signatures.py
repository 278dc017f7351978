"""Checks the names and keyword arguments that code uses of a package against the package's source.

Nothing is imported: much of it would need a GPU, and Transformer Engine is not installed without one.
"""

from __future__ import annotations

import ast
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

FUNCTION = ast.FunctionDef | ast.AsyncFunctionDef


def downloaded(package: str, version: str, folder: Path) -> Path | None:
    """Download and extract the wheel of a version; return its folder, or None if no package index has it."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--disable-pip-version-check"]
    command += ["--timeout", "10", "--retries", "1", "-d", str(folder), f"{package}=={version}"]
    if subprocess.run(command, capture_output=True, timeout=120).returncode:
        return None
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


class Found(NamedTuple):
    """A definition and its module. node: None for a module; the import statement for names of other packages."""

    module: str
    node: ast.AST | None


class Sources:
    """All modules below a folder, by dotted name."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._trees: dict[str, ast.Module | None] = {}

    def _path(self, module: str) -> Path:
        path = self.root.joinpath(*module.split("."))
        return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")

    def tree(self, module: str) -> ast.Module | None:
        if module not in self._trees:
            path, tree = self._path(module), None
            if path.is_file():
                tree = ast.parse(path.read_text(encoding="utf-8"))
            elif path.parent.is_dir() and path.name == "__init__.py":
                tree = ast.Module([], [])  # a folder without it is a package, too
            self._trees[module] = tree
        return self._trees[module]

    def find(self, module: str, name: str, seen: frozenset[tuple[str, str]] = frozenset()) -> Found | None:
        """Resolve `from module import name`; return None if it fails."""
        tree = self.tree(module)
        if tree is None or (module, name) in seen:
            return None
        seen |= {(module, name)}
        for node in _statements(tree.body):
            if isinstance(node, FUNCTION | ast.ClassDef) and node.name == name:
                return Found(module, node)
            if isinstance(node, ast.Assign | ast.AnnAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                if any(isinstance(target, ast.Name) and target.id == name for target in targets):
                    if isinstance(node.value, ast.Name) and (result := self.find(module, node.value.id, seen)):
                        return result
                    return Found(module, node)
            if isinstance(node, ast.ImportFrom):
                source = self._source(module, node)
                for alias in node.names:
                    if alias.name == "*" and not name.startswith("_") and (result := self.find(source, name, seen)):
                        return result
                    if (alias.asname or alias.name) == name:
                        if not node.level and self.tree(source.split(".")[0]) is None:
                            return Found(module, node)  # of another package, or compiled
                        return self.find(source, alias.name, seen) or self._module(f"{source}.{alias.name}")
        return self._module(f"{module}.{name}")

    def _module(self, name: str) -> Found | None:
        return Found(name, None) if self.tree(name) is not None else None

    def _source(self, module: str, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        package = module.split(".")
        if self._path(module).name != "__init__.py":
            package.pop()
        package = package[: len(package) - node.level + 1]
        return ".".join([*package, *([node.module] if node.module else [])])

    def dotted(self, name: str) -> Found | None:
        """Resolve a dotted name such as `transformer_engine.pytorch.Linear`, through imports."""
        first, *remaining = name.split(".")
        result = self._module(first)
        for part in remaining:
            if result is None:
                return None
            if isinstance(result.node, ast.ClassDef):
                result = self._member(result, part)
            elif result.node is None:
                result = self.find(result.module, part)
            elif not isinstance(result.node, ast.ImportFrom):
                return None
        return result

    def _member(self, owner: Found, name: str) -> Found | None:
        assert isinstance(owner.node, ast.ClassDef)
        for node in owner.node.body:
            if isinstance(node, FUNCTION) and node.name == name:
                return Found(owner.module, node)
            if isinstance(node, ast.Assign | ast.AnnAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                if any(isinstance(target, ast.Name) and target.id == name for target in targets):
                    return Found(owner.module, node)
        for base in owner.node.bases:
            above = self.find(owner.module, base.id) if isinstance(base, ast.Name) else None
            if above is not None and isinstance(above.node, ast.ClassDef) and (result := self._member(above, name)):
                return result
        return None

    def parameters(self, result: Found, method: str = "__init__") -> list[str] | None:
        """Return the parameters without `self`; None with `**kwargs`.

        Of a class, those of the method, or the fields of a dataclass and its bases.
        """
        node = result.node
        if isinstance(node, FUNCTION):
            return _arguments(node)
        assert isinstance(node, ast.ClassDef), result
        for item in node.body:
            if isinstance(item, FUNCTION) and item.name == method:
                return _arguments(item)
        annotated = [item.target for item in node.body if isinstance(item, ast.AnnAssign)]
        fields = [target.id for target in annotated if isinstance(target, ast.Name)]
        for base in node.bases:
            above = self.find(result.module, base.id) if isinstance(base, ast.Name) else None
            if above is not None and isinstance(above.node, ast.ClassDef):
                parent_parameters = self.parameters(above, method)
                return None if parent_parameters is None else fields + parent_parameters
        return fields


def _arguments(node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str] | None:
    if node.args.kwarg is not None:
        return None
    arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    return [element.arg for element in arguments if element.arg not in ("self", "cls")]


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield statements, including those inside `if`, `try` and `with`."""
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try | ast.With):
            yield from _statements(node.body)
            yield from _statements(getattr(node, "orelse", []))
            for handler in getattr(node, "handlers", []):
                yield from _statements(handler.body)


class Use(NamedTuple):
    """A use of a name, with the keyword arguments if it is a call."""

    line: int
    name: str
    method: str
    keywords: tuple[str, ...]

    def __str__(self) -> str:
        return f"line {self.line}: {self.name}" + (f".{self.method}" if self.method else "")


class Caller:
    """The source of a module that uses a package."""

    def __init__(self, path: Path, package: str) -> None:
        self.tree = ast.parse(path.read_text(encoding="utf-8"))
        self.package = package

    @cached_property
    def imported(self) -> dict[str, str]:
        """Map local names to dotted names in the package."""
        names: dict[str, str] = {}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    if alias.name.split(".")[0] == self.package:
                        names[alias.asname or alias.name.split(".")[0]] = alias.name if alias.asname else self.package
            elif (
                isinstance(node, ast.ImportFrom)
                and not node.level
                and (node.module or "").split(".")[0] == self.package
            ):
                names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
        return names

    def imports(self) -> Iterator[Use]:
        for node in ast.walk(self.tree):
            if (
                isinstance(node, ast.ImportFrom)
                and not node.level
                and (node.module or "").split(".")[0] == self.package
            ):
                for alias in node.names:
                    yield Use(node.lineno, f"{node.module}.{alias.name}", "", ())

    def chain(self, node: ast.AST) -> str | None:
        """Return the dotted name of an expression in the package, or None."""
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if isinstance(node, ast.Name) and node.id in self.imported:
            return ".".join([self.imported[node.id], *reversed(parts)])
        return None

    def attributes(self) -> Iterator[Use]:
        nested_names = {id(node.value) for node in ast.walk(self.tree) if isinstance(node, ast.Attribute)}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Attribute) and id(node) not in nested_names and (name := self.chain(node)):
                yield Use(node.lineno, name, "", ())

    def calls(self) -> Iterator[Use]:
        """Yield calls of imported names and of `super()` in subclasses, including keys set in `extra_kwargs`."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Call) and (name := self.chain(node.func)):
                yield Use(node.lineno, name, "", tuple(keyword.arg for keyword in node.keywords if keyword.arg))
            if isinstance(node, ast.ClassDef):
                for base in filter(None, map(self.chain, node.bases)):
                    yield from self._of_super(node, base)

    @staticmethod
    def _of_super(owner: ast.ClassDef, base: str) -> Iterator[Use]:
        for method in (item for item in owner.body if isinstance(item, FUNCTION)):
            for node in ast.walk(method):
                if (
                    isinstance(node, ast.Call)
                    and isinstance(node.func, ast.Attribute)
                    and isinstance(node.func.value, ast.Call)
                    and ast.unparse(node.func.value) == "super()"
                ):
                    yield Use(
                        node.lineno,
                        base,
                        node.func.attr,
                        tuple(keyword.arg for keyword in node.keywords if keyword.arg),
                    )
                if isinstance(node, ast.Subscript) and ast.unparse(node.value) == "extra_kwargs":
                    if isinstance(node.slice, ast.Constant):
                        yield Use(node.lineno, base, "__init__", (str(node.slice.value),))


def missing(sources: Sources, caller: Caller) -> Iterator[tuple[str, Use]]:
    """Yield the names, or names with arguments, that the package does not have."""
    for use in [*caller.imports(), *caller.attributes()]:
        if sources.dotted(use.name) is None:
            yield use.name, use
    for use in caller.calls():
        result = sources.dotted(use.name)
        if result is not None and isinstance(result.node, FUNCTION | ast.ClassDef):
            selected = sources.parameters(result, use.method or "__init__")
            for keyword in use.keywords if selected is not None else ():
                if keyword not in (selected or ()):
                    yield f"{use.name} {keyword}", use
