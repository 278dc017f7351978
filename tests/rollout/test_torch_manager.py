"""What torch starts beside a process that shares tensors has none of its secrets."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.alone

ROOT = Path(__file__).resolve().parents[2]
SHARES = r"""
import os, pickle
from pathlib import Path
import torch
from megarl.rollout import engine_cpu
data = engine_cpu.pack([("a", torch.arange(3)), ("b", torch.ones(2))])
engine_cpu.pack([("c", torch.ones(2))])
print([(name, tensor.tolist()) for name, tensor in pickle.loads(data)])
assert os.environ["HF_TOKEN"] == "hf_MARKED"
assert os.system('test "$HF_TOKEN" = hf_MARKED') == 0, "what this process starts later has its environment again"
for task in Path("/proc/self/task").iterdir():
    for child in (task / "children").read_text().split():
        line = Path(f"/proc/{child}/cmdline").read_bytes().decode()
        environ = Path(f"/proc/{child}/environ").read_bytes().decode().split("\0")
        print(Path(line.strip("\0")).name, sorted(text.split("=")[0] for text in environ if text))
"""


def test_the_manager_of_shared_tensors_has_only_what_it_needs(tmp_path: Path) -> None:
    known = {"HF_TOKEN": "hf_MARKED", "JUDGE_OF_OURS": "MARKED", "TMPDIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    environment = {"PATH": os.environ["PATH"], **known}
    ended = subprocess.run([sys.executable, "-c", SHARES], env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    shared, *managers = ended.stdout.splitlines()
    assert shared == "[('a', [0, 1, 2]), ('b', [1.0, 1.0])]"
    assert managers == ["torch_shm_manager ['PATH', 'TMPDIR']"], "one, however often something is shared"
