"""What MegaRL imports of Megatron-Core runs on Python 3.11, although its metadata asks for 3.12."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from functools import cache
from importlib.metadata import distribution
from pathlib import Path
from types import SimpleNamespace

import pytest

pytestmark = pytest.mark.alone

ROOT = Path(__file__).resolve().parents[2]
SITE = Path(str(distribution("megatron-core").locate_file("")))
STUBS = Path(str(distribution("mypy").locate_file("mypy/typeshed/stdlib")))
"""Stubs of the standard library, which say since which Python a module has a name."""
OLDEST = (3, 11)


class File:
    """What a file imports below `megatron`, also within functions, and its uses of a Python after OLDEST.

    package: the package of the file, for relative imports.
    """

    def __init__(self, source: str, package: str = "") -> None:
        self.imports: set[str] = set()
        self.newer: list[str] = []
        modules: dict[str, str] = {}  # of the standard library, by the names that they have in the file
        attributes = []
        for node in ast.walk(ast.parse(source, feature_version=OLDEST)):
            if isinstance(node, ast.Import):
                modules |= {alias.asname or alias.name: alias.name for alias in node.names}
                self.imports.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
                module = ".".join([*parents, *filter(None, [node.module])])
                self.imports.update(f"{module}.{alias.name}" for alias in node.names)
                attributes += [(module, alias.name) for alias in node.names]
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                attributes.append((node.value.id, node.attr))
        self.imports = {name for name in self.imports if name.split(".")[0] == "megatron"}
        for name, attribute in attributes:
            module = modules.get(name, name)
            if module.split(".")[0] in sys.stdlib_module_names and attribute in newer_names(module):
                self.newer.append(f"{module}.{attribute}")


def files_of(name: str) -> Iterator[tuple[str, Path]]:
    """Yield package and file of a module, or of the module that a name belongs to, and of its packages."""
    parts = name.split(".")
    for count in range(1, len(parts) + 1):
        path = SITE.joinpath(*parts[:count])
        if (path / "__init__.py").is_file():
            yield ".".join(parts[:count]), path / "__init__.py"
        elif path.with_suffix(".py").is_file():
            yield ".".join(parts[: count - 1]), path.with_suffix(".py")


def imported_files() -> dict[Path, File]:
    """Return the files of Megatron-Core that MegaRL imports, directly or through others."""
    own = [source for file in ROOT.glob("megarl/**/*.py") if "megatron.core" in (source := file.read_text())]
    names = {name for source in own for name in File(source).imports}
    result: dict[Path, File] = {}
    while names:
        for package, path in files_of(names.pop()):
            if path not in result:
                result[path] = File(path.read_text(encoding="utf-8"), package)
                names |= result[path].imports
    return result


@cache
def newer_names(module: str) -> frozenset[str]:
    """Return the names that a module of the standard library has only on a Python after OLDEST."""
    path = STUBS.joinpath(*module.split("."))
    path = path / "__init__.pyi" if path.is_dir() else path.with_suffix(".pyi")
    here: set[str] = set()
    later: set[str] = set()
    python = {"sys": SimpleNamespace(version_info=OLDEST, platform="linux")}

    def collect(statements: list[ast.stmt], names: set[str]) -> None:
        for node in statements:
            if isinstance(node, ast.If):
                is_here = eval(ast.unparse(node.test), {}, python)
                collect(node.body, names if is_here else later)
                collect(node.orelse, later if is_here else names)
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                names.add(node.name)
            elif isinstance(node, ast.AnnAssign | ast.Assign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                names.update(target.id for target in targets if isinstance(target, ast.Name))
            elif isinstance(node, ast.ImportFrom) and node.names[0].name == "*":
                later.update(newer_names(node.module or ""))
            elif isinstance(node, ast.Import | ast.ImportFrom):
                names.update(alias.asname or alias.name for alias in node.names)

    if path.is_file():
        collect(ast.parse(path.read_text(encoding="utf-8")).body, here)
    return frozenset(later - here)


def test_what_is_imported_of_megatron_needs_no_newer_python() -> None:
    files = {str(path.relative_to(SITE)): file for path, file in imported_files().items()}
    for name in ("models/gpt/gpt_model.py", "optimizer/distrib_optimizer.py", "transformer/moe/router.py"):
        assert f"megatron/core/{name}" in files
    assert {name: file.newer for name, file in files.items() if file.newer} == {}


@pytest.mark.parametrize(
    ("source", "newer"),
    [
        ("from typing import override, Any", ["typing.override"]),
        ("import itertools as i\ni.batched('abc', 2), i.chain()", ["itertools.batched"]),
        ("def f():\n    from collections.abc import Buffer", ["collections.abc.Buffer"]),
        ("from warnings import deprecated, warn", ["warnings.deprecated"]),
        ("from typing_extensions import override\nimport os.path\nos.path.join('a'), os.cpu_count()", []),
    ],
)
def test_finds_names_of_newer_pythons(source: str, newer: list[str]) -> None:
    assert File(source).newer == newer


def test_finds_syntax_of_newer_pythons() -> None:
    with pytest.raises(SyntaxError):
        File("type Pair = tuple[int, int]")


def test_follows_imports() -> None:
    file = File(
        "from .moe import router\nfrom ..utils import log\nimport megatron.core, torch", "megatron.core.transformer"
    )
    assert file.imports == {"megatron.core.transformer.moe.router", "megatron.core.utils.log", "megatron.core"}
