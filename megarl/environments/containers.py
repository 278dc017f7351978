"""Containers for tasks with an image, run by docker or podman, whichever is available."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import functools
import hashlib
import io
import os
import shutil
import subprocess
import tarfile
import tempfile
import uuid
from collections.abc import Mapping
from pathlib import Path

from megarl.config import ConfigError
from megarl.config.paths import substitute_env
from megarl.environments.harbor_tasks import MAX_REWARD_BYTES, REWARD_FILES, Task
from megarl.environments.protocol import SessionLost

CONTAINER_RUNTIMES = ("docker", "podman")
_COMMAND_TIMEOUT_S = 20.0
_STOP_TIMEOUT_S = 5.0
_OUTPUT_PART_BYTES = 1 << 15  # bytes kept of the head and of the tail of a command's output
_MAX_PROCESSES = 1024


@functools.cache
def find_runtime() -> str:
    """Return the available container command. Raises ConfigError with the failure of each."""
    failures = []
    for name in CONTAINER_RUNTIMES:
        if shutil.which(name) is None:
            failures.append(f"there is no {name}")
            continue
        try:
            result = subprocess.run([name, "info"], capture_output=True, timeout=_COMMAND_TIMEOUT_S)
        except (OSError, subprocess.TimeoutExpired):
            failures.append(f"{name} info does not respond")
            continue
        # Docker's client says "Cannot connect" and exits with 0 in some versions.
        output = result.stdout.decode(errors="replace") + result.stderr.decode(errors="replace")
        if result.returncode == 0 and "Cannot connect" not in output:
            return name
        failures.append(f"{name}: {(output.strip().splitlines() or ['failed'])[-1][:200]}")
    raise ConfigError("containers are not available here: " + "; ".join(failures))


def _format_env(env: Mapping[str, str], where: str) -> list[str]:
    return [option for name, value in env.items() for option in ("--env", f"{name}={substitute_env(value, where)}")]


class Container:
    """A task's container for one session. It ends when its stdin closes, so it never outlives this process."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.is_lost = False
        self._runtime = find_runtime()
        self._name = f"megarl-{uuid.uuid4().hex}"
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Start the container. Raises SessionLost if its image cannot be built or it does not start."""
        settings, where = self.task.environment, f"task {self.task.name}"
        image = settings.docker_image or await asyncio.to_thread(self._build_image)
        options = ["--rm", "-i", "--name", self._name, "--pids-limit", str(_MAX_PROCESSES), "--entrypoint", "cat"]
        options += ["--security-opt", "no-new-privileges"]
        options += ["--memory", f"{int(settings.memory_mb)}m"] if settings.memory_mb else []
        options += ["--cpus", f"{settings.cpus:g}"] if settings.cpus else []
        options += ["--workdir", settings.workdir] if settings.workdir else []
        options += [] if self.task.has_network else ["--network", "none"]
        self._process = await asyncio.create_subprocess_exec(
            *(self._runtime, "run", *options, *_format_env(settings.env, where), image),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
        )
        async with asyncio.timeout(settings.build_timeout_sec):  # may include a download from a registry
            while (await self._run_command("exec", self._name, "true"))[0] != 0:
                if self._process.returncode is not None:
                    assert self._process.stderr is not None
                    stderr = (await self._process.stderr.read()).decode(errors="replace").strip()
                    raise SessionLost(f"{where}: its container did not start: {stderr[-300:]}")
                await asyncio.sleep(0.1)

    def _build_image(self) -> str:
        """Build the image of the task's Dockerfile, once per content hash. Blocks."""
        folder = self.task.folder / "environment"
        digest = hashlib.sha256()
        for path in sorted(path for path in folder.rglob("*") if path.is_file()):
            digest.update(f"{path.relative_to(folder)}\0{path.stat().st_mode}\0".encode() + path.read_bytes() + b"\0")
        image = f"megarl-task:{digest.hexdigest()[:32]}"
        with open(Path(tempfile.gettempdir()) / f"{image.replace(':', '-')}-{os.getuid()}", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # all sessions of a group need it at the same time
            if subprocess.run([self._runtime, "image", "inspect", image], capture_output=True).returncode == 0:
                return image
            command = [self._runtime, "build", "-q", "-t", image, str(folder)]
            limit = self.task.environment.build_timeout_sec
            try:
                result = subprocess.run(command, capture_output=True, timeout=limit)
            except subprocess.TimeoutExpired:
                raise SessionLost(f"task {self.task.name}: building its image took more than {limit:g} s") from None
        if result.returncode:
            stderr = result.stderr.decode(errors="replace").strip()[-300:]
            raise SessionLost(f"task {self.task.name}: its image cannot be built: {stderr}")
        return image

    async def run(self, command: str, seconds: float) -> tuple[int | None, str]:
        """Run a command in a new shell and return its status and output; the status is None after a timeout."""
        user = ["--user", self.task.agent.user] if self.task.agent.user else []
        status, output = await self._run_bash(user, seconds, "-c", command)
        if status in (125, 126, 127, 137, None) and (await self._run_command("exec", self._name, "true"))[0] != 0:
            self.is_lost = True
        return (None if status == 137 else status), output

    async def verify(self) -> tuple[dict[str, bytes], str]:
        """Kill the policy's processes, run the verifier, and return its reward files and output.

        The tests are copied only now, into an emptied folder; the reward folder is emptied too. `is_lost` is set if the
        verifier did not finish.
        """
        await self._run_command("exec", "--user", "0", self._name, "bash", "-c", "kill -9 -1")
        fresh = "rm -rf /tests /logs/verifier && mkdir -p /tests /logs/verifier && chmod 777 /logs/verifier"
        for command in (
            ["exec", "--user", "0", self._name, "bash", "-c", fresh],
            ["cp", f"{self.task.folder / 'tests'}/.", f"{self._name}:/tests"],
        ):
            status, data = await self._run_command(*command)
            if status != 0:
                message = data.decode(errors="replace").strip()[-300:]
                raise SessionLost(f"task {self.task.name}: its container failed: {message}")
        verifier = self.task.verifier
        options = ["--user", verifier.user] if verifier.user else []
        options += _format_env(verifier.env, f"task {self.task.name}")
        status, output = await self._run_bash(options, verifier.timeout_sec, "/tests/test.sh")
        self.is_lost = status in (None, 137)
        files = {name: await self._read_file(f"/logs/verifier/{name}") for name in REWARD_FILES}
        return {name: data for name, data in files.items() if data is not None}, output

    async def _read_file(self, path: str) -> bytes | None:
        """Read a regular file of the container; symbolic links are not followed."""
        status, data = await self._run_command("cp", f"{self._name}:{path}", "-", max_bytes=4 * MAX_REWARD_BYTES)
        if status != 0:
            return None
        with contextlib.suppress(tarfile.TarError), tarfile.open(fileobj=io.BytesIO(data)) as packed:
            entry = packed.next()
            if entry is not None and entry.isreg() and (file := packed.extractfile(entry)) is not None:
                return file.read()
        return None

    async def _run_bash(self, options: list[str], seconds: float, *arguments: str) -> tuple[int | None, str]:
        command = ["exec", *options, self._name, "timeout", "-s", "KILL", f"{seconds:g}", "bash", *arguments]
        status, output = await self._run_command(*command, limit=seconds + _COMMAND_TIMEOUT_S)
        return status, output.decode(errors="replace")

    async def _run_command(
        self, *command: str, limit: float = _COMMAND_TIMEOUT_S, max_bytes: int = 2 * _OUTPUT_PART_BYTES
    ) -> tuple[int | None, bytes]:
        """Run a command of the container runtime and return its status and output.

        The status is None after `limit` seconds. Head and tail of the output are kept, `max_bytes` in total.
        """
        process = await asyncio.create_subprocess_exec(
            *(self._runtime, *command),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        assert process.stdout is not None
        half, head, tail = max_bytes // 2, bytearray(), bytearray()
        try:
            async with asyncio.timeout(limit):
                while chunk := await process.stdout.read(1 << 16):
                    num_missing = half - len(head)
                    head += chunk[:num_missing]
                    tail += chunk[num_missing:]
                    del tail[: -half - 1]  # one extra byte shows that output was dropped
                await process.wait()
        except TimeoutError:
            pass
        finally:
            is_late = process.returncode is None
            if is_late:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
        end = bytes(tail) if len(tail) <= half else b"\n[...]\n" + bytes(tail[1:])
        return None if is_late else process.returncode, bytes(head) + end

    async def close(self) -> None:
        """Stop the container; raises nothing."""
        if self._process is None:
            return
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            async with asyncio.timeout(_STOP_TIMEOUT_S):
                await self._process.wait()
        except TimeoutError:
            with contextlib.suppress(OSError):
                await self._run_command("kill", self._name)
                await self._run_command("rm", "-f", self._name)
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()
