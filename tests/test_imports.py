"""Rules of the architecture that the source can show: who imports whom, who asks for a GPU, how long files are."""

import ast
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FILES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted((ROOT / "megarl").rglob("*.py"))
}

# Lower layers come first. A module may import its own layer and those below.
LAYERS = (
    {"types", "config", "forks", "plain_yaml", "strict", "paths", "annotated", "command_line", "recipes"},
    {"algorithms", "models", "data", "parallel", "processes", "sandbox", "evaluation"},
    {"megatron", "rollout", "sessions", "rewards", "environments", "reshard", "checkpoint", "observe", "view"},
    {"workers"},
    {"controllers"},
    {
        "flow",
        "items",
        "evaluating",
        "keeping",
        "expected",
        "train",
        "__main__",
        "launching",
        "torchrun",
        "checking",
        "eval",
        "chat",
        "talking",
        "targets",
    },
)
LEVEL = {"": 0} | {name: level for level, names in enumerate(LAYERS) for name in names}  # "": the version

# Initialising Megatron's process groups on a machine without GPU needs Megatron-Core fitted to it.
EXCEPTIONS = {("megarl.parallel.ranks", "megarl.megatron")}

PURE = ("algorithms", "types", "models", "controllers")
PROCESSES = ("torch.distributed", "megatron", "sglang")


class Found(ast.NodeVisitor):
    """What a file imports, also inside of functions, but not what only a type checker imports."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def visit_If(self, node: ast.If) -> None:
        if "TYPE_CHECKING" in ast.unparse(node.test):
            for other in node.orelse:
                self.visit(other)
        else:
            self.generic_visit(node)

    def visit_Import(self, node: ast.Import) -> None:
        self.names |= {alias.name for alias in node.names}

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        assert node.level == 0, f"line {node.lineno}: relative import"
        self.names |= {f"{node.module}.{alias.name}" for alias in node.names}

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if ast.unparse(node) == "torch.distributed":  # `import torch` gives it, too
            self.names.add("torch.distributed")
        self.generic_visit(node)


@cache
def tree(module: str) -> ast.Module:
    return ast.parse(FILES[module].read_text(encoding="utf-8"))


@cache
def imports(module: str) -> frozenset[str]:
    found = Found()
    found.visit(tree(module))
    return frozenset(found.names)


def own(module: str) -> set[str]:
    """The modules of megarl that a module imports."""
    result = set()
    for name in imports(module):
        if name.split(".")[0] != "megarl":
            continue
        while name not in FILES:  # megarl.types.Prompt -> megarl.types
            name = name.rpartition(".")[0]
        result.add(name)
    return result - {module}


def part(module: str) -> str:
    """megarl.data.prompts -> data"""
    return (module.split(".") + [""])[1]


def starts(name: str, *prefixes: str) -> bool:
    return any(name == prefix or name.startswith(prefix + ".") for prefix in prefixes)


def test_the_source_was_found():
    assert {"megarl.types", "megarl.algorithms.kl", "megarl.flow", "megarl.train"} <= set(FILES)
    assert "megarl.types" in own("megarl.algorithms.policy_loss")
    assert own("megarl.controllers.ppo") >= {"megarl.algorithms.advantages", "megarl.controllers.base"}
    assert "megarl.flow" not in own("megarl.controllers.ppo")  # for the type checker only


def test_every_package_has_a_layer():
    assert {part(module) for module in FILES} - {""} <= set(LEVEL)


@pytest.mark.parametrize("module", FILES)
def test_imports_point_one_way(module):
    if module == "megarl":
        assert not own(module)
        return
    upward = {
        name for name in own(module) if LEVEL[part(name)] > LEVEL[part(module)] and (module, name) not in EXCEPTIONS
    }
    assert not upward, f"{module} imports {upward}, which are above it"


def test_exceptions_are_needed():
    for module, name in EXCEPTIONS:
        assert name in own(module)


def test_no_module_imports_itself_in_a_circle():
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " -> ".join([*path[path.index(module) :], module])
        if module not in done:
            for name in sorted(own(module)):
                visit(name, (*path, module))
            done.add(module)

    for module in FILES:
        visit(module, ())


@pytest.mark.parametrize("module", [module for module in FILES if part(module) in PURE])
def test_pure_parts_know_no_processes(module):
    assert not {name for name in imports(module) if starts(name, *PROCESSES)}


@pytest.mark.parametrize("module", [module for module in FILES if part(module) == "algorithms"])
def test_algorithms_know_the_types_and_torch_only(module):
    """And what the options of a loss may be."""
    known = (
        "__future__",
        "collections",
        "dataclasses",
        "math",
        "typing",
        "torch",
        "megarl.types",
        "megarl.strict",
        "megarl.algorithms",
    )
    assert not {name for name in imports(module) if not starts(name, *known)}


@pytest.mark.parametrize("module", FILES)
def test_only_the_device_seam_asks_for_a_gpu(module):
    path = FILES[module].relative_to(ROOT / "megarl")
    if path.parts[0] == "parallel" or "cpu" in str(path):
        return
    for node in ast.walk(tree(module)):
        if isinstance(node, ast.Attribute):
            assert not ast.unparse(node).endswith("cuda.is_available"), f"line {node.lineno}; ask parallel/device.py"
        if isinstance(node, ast.Compare):
            against = [item.value for item in (node.left, *node.comparators) if isinstance(item, ast.Constant)]
            assert not {"cpu", "cuda"} & set(against), f"line {node.lineno}; ask parallel/device.py"


@pytest.mark.parametrize("module", [module for module in FILES if FILES[module].name == "__init__.py"])
def test_every_package_says_what_lives_there(module):
    if "cpu_stubs" not in module:  # those stand in for packages of others
        assert len(ast.get_docstring(tree(module)) or "") > 40
