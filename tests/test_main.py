"""`python -m megarl`: what works here."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import megarl
from megarl import __main__ as page

ROOT = Path(__file__).resolve().parents[1]
pytestmark = pytest.mark.alone


def test_it_says_what_works_here() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "megarl"], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith(f"MegaRL {megarl.__version__}\n")
    for name in ("devices", "torch", "megatron-core", "sglang", "bubblewrap", "Slurm", "disk", "memory"):
        assert f"\n  {name}" in done.stdout, name
    assert done.stderr == "" and "MISSING" not in done.stdout


@pytest.mark.parametrize("program", ["megarl", "megarl.train", "megarl.eval", "megarl.torchrun"])
@pytest.mark.parametrize("option", ["-V", "--version"])
def test_version(program: str, option: str) -> None:
    command = [sys.executable, "-W", "ignore", "-m", program, option]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"MegaRL {megarl.__version__}\n", "")


def test_an_unknown_option_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert page.main(["--nonsense"]) == 2
    assert capsys.readouterr().err == "error: unrecognized arguments: --nonsense; see --help\n"


def test_nothing_heavy_is_imported() -> None:
    heavy = ("sglang", "megatron", "megatron.core", "transformers", "transformer_engine")
    probe = (
        f"import sys, megarl.__main__ as m; m.run_checks(); print([name for name in {heavy} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", probe], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


def test_what_is_missing_is_said_with_its_remedy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    known = page.installed_version
    monkeypatch.setattr(page, "installed_version", lambda name: "" if name == "sglang" else known(name))
    monkeypatch.setattr(page.shutil, "which", lambda name: None)
    assert page.main([]) == 1
    said = capsys.readouterr().out
    assert "missing: sglang. To install what is needed: bash launch/install.sh" in said
    assert (
        "not installed; the policy's code cannot run sandboxed on this machine" in said
        and "no sbatch on this machine" in said
    )
