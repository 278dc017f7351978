"""A run with marked secrets: its files, output, processes and open sockets expose none of them."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from training_run import ENVIRONMENT, ROOT, build_command, descendants, make_folder

sys.path.insert(0, str(ROOT / "tests/rewards"))
from reward_server import RewardServer  # noqa: E402

pytestmark = pytest.mark.nightly

MARK = "MARKED"
SECRETS = {
    "HF_TOKEN": f"hf_{MARK}1",
    "WANDB_API_KEY": f"{MARK}2",
    "JUDGE_OF_OURS": f"{MARK}3",
    "HOOK_OF_OURS": "",  # a URL
    "AWS_SECRET_ACCESS_KEY": f"{MARK}4",
}
# For every process that generates a key, such as an engine's or a session's.
FIXED_KEYS = f"import secrets\nsecrets.token_urlsafe = lambda length=32: '{MARK}-KEY-OF-AN-ENGINE'\n"
TRUSTED = "-m\0megarl.train"
"""Part of the command line of the launcher and the ranks, which have the secrets in their environment."""


def sockets(pid: int) -> set[str]:
    result = set()
    with contextlib.suppress(OSError):
        for link in os.scandir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                result.add(os.readlink(link.path).removeprefix("socket:[").removesuffix("]"))
    return result


def listening() -> dict[str, str]:
    """Return {inode: address and port as the kernel writes them} of sockets that listen beyond loopback."""
    result = {}
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            is_loopback = fields[1].startswith(("0100007F:", "00000000000000000000000001000000:"))
            if fields[3] == "0A" and not is_loopback:
                result[fields[9]] = fields[1]
    return result


class ProcessWatcher(threading.Thread):
    """Polls a process and its descendants for leaked secrets and exposed sockets until `done` is set."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self.pid, self.done = pid, False
        self.leaks: set[str] = set()
        self.open: set[str] = set()
        self.kinds: set[str] = set()

    def run(self) -> None:
        while not self.done:
            exposed = listening()
            for pid in descendants(self.pid):
                with contextlib.suppress(OSError):
                    line = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
                    environ = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")
                    command = line.replace("\0", " ")[:200]
                    self.kinds.add(command)
                    if MARK in line:
                        self.leaks.add(f"command line: {command}")
                    if TRUSTED not in line:
                        secrets = [text.split("=")[0] for text in environ.split("\0") if MARK in text]
                        self.leaks |= {f"environment of {command}: {name}" for name in secrets}
                    elif "-KEY-OF-" in environ:
                        self.leaks.add(f"key in the environment of {command}")
                self.open |= {f"{exposed[item]} of {pid}: {command}" for item in sockets(pid) & exposed.keys()}
            time.sleep(0.3)


def rollout_text(run_dir: Path) -> str:
    """Return the recorded rollouts as text; their files are compressed."""
    from megarl.observe.rollout_log import read_rollouts, recorded_steps

    return repr([list(read_rollouts(run_dir, step)) for step in recorded_steps(run_dir)])


@pytest.fixture(scope="module")
def run_result(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    workdir = tmp_path_factory.mktemp("secrets")
    folder = make_folder(workdir / "q", "qwen3_moe")
    (workdir / "site").mkdir()
    (workdir / "scratch").mkdir()
    (workdir / "site/sitecustomize.py").write_text(FIXED_KEYS)
    run_dir = workdir / "run"
    secrets = SECRETS | {"HOOK_OF_OURS": f"http://127.0.0.1:1/{MARK}5"}  # nobody listens, so it fails
    environment = ENVIRONMENT | secrets | {"TMPDIR": str(workdir / "scratch"), "MEGARL_WEBHOOK_PRIVATE": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(workdir / "site"), ENVIRONMENT["PYTHONPATH"]])
    with RewardServer() as judge:
        options = f"{{url: {judge.url}, private: true, auth_env: JUDGE_OF_OURS}}"
        command = build_command(
            folder,
            run_dir,
            *("algorithm=grpo", "run.num_rollout=2", "track.webhook=env:HOOK_OF_OURS"),
            *("roles={reward: {backend: http, options: " + options + "}}", "guards.alarms=true"),
            "rollout.tools=[megarl.environments.ready.calculator:calculator]",
        )
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        watch = ProcessWatcher(process.pid)
        watch.start()
        try:
            output, _ = process.communicate(timeout=500)
        finally:
            process.kill()  # ranks and engines end with it
            watch.done = True
            watch.join()
    assert process.returncode == 0, output[-4000:]
    return {"place": workdir, "run": run_dir, "output": output, "watch": watch, "judge": judge}


def test_secrets_are_used(run_result: dict[str, Any]) -> None:
    """Otherwise the other tests would prove nothing."""
    assert any(headers.get("Authorization") == f"Bearer {MARK}3" for headers in run_result["judge"].headers)
    assert "could not be posted to track.webhook" in (run_result["run"] / "log.txt").read_text()


def test_no_file_contains_a_secret(run_result: dict[str, Any]) -> None:
    files = [
        file for name in ("run", "scratch", "q") for file in (run_result["place"] / name).rglob("*") if file.is_file()
    ]
    assert len(files) > 20
    assert [str(file) for file in files if MARK.encode() in file.read_bytes()] == []
    text = rollout_text(run_result["run"])
    assert len(text) > 1000 and MARK not in text
    assert MARK not in run_result["output"]


def test_only_launcher_and_ranks_have_secrets(run_result: dict[str, Any]) -> None:
    kinds_seen = " ".join(run_result["watch"].kinds)
    assert "megarl.engine.engine_host" in kinds_seen and "megarl.processes" in kinds_seen, (
        kinds_seen
    )  # engines are forks of the host
    assert "torch_shm_manager" not in kinds_seen, (
        "torch starts it where a tensor is shared by a name, without being asked"
    )
    assert sorted(run_result["watch"].leaks) == []


def test_nothing_listens_beyond_loopback(run_result: dict[str, Any]) -> None:
    assert sorted(run_result["watch"].open) == []


def test_run_folder_is_private(run_result: dict[str, Any]) -> None:
    assert run_result["run"].stat().st_mode & 0o077 == 0
