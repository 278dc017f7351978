"""The example of megarl/sandbox/README.md runs, and the files that it names exist."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))
from sync_sandbox import needs_bubblewrap  # noqa: E402

pytestmark = pytest.mark.alone

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "megarl/sandbox/README.md").read_text(encoding="utf-8")


@needs_bubblewrap
def test_readme_example_runs():
    code = re.search(r"```python\n(.*?)```", README, re.S).group(1)
    assert len([line for line in code.splitlines() if line.strip()]) < 15
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=200)
    assert done.stdout == "b'cba\\n' {0: 0, 1: 1, 2: 4} 21\n\n", done.stderr


def test_readme_names_existing_files():
    for name in re.findall(r"`([\w/]+\.py)`", README):
        assert (ROOT / "megarl/sandbox" / name).exists() or (ROOT / name).exists(), name
