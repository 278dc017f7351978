"""The report of `megarl doctor` on this machine."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import megarl
from megarl import doctor

ROOT = Path(__file__).resolve().parents[1]
pytestmark = pytest.mark.alone


def test_prints_environment_report() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "megarl"], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith(f"MegaRL {megarl.__version__}\n")
    for name in ("devices", "torch", "megatron-core", "sglang", "bubblewrap", "Slurm", "disk", "memory"):
        assert f"\n  {name}" in done.stdout, name
    assert done.stderr == "" and "MISSING" not in done.stdout


def test_unknown_option_is_a_one_line_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.main(["--nonsense"]) == 2
    assert capsys.readouterr().err == "error: unrecognized arguments: --nonsense; see --help\n"


def test_imports_no_heavy_packages() -> None:
    heavy = ("sglang", "megatron", "megatron.core", "transformers", "transformer_engine")
    probe = f"import sys, megarl.doctor as m; m.run_checks(); print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", probe], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


def test_missing_packages_are_reported_with_a_remedy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    installed_version = doctor.installed_version
    monkeypatch.setattr(doctor, "installed_version", lambda name: "" if name == "sglang" else installed_version(name))
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    assert doctor.main([]) == 1
    output = capsys.readouterr().out
    assert "missing: sglang. To install what is needed: bash launch/install.sh" in output
    assert (
        "not installed; the policy's code cannot run sandboxed on this machine" in output
        and "no sbatch on this machine" in output
    )
