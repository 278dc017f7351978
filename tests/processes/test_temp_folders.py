"""Temporary folders are removed even after their owner was killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from megarl.processes import temp_folders
from megarl.processes.temp_folders import TempFolder

pytestmark = pytest.mark.alone

CREATE_FOLDER = """
import os, sys, time
from megarl.processes.temp_folders import TempFolder
folder = TempFolder("megarl-test-")
if os.fork():
    print(folder.path, flush=True)
time.sleep(600)
"""


def test_removes_only_abandoned_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(temp_folders, "_MAX_PATH_CHARS", 1000)
    monkeypatch.setattr(temp_folders.tempfile, "gettempdir", lambda: str(tmp_path))
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(
        [
            sys.executable,
            "-c",
            f"from megarl.processes import temp_folders as scratch; scratch._MAX_PATH_CHARS = 1000\n{CREATE_FOLDER}",
        ],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
    ) as creator:
        assert creator.stdout is not None
        abandoned = Path(creator.stdout.readline().strip())
        (abandoned / "file").write_text("x")
        public_folder = tmp_path / "megarl-test-public"
        public_folder.mkdir(mode=0o755)
        (tmp_path / "megarl-test-link").symlink_to(abandoned)
        TempFolder("megarl-test-").close()
        monkeypatch.setattr(temp_folders, "_MIN_AGE_S", -1.0)
        os.kill(creator.pid, signal.SIGKILL)
        creator.wait()
        TempFolder("megarl-test-").close()
        assert abandoned.exists(), "a forked process still holds it"
        os.killpg(creator.pid, signal.SIGKILL)
    cleared: list[str] = []
    for _ in range(100):
        TempFolder("megarl-test-", cleared.append)
        if cleared:
            break
    assert cleared == [str(abandoned)]
    with TempFolder("megarl-test-") as path:
        assert not abandoned.exists() and Path(path).stat().st_mode & 0o777 == 0o700
    assert not Path(path).exists() and public_folder.exists() and (tmp_path / "megarl-test-link").is_symlink()
