"""Documented commands work as written after `bash launch/install.sh`."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from megarl.__main__ import COMMANDS
from megarl.observe.run_folder import README as RUN_FOLDER

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests/docs"))

from pages import PLANNED, pages  # noqa: E402

PYTHON = re.compile(r"(\S*\bpython3?) +(-m +[\w.]+|[\w./]+\.py)")
MEGARL = re.compile(r"\.venv/bin/megarl +([a-z]\S*[a-z])")
SHELL = re.compile(r"\b(bash|sbatch)((?: --?\S+)*) +([\w./]+\.sh)")
BARE = re.compile(r"(?:^|`|: )\s*(torchrun +\S|tools/\w+\.py +[-A-Z]|launch/\w+\.\w+ +[-A-Z])", re.MULTILINE)
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def read_texts() -> Iterator[tuple[str, str]]:
    """Yield documentation: pages, docstrings, comments of scripts and configs, and the README of run folders."""
    for page in pages():
        yield str(page.relative_to(ROOT)), re.sub("<!--.*?-->|^```.*$", "", page.read_text(), flags=re.MULTILINE)
    yield "run folder", RUN_FOLDER
    for folder in ("megarl", "tools", "launch"):
        for path in (ROOT / folder).rglob("*.py"):
            nodes = ast.walk(ast.parse(path.read_text()))
            docstrings = [ast.get_docstring(node) for node in nodes if isinstance(node, DOCUMENTED)]
            yield str(path.relative_to(ROOT)), "\n".join(text for text in docstrings if text)
    for path in [*ROOT.glob("launch/*.sh"), *ROOT.glob("slurm/*.sh"), *ROOT.glob("configs/**/*.yaml")]:
        comments = re.findall(r"#(.*)", path.read_text())
        yield str(path.relative_to(ROOT)), "\n".join(comments)


def find_programs() -> set[str]:
    """Find the programs that documented commands run: `-m module`, also of `megarl COMMAND`, or a file."""
    texts = [text for _, text in read_texts()]
    actual = {" ".join(program.split()) for text in texts for _, program in PYTHON.findall(text)}
    actual |= {f"-m {COMMANDS[name].module}" for text in texts for name in MEGARL.findall(text) if name in COMMANDS}
    return {program for program in actual if program not in PLANNED or get_program_file(program).is_file()}


def get_program_file(program: str) -> Path:
    if program.startswith("-m "):
        path = ROOT / program.removeprefix("-m ").replace(".", "/")
        return path / "__main__.py" if path.is_dir() else path.with_name(f"{path.name}.py")
    return ROOT / program


INTERNAL_PROGRAMS = (
    "-m megarl.engine.engine_host",
    "-m megarl.processes.forkserver",
)  # started by MegaRL
EXTERNAL_PROGRAMS = ("-m venv",)  # run by the system's Python


@pytest.mark.alone
@pytest.mark.parametrize(("page", "text"), [pytest.param(*item, id=item[0]) for item in read_texts() if item[1]])
def test_documented_programs_exist(page: str, text: str) -> None:
    for python, program in PYTHON.findall(text):
        program = " ".join(program.split())
        if program.startswith("my_"):  # written by the reader
            continue
        documented = python.lstrip("`$(") == ".venv/bin/python"
        assert documented or program in (*INTERNAL_PROGRAMS, *EXTERNAL_PROGRAMS), f"{page}: {python} {program}"
        if program not in PLANNED and (program.startswith("-m megarl.") or not program.startswith("-m")):
            assert get_program_file(program).is_file(), f"{page}: {program}"
    assert set(MEGARL.findall(text)) <= set(COMMANDS), page
    for _, _, script in SHELL.findall(text):
        assert (ROOT / script).is_file(), f"{page}: {script}"
    assert not BARE.findall(text), f"{page}: {BARE.findall(text)}"


@pytest.mark.alone
def test_every_program_is_documented() -> None:
    actual = find_programs()
    assert {"-m megarl.train", "-m megarl.torchrun", "launch/ppo_hello.py"} - actual == {
        "launch/ppo_hello.py"  # an argument of torchrun
    }
    undocumented = {name for name, command in COMMANDS.items() if f"-m {command.module}" not in actual}
    assert undocumented <= {"completion", "recipes"}  # in CHANGELOG.md and in the help of `megarl`
    # Imported by other tools.
    parts = {f"tools/{name}.py" for name in ("local_ranks", "trials")}
    assert {f"tools/{path.name}" for path in ROOT.glob("tools/*.py")} - actual == parts


def test_programs_print_help(run_ranks: Callable[..., list[dict[str, Any]]]) -> None:
    documented = sorted(program for program in find_programs() if program.startswith(("-m megarl.", "tools/")))
    (result,) = run_ranks(
        1, "tests/launch/ranks_help.py", *[item for item in documented if item not in INTERNAL_PROGRAMS]
    )
    assert result["codes"] == {item: 0 for item in documented if item not in INTERNAL_PROGRAMS}
    assert all("usage: " in output for output in result["outputs"].values())
