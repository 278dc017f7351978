"""Architecture rules, checked by parsing the source: layers of imports, pure packages and GPU queries."""

import ast
from functools import cache
from pathlib import Path

import pytest

pytestmark = pytest.mark.alone

ROOT = Path(__file__).resolve().parent.parent
FILES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted((ROOT / "megarl").rglob("*.py"))
}

# Lowest layer first. A module may import its own package and packages of lower layers, nothing else.
LAYERS = (
    {"config", "utils"},
    {"processes", "types"},
    {"algorithms", "data", "parallel", "sandbox"},
    {"environments", "launch", "models"},
    {"chat_format", "cpu", "reshard", "rewards", "torchrun", "doctor", "__main__"},
    {"checkpoint", "item_reader", "engine"},
    {"megatron"},
    {"rollout"},
    {"observe"},
    {"view", "workers"},
    {"controllers"},
    {"checkpointing", "dry_run"},
    {"flow", "model_sources"},
    {"rehearse"},
    {"chat_conversation", "train"},
    {"chat", "evaluators", "model_card"},
    {"eval", "push", "serve", "sweep", "completion"},
)
LEVEL = {"": 0} | {name: level for level, names in enumerate(LAYERS, 1) for name in names}  # "": the version

# Megatron-Core must be patched for machines without a GPU before its process groups are created.
EXCEPTION = ("megarl.parallel.ranks", "megarl.megatron")

PURE = ("algorithms", "types", "models", "controllers")
PROCESSES = ("torch.distributed", "megatron", "sglang", "vllm")


class Imports(ast.NodeVisitor):
    """Collects the names that a file imports, also inside functions, except under TYPE_CHECKING."""

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
        if ast.unparse(node) == "torch.distributed":  # also available after `import torch`
            self.names.add("torch.distributed")
        self.generic_visit(node)


@cache
def tree(module: str) -> ast.Module:
    return ast.parse(FILES[module].read_text(encoding="utf-8"))


@cache
def imports(module: str) -> frozenset[str]:
    visitor = Imports()
    visitor.visit(tree(module))
    return frozenset(visitor.names)


def imported_modules(module: str) -> set[str]:
    """Return the modules of megarl that a module imports."""
    result = set()
    for name in imports(module):
        if name.split(".")[0] != "megarl":
            continue
        while name not in FILES:  # megarl.types.Prompt -> megarl.types
            name = name.rpartition(".")[0]
        result.add(name)
    return result - {module}


def package(module: str) -> str:
    """megarl.data.datasets -> data"""
    return (module.split(".") + [""])[1]


def starts_with(name: str, *prefixes: str) -> bool:
    return any(name == prefix or name.startswith(prefix + ".") for prefix in prefixes)


def test_finds_the_source() -> None:
    assert {"megarl.types", "megarl.algorithms.kl", "megarl.flow", "megarl.train"} <= set(FILES)
    assert "megarl.types" in imported_modules("megarl.algorithms.policy_losses")
    assert imported_modules("megarl.controllers.ppo") >= {
        "megarl.algorithms.advantages",
        "megarl.controllers.controller",
    }
    assert "megarl.flow" not in imported_modules("megarl.controllers.ppo")  # for the type checker only
    assert {package(module) for module in FILES} == set(LEVEL)


def test_imports_point_down() -> None:
    upward_imports = {
        (module, name)
        for module in FILES
        for name in imported_modules(module)
        if package(module) != package(name) and LEVEL[package(name)] >= LEVEL[package(module)] and package(name)
    }
    assert upward_imports == {EXCEPTION}


def test_no_import_cycles() -> None:
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " -> ".join([*path[path.index(module) :], module])
        if module not in done:
            for name in sorted(imported_modules(module)):
                visit(name, (*path, module))
            done.add(module)

    for module in FILES:
        visit(module, ())


def test_file_names_are_unique() -> None:
    """A name in a traceback or a comment identifies one file."""
    names = [path.name for path in FILES.values() if path.name not in ("__init__.py", "__main__.py")]
    assert {name for name in names if names.count(name) > 1} == set()


def test_pure_packages_import_no_distributed_code() -> None:
    dependencies = {
        (module, name)
        for module in FILES
        if package(module) in PURE
        for name in imports(module)
        if starts_with(name, *PROCESSES)
    }
    assert not dependencies


def test_only_its_folder_imports_an_engine() -> None:
    """Everything else knows engines by `engine_protocol`, except that tool calls have SGLang's parsers."""
    users = {
        module
        for module in FILES
        for name in imports(module)
        if starts_with(name, "sglang", "megarl.engine.sglang")
        and not starts_with(module, "megarl.engine.sglang", "megarl.cpu")
    }
    assert users == {"megarl.engine.tool_calls", "megarl.dry_run.data_checks", "megarl.engine.vllm.vllm_server"}
    assert not {
        module
        for module in FILES
        for name in imports(module)
        if starts_with(name, "vllm", "megarl.engine.vllm") and not starts_with(module, "megarl.engine.vllm")
    }


def test_algorithms_import_types_and_torch_only() -> None:
    """They may also import the types of a loss's options."""
    stdlib = ("__future__", "bisect", "collections", "dataclasses", "math", "typing")
    allowed = (*stdlib, "torch", "megarl.types", "megarl.config.strict", "megarl.algorithms")
    dependencies = {name for module in FILES if package(module) == "algorithms" for name in imports(module)}
    assert not {name for name in dependencies if not starts_with(name, *allowed)}


def test_only_the_device_module_queries_the_gpu() -> None:
    for module, path in FILES.items():
        if package(module) in ("parallel", "cpu") or "cpu" in path.name:
            continue
        for node in ast.walk(tree(module)):
            location = f"{path}:{getattr(node, 'lineno', 0)}: ask parallel/device.py"
            if isinstance(node, ast.Attribute):
                assert not ast.unparse(node).endswith("cuda.is_available"), location
            if isinstance(node, ast.Compare):
                literals = [item.value for item in (node.left, *node.comparators) if isinstance(item, ast.Constant)]
                assert not {"cpu", "cuda"} & set(literals), location


def test_every_package_has_a_docstring() -> None:
    for module, path in FILES.items():
        if path.name == "__init__.py" and "megarl.cpu.stubs" not in module:  # stubs stand in for other packages
            assert len(ast.get_docstring(tree(module)) or "") > 40, module
