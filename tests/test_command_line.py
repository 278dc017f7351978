"""Printed commands can be pasted into a terminal."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from megarl.config import command_line
from megarl.config.command_line import default_output_file, format_command

ROOT = Path(__file__).resolve().parent.parent


def test_format_command_uses_this_interpreter_and_quotes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(command_line, "_PYTHON", ROOT / ".venv/bin/python")
    monkeypatch.chdir(ROOT)
    assert format_command("tools/bench.py", "runs/my run") == ".venv/bin/python tools/bench.py 'runs/my run'"
    monkeypatch.chdir(tmp_path)
    python, program, folder = shlex.split(format_command("tools/bench.py", Path("runs/it's")))
    assert (python, program) == (
        str(ROOT / ".venv/bin/python"),
        str(ROOT / "tools/bench.py"),
    ) and folder == "runs/it's"
    assert format_command("tools/no_such.py") == ""


def test_format_command_of_megarl_needs_no_script(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    python = tmp_path / "bin/python"
    python.parent.mkdir()
    monkeypatch.setattr(command_line, "_PYTHON", python)
    monkeypatch.chdir(tmp_path)
    assert format_command("megarl report", "runs/my run") == "bin/python -m megarl report 'runs/my run'"
    (python.parent / "megarl").touch()
    assert format_command("megarl report", "runs/my run") == "bin/megarl report 'runs/my run'"


def test_default_output_file_names_all_runs() -> None:
    assert default_output_file([Path("runs/a")], "view.html") == Path("runs/a/view.html")
    assert default_output_file([Path("runs/a"), Path("runs/b")], "view.html") == Path("runs/a/view_b.html")
    assert len(default_output_file([Path("a"), *[Path("run" * 20)] * 9], "view.html").name) < 100
