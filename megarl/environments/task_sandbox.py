"""The sandbox for tasks without an image: workdir `/app`, no network, the machine's Python and /usr.

The verifier runs in a separate box with the tests and the policy's files: none of the policy's processes run there.
"""

from __future__ import annotations

import base64
import io
import json
import tarfile
from pathlib import Path

from megarl.config import ConfigError
from megarl.config.paths import substitute_env
from megarl.environments.harbor_tasks import REWARD_FILES, Task
from megarl.environments.protocol import SessionLost
from megarl.sandbox.box import Interpreter, Sandbox
from megarl.sandbox.results import Limits

WORKDIR = "/app"
_MAX_DISK_MB = 64
_MAX_OUTPUT_BYTES = 96 << 20
"""Bytes that a call may return: all files of the box, packed, as text."""
_OUTPUT_PART_BYTES = 1 << 15
_REPLY_MARK = "megarl: "
_BOX_CODE = f"""
import base64, io, json, os, signal, subprocess, tarfile

def _run(command, seconds, env):
    head, tail, late = b"", b"", False
    shell = subprocess.Popen(
        ["timeout", "-s", "KILL", str(seconds), "bash", "-c", command], cwd="{WORKDIR}", env={{**os.environ, **env}},
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True)
    while part := shell.stdout.read1(1 << 16):
        room = max({_OUTPUT_PART_BYTES} - len(head), 0)
        head, tail = head + part[:room], (tail + part[room:])[-{_OUTPUT_PART_BYTES} - 1:]
    status = shell.wait()
    try:
        os.killpg(shell.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    if len(tail) > {_OUTPUT_PART_BYTES}:
        tail = b"\\n[...]\\n" + tail[1:]
    print("{_REPLY_MARK}" + json.dumps([status, (head + tail).decode(errors="replace")]))

def _pack():
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz", compresslevel=1) as file:
        file.add("{WORKDIR}/", ".")
    print("{_REPLY_MARK}" + json.dumps(base64.b64encode(packed.getvalue()).decode()))

def _unpack(text):
    os.makedirs("/tmp{WORKDIR}", exist_ok=True)
    with tarfile.open(fileobj=io.BytesIO(base64.b64decode(text))) as file:
        file.extractall("/tmp{WORKDIR}")
"""
_VERIFY_SCRIPT = f"""
mkdir -p {WORKDIR[1:]}; tar xzf state.tgz -C {WORKDIR[1:]} || broken=yes
rm -rf tests logs; mkdir -p tests logs/verifier
[ -z "$broken" ] || {{ echo 0 > logs/verifier/reward.txt; exit; }}
tar xzf tests.tgz -C tests && rm state.tgz tests.tgz && cd {WORKDIR} && exec bash /tests/test.sh
"""


class TaskSandbox:
    """A task's box for one session."""

    def __init__(self, task: Task) -> None:
        if (workdir := task.environment.workdir) not in ("", WORKDIR):
            raise ConfigError(f"task {task.name}: works in {workdir}; without an image it must be {WORKDIR}")
        self.task = task
        self.is_lost = False
        self._sandbox = Sandbox.from_environment()
        self._interpreter: Interpreter | None = None
        self._memory_mb = int(task.environment.memory_mb)

    async def start(self) -> None:
        """Create the box. Raises ConfigError if none can be created, SessionLost if it does not start."""
        disk = min(int(self.task.environment.storage_mb) or _MAX_DISK_MB, _MAX_DISK_MB)
        limits = Limits(seconds=60.0, memory_mb=self._memory_mb, disk_mb=disk, output_bytes=_MAX_OUTPUT_BYTES)
        self._interpreter = await self._sandbox.interpreter(limits)
        files = _pack_folder(self.task.folder / "environment")
        result = await self._interpreter.run(f"{_BOX_CODE}\n_unpack({base64.b64encode(files).decode()!r})")
        if not result.ok:
            raise SessionLost(f"task {self.task.name}: its sandbox did not start: {result.stderr.strip()[-300:]}")

    async def run(self, command: str, seconds: float) -> tuple[int | None, str]:
        """Run a command in a new shell and return its status and output; the status is None after a timeout."""
        where = f"task {self.task.name}"
        env = {name: substitute_env(value, where) for name, value in self.task.environment.env.items()}
        reply = await self._run_in_box(f"_run({command!r}, {seconds}, {env!r})", seconds + 10)
        if self.is_lost:
            return None, reply
        try:
            status, text = json.loads(reply)
            return (None if status in (-9, 137) else int(status)), str(text)
        except (ValueError, TypeError):  # code inside the box may print anything
            self.is_lost = True
            return None, ""

    async def _run_in_box(self, code: str, seconds: float) -> str:
        """Return what a call prints after the mark; if the box is lost, the reason."""
        assert self._interpreter is not None
        output = await self._interpreter.run(code, seconds)
        _, mark, reply = output.stdout.rpartition(_REPLY_MARK)
        if output.ok and mark:
            return reply
        self.is_lost = self.is_lost or output.is_state_lost or not mark
        return output.reason or "ended"

    async def verify(self) -> tuple[dict[str, bytes], str]:
        """Run the verifier and return its reward files and output. `is_lost` is set if it did not finish."""
        output = await self._run_in_box("_pack()", 60)
        try:
            packed_state = base64.b64decode(json.loads(output))
        except (ValueError, TypeError):
            self.is_lost = True
        if self.is_lost:
            return {}, f"the sandbox was terminated ({output[:100]})"
        where = f"task {self.task.name}"
        env = [f"{name}={substitute_env(value, where)}" for name, value in self.task.verifier.env.items()]
        result = await self._sandbox.run(
            ["env", *env, "bash", "-c", _VERIFY_SCRIPT],
            {"state.tgz": packed_state, "tests.tgz": _pack_folder(self.task.folder / "tests")},
            limits=Limits(seconds=self.task.verifier.timeout_sec, memory_mb=self._memory_mb, disk_mb=4 * _MAX_DISK_MB),
            fetch=[f"logs/verifier/{name}" for name in REWARD_FILES],
        )
        self.is_lost = result.reason not in ("", "exit", "signal")
        output = (result.stdout + result.stderr).decode(errors="replace")
        output += "".join(f"\n{name} {why}" for name, why in result.refused.items())
        return {Path(name).name: data for name, data in result.files.items()}, output

    async def close(self) -> None:
        """Close the box; raises nothing."""
        if self._interpreter is not None:
            await self._interpreter.close()
        await self._sandbox.close()


def _pack_folder(folder: Path) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as file:
        if folder.is_dir():
            file.add(folder, ".")
    return packed.getvalue()
