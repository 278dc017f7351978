"""Run tutorials from their own text: write the files that they show, then run their commands in order."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from pages import ROOT, blocks, files

NOT_RUN = ("sbatch ",)
"""Beginnings of commands that need what a test machine lacks."""


def make_checkout(folder: Path) -> Path:
    """Return a folder that looks like the repository's top, with its own `runs`."""
    folder.mkdir()
    for name in (".venv", "configs", "launch", "megarl", "slurm", "tools"):
        (folder / name).symlink_to(ROOT / name)
    return folder


def run_tutorial(page: Path, folder: Path) -> str:
    """Run a page's bash blocks in a folder that `make_checkout` made. Return their output."""
    text = page.read_text(encoding="utf-8")
    for name, content in files(text).items():
        (folder / name).write_text(content, encoding="utf-8")
    environment = dict(os.environ, PYTHONPATH=f"{folder}{os.pathsep}{ROOT}", OMP_NUM_THREADS="1")
    output = ""
    for block in blocks(text):
        if block.language != "bash":
            continue
        script = "\n".join(line for line in block.text.splitlines() if not line.startswith(NOT_RUN))
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", script],
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=1200,
        )
        output += done.stdout
        assert done.returncode == 0, f"{page.name}: {script}\n{output[-6000:]}"
    return output
