"""`skips.awk` summarizes the reasons for skipped tests."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

OUTPUT = """\
.s..s [100%]
=========================== short test summary info ============================
SKIPPED [2] tests/slurm/conftest.py:105: no munged, slurmd; on Debian or Ubuntu: apt-get install slurm-wlm munge
SKIPPED [1] tests/rewards/test_pool.py:29: this machine has no bubblewrap
SKIPPED [3] tests/tools/test_bench.py:21: this machine has no bubblewrap
SKIPPED [1] tests/a/test_gpu.py: no NVIDIA GPU
FAILED tests/a/test_b.py::test_c - assert 1 == 2
4 passed, 7 skipped in 3 s
"""


def summarize(*texts: str, folder: Path) -> list[str]:
    files = []
    for number, text in enumerate(texts):
        files.append(folder / f"{number}.txt")
        files[-1].write_text(text)
    command = ["awk", "-f", str(ROOT / "tests/skips.awk"), *map(str, files)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()


def test_counts_skips_by_reason(tmp_path: Path) -> None:
    further = "SKIPPED [4] tests/a/test_gpu.py:7: no NVIDIA GPU\n"
    assert summarize(OUTPUT, further, folder=tmp_path) == [
        "skipped: 11",
        "     2  no munged, slurmd; on Debian or Ubuntu: apt-get install slurm-wlm munge (tests/slurm/conftest.py)",
        "     4  this machine has no bubblewrap (tests/rewards/test_pool.py tests/tools/test_bench.py)",
        "     5  no NVIDIA GPU (tests/a/test_gpu.py)",
    ]


def test_reports_when_nothing_was_skipped(tmp_path: Path) -> None:
    assert summarize("4 passed in 3 s\n", folder=tmp_path) == ["skipped: nothing"]


def test_sandbox_tests_skip_without_bubblewrap(tmp_path: Path) -> None:
    """PATH has no bwrap, docker or podman."""
    for program in "awk bash cat chmod env id ldd ls mkdir rm sh sleep timeout true".split():
        (tmp_path / program).symlink_to(shutil.which(program) or f"/bin/{program}")
    command = [sys.executable, "-m", "pytest", "-c", "tests/pytest.ini", "--rootdir", ".", "-q"]
    command += [f"tests/environments/test_{name}.py" for name in ("harbor", "adapters")]
    command += ["-k", "not server and not plays and not reuse", "-p", "no:cacheprovider"]
    environment = dict(os.environ, PATH=str(tmp_path))
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]
    assert done.stdout.count("there is no bubblewrap on this machine") == 8 and "FAILED" not in done.stdout
