"""A real run with secrets that are marked: what it writes, starts and listens at has none of them."""

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
from whole_run import ENVIRONMENT, ROOT, command_of, make_folder

sys.path.insert(0, str(ROOT / "tests/rewards"))
from judging_server import RewardServer  # noqa: E402

MARK = "MARKED"
HELD = {
    "HF_TOKEN": f"hf_{MARK}1",
    "WANDB_API_KEY": f"{MARK}2",
    "JUDGE_OF_OURS": f"{MARK}3",
    "HOOK_OF_OURS": "",  # a URL
    "AWS_SECRET_ACCESS_KEY": f"{MARK}4",
}
# Of every process that makes a key of its own, as for an engine or a session.
KEYS = f"import secrets\nsecrets.token_urlsafe = lambda length=32: '{MARK}-KEY-OF-AN-ENGINE'\n"
GIVEN = "-m\0megarl.train"
"""In the command line of those that the user has given the secrets to: the launcher and the ranks."""


def descendants(pid: int) -> list[int]:
    result, todo = [], [pid]
    while todo:
        result.append(todo.pop())
        for task in Path(f"/proc/{result[-1]}/task").glob("*"):
            with contextlib.suppress(OSError):
                todo += map(int, (task / "children").read_text().split())
    return result


def sockets(pid: int) -> set[str]:
    result = set()
    with contextlib.suppress(OSError):
        for link in os.scandir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                result.add(os.readlink(link.path).removeprefix("socket:[").removesuffix("]"))
    return result


def listening() -> dict[str, str]:
    """Sockets that listen beyond the loopback, by inode: address and port as the kernel writes them."""
    result = {}
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            near = fields[1].startswith(("0100007F:", "00000000000000000000000001000000:"))
            if fields[3] == "0A" and not near:
                result[fields[9]] = fields[1]
    return result


class Watch(threading.Thread):
    """Looks at a process and all that come of it, while they run."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self.pid, self.done = pid, False
        self.leaks: set[str] = set()
        self.open: set[str] = set()
        self.kinds: set[str] = set()

    def run(self) -> None:
        while not self.done:
            beyond = listening()
            for pid in descendants(self.pid):
                with contextlib.suppress(OSError):
                    line = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
                    environ = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")
                    said = line.replace("\0", " ")[:200]
                    self.kinds.add(said)
                    if MARK in line:
                        self.leaks.add(f"command line: {said}")
                    if GIVEN not in line:
                        retained = [text.split("=")[0] for text in environ.split("\0") if MARK in text]
                        self.leaks |= {f"environment of {said}: {name}" for name in retained}
                    elif "-KEY-OF-" in environ:
                        self.leaks.add(f"key in the environment of {said}")
                self.open |= {f"{beyond[item]} of {pid}: {said}" for item in sockets(pid) & beyond.keys()}
            time.sleep(0.3)


def words_of(run_dir: Path) -> str:
    """What rollouts are recorded as, whose files are compressed."""
    from megarl.observe.rollout_log import read_rollouts, recorded_steps

    return repr([list(read_rollouts(run_dir, step)) for step in recorded_steps(run_dir)])


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    place = tmp_path_factory.mktemp("secrets")
    folder = make_folder(place / "q", "qwen3_moe")
    (place / "site").mkdir()
    (place / "scratch").mkdir()
    (place / "site/sitecustomize.py").write_text(KEYS)
    run_dir = place / "run"
    retained = HELD | {"HOOK_OF_OURS": f"http://127.0.0.1:1/{MARK}5"}  # where nobody is, so that it fails
    environment = ENVIRONMENT | retained | {"TMPDIR": str(place / "scratch"), "MEGARL_WEBHOOK_PRIVATE": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(place / "site"), ENVIRONMENT["PYTHONPATH"]])
    with RewardServer() as judge:
        options = f"{{url: {judge.url}, private: true, auth_env: JUDGE_OF_OURS}}"
        command = command_of(
            folder,
            run_dir,
            *("algorithm=grpo", "run.num_rollout=2", "track.webhook=env:HOOK_OF_OURS"),
            *("roles={reward: {backend: http, options: " + options + "}}", "guards.alarms=true"),
            "rollout.tools=[megarl.environments.ready.calculator:calculator]",
        )
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        watch = Watch(process.pid)
        watch.start()
        try:
            said, _ = process.communicate(timeout=500)
        finally:
            process.kill()  # and with it its ranks and engines, where it is late
            watch.done = True
            watch.join()
    assert process.returncode == 0, said[-4000:]
    return {"place": place, "run": run_dir, "said": said, "watch": watch, "judge": judge}


def test_the_secrets_were_used(ran: dict[str, Any]) -> None:
    """Else the rest would prove nothing."""
    assert any(headers.get("Authorization") == f"Bearer {MARK}3" for headers in ran["judge"].headers)
    assert "could not be posted to track.webhook" in (ran["run"] / "log.txt").read_text()


def test_no_file_has_one(ran: dict[str, Any]) -> None:
    files = [file for name in ("run", "scratch", "q") for file in (ran["place"] / name).rglob("*") if file.is_file()]
    assert len(files) > 20
    assert [str(file) for file in files if MARK.encode() in file.read_bytes()] == []
    words = words_of(ran["run"])
    assert len(words) > 1000 and MARK not in words
    assert MARK not in ran["said"]


def test_no_command_line_has_one_and_no_environment_but_that_of_the_ranks(ran: dict[str, Any]) -> None:
    kinds = " ".join(ran["watch"].kinds)
    assert "megarl.engine.engine_host" in kinds and "megarl.processes" in kinds, kinds  # engines are forks of the host
    assert "torch_shm_manager" not in kinds, "torch starts it where a tensor is shared by a name, without being asked"
    assert sorted(ran["watch"].leaks) == []


def test_nothing_listens_beyond_this_machine(ran: dict[str, Any]) -> None:
    assert sorted(ran["watch"].open) == []


def test_others_cannot_look_into_the_run(ran: dict[str, Any]) -> None:
    assert ran["run"].stat().st_mode & 0o077 == 0
