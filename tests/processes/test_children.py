"""Find and end orphans, in a subprocess because the test reaps all children."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.alone

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import os, subprocess, sys, time
from megarl.processes.children import end_orphans, list_children
from megarl.processes.children import inherit_orphans
inherit_orphans()
assert list_children() == [] and end_orphans((), 0.0) == []
spared = subprocess.Popen(["sleep", "600"])
middle = subprocess.Popen(["sh", "-c", "sleep 600 & sleep 600 & wait"], start_new_session=True)
quick = subprocess.Popen(["sleep", "0.1"])
while len(open(f"/proc/{middle.pid}/task/{middle.pid}/children").read().split()) < 2:
    time.sleep(0.01)
inner = [int(pid) for pid in open(f"/proc/{middle.pid}/task/{middle.pid}/children").read().split()]
os.kill(middle.pid, 9)  # this process inherits its children
killed = end_orphans([spared.pid], 0.5)
assert sorted(killed) == sorted(inner), (killed, inner)
assert list_children() == [spared.pid]
spared.kill()
print("ok")
"""


def test_kills_orphans_after_a_timeout_except_given_pids() -> None:
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr
