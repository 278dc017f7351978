"""docs/patches.md lists exactly the names of other packages that the source replaces."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.alone

ROOT = Path(__file__).resolve().parents[2]

PACKAGES = ("megatron", "sglang", "torch", "vllm")
PAGE = (ROOT / "docs" / "patches.md").read_text(encoding="utf-8")
DYNAMIC = {
    "rendezvous.TCPStore",
    "storage._load_from_bytes",
    "AttentionBackendRegistry.register",
    "Qwen3NextConfig.linear_num_key_heads_cpu",
    "Qwen3NextConfig.linear_num_value_heads_cpu",
}
"""Patches by other means than assignments to attributes and `vars()`, and `_patch`."""


def short(name: str) -> str:
    """megatron.core.tensor_parallel.random.f -> random.f"""
    return ".".join(name.split(".")[-2:])


def patched_names(source: str) -> Iterator[str]:
    """Yield the names of other packages to which a file assigns, as the last two parts of their dotted names."""
    if not re.search(rf"^\s*(import|from) ({'|'.join(PACKAGES)})\b", source, re.MULTILINE):
        return
    tree = ast.parse(source)
    imported: dict[str, str] = {}
    constants: dict[str, list[str]] = {}  # loop variables over literal names or modules
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported |= {alias.asname or alias.name.split(".")[0]: alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.For) and isinstance(node.target, ast.Name) and isinstance(node.iter, ast.Tuple):
            constants[node.target.id] = [ast.unparse(item).strip("'\"") for item in node.iter.elts]
    imported = {name: target for name, target in imported.items() if target.split(".")[0] in PACKAGES}
    imported |= {"cuda": "torch.cuda"} if "cuda = torch.cuda" in source else {}

    def dotted(node: ast.expr) -> Iterator[str]:
        """Yield what an expression of names and attributes stands for, if that belongs to one of the packages."""
        first, _, others = ast.unparse(node).partition(".")
        for name in constants.get(first, [first]):
            head, _, tail = name.partition(".")
            if head in imported:
                yield ".".join(filter(None, [imported[head], tail, others]))

    def of_vars(node: ast.expr) -> Iterator[str]:
        """Yield what the X of `vars(X)` stands for."""
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "vars":
            yield from dotted(node.args[0])

    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                for item in target.elts if isinstance(target, ast.Tuple) else [target]:
                    if isinstance(item, ast.Subscript) and isinstance(item.value, ast.Call):
                        key = ast.unparse(item.slice).strip("'")
                        yield from (short(f"{module}.{key}") for module in of_vars(item.value))
                        continue
                    owner = item.value if isinstance(item, ast.Subscript) else item
                    if isinstance(owner, ast.Attribute) or owner is not item:
                        yield from map(short, dotted(owner))
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "_patch":
            owner, name = node.args[:2]
            names = [str(name.value)] if isinstance(name, ast.Constant) else constants[ast.unparse(name)]
            yield from (short(f"{module}.{item}") for module in dotted(owner) for item in names)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "update":
            for module in of_vars(node.func.value):
                yield from (short(f"{module}.{keyword.arg}") for keyword in node.keywords if keyword.arg)


def listed_names() -> set[str]:
    cells = re.findall(r"^\| (`[^|]*) \|", PAGE, re.MULTILINE)
    return {name for cell in cells for name in re.findall(r"`([\w.]+\.\w+)`", cell)}


def test_page_lists_exactly_the_patches() -> None:
    found = {name for file in ROOT.glob("megarl/**/*.py") for name in patched_names(file.read_text(encoding="utf-8"))}
    found -= {"torch.compile"}  # while Megatron's choice of a compiler is imported
    found |= {"jit.jit_fuser"}  # Megatron's own switch sets it
    assert listed_names() == found | DYNAMIC


def test_finds_patches() -> None:
    source = """
import torch
from megatron.core.tensor_parallel import random as r, mappings
from own import thing
r.seed = 1
torch.cuda.synchronize, thing.x = None, 2
mappings.TABLE["cpu"] = 3
for name in ("zeros", "ones"):
    _patch(torch, name, None, "why")
for module in (r, mappings):
    _patch(module, "run", None, "why")
local.x = r.y
vars(mappings)["pickle"] = None
vars(r).update(draw=1, **thing)
"""
    names = [
        "random.seed",
        "cuda.synchronize",
        "mappings.TABLE",
        "torch.zeros",
        "torch.ones",
        "random.run",
        "mappings.run",
        "mappings.pickle",
        "random.draw",
    ]
    assert sorted(patched_names(source)) == sorted(names)


@pytest.mark.parametrize(
    "file", sorted(set(re.findall(r"`((?:cpu|megatron|parallel|engine|checkpoint)/\w+\.py)`", PAGE)))
)
def test_named_files_exist(file: str) -> None:
    assert (ROOT / "megarl" / file).is_file()
