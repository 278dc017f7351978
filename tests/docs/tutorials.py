"""Run tutorials from their own text: write the files that they show, then run their commands in order."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

from pages import ROOT, blocks, commands, files

NOT_RUN = ("sbatch ",)
"""Beginnings of commands that need what a test machine lacks."""


def make_checkout(folder: Path) -> Path:
    """Return a folder that looks like the repository's top, with its own `runs`."""
    folder.mkdir()
    for name in (".venv", "configs", "launch", "megarl", "slurm", "tools"):
        (folder / name).symlink_to(ROOT / name)
    return folder


def run_script(script: str, folder: Path, page: Path) -> str:
    """Run a bash script in a checkout; return its output."""
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=folder,
        env=dict(os.environ, PYTHONPATH=f"{folder}{os.pathsep}{ROOT}", OMP_NUM_THREADS="1"),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=1200,
    )
    assert done.returncode == 0, f"{page.name}: {script}\n{done.stdout[-6000:]}"
    return done.stdout


def write_files(page: Path, folder: Path) -> None:
    """Write the files that a page shows."""
    for name, content in files(page.read_text(encoding="utf-8")).items():
        (folder / name).write_text(content, encoding="utf-8")


def run_tutorial(page: Path, folder: Path) -> str:
    """Run a page's bash blocks in a folder that `make_checkout` made. Return their output."""
    write_files(page, folder)
    output = ""
    for block in blocks(page.read_text(encoding="utf-8")):
        if block.language == "bash":
            script = "\n".join(line for line in block.text.splitlines() if not line.startswith(NOT_RUN))
            output += run_script(script, folder, page)
    return output


def run_dry_runs(page: Path, folder: Path, *overrides: str) -> str:
    """Run a page's commands with --dry-run in a folder that `make_checkout` made. Return their output."""
    write_files(page, folder)
    all_words = [list(command.words) for command in commands(page.read_text(encoding="utf-8"))]
    return "".join(
        run_script(shlex.join([*words, *overrides]), folder, page) for words in all_words if "--dry-run" in words
    )
