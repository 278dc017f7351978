"""The API: `Sandbox` runs a command in a box, a harness whose results come back, or a session of Python.

    box = Sandbox.from_environment()
    result = await box.run(["python3", "main.py"], {"main.py": b"print(input())"}, stdin=b"hello")
    result.ok, result.stdout  # True, b"hello\n"

A box is empty but for a Python (`python3`; numpy and sympy where this machine's interpreter has them), /usr and the
files that are given, which lie in its working directory /tmp; no network, no other process, nothing of this machine.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import json
import os
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

from megarl.config import ConfigError, SandboxConfig, strict
from megarl.sandbox import channel, probing
from megarl.sandbox.file_transfer import check_command, check_path
from megarl.sandbox.results import HarnessResult, Limits, Output, Probe, Result
from megarl.sandbox.runner_client import REMEDY, RunnerClient, SandboxError
from megarl.sandbox.runner_messages import Frame
from megarl.sandbox.sandbox_fusion import SandboxFusion

VARIABLE = "MEGARL_SANDBOX"
"""Of the environment: the section `sandbox` of the configuration, as JSON."""
NO_FILES: Mapping[str, bytes] = {}
UNPROTECTED = (
    "sandbox.backend=none: NOTHING protects this machine from what the policy writes; it runs as the user who runs the "
    "training, with all of this user's files and the network"
)


def to_environment(settings: SandboxConfig) -> dict[str, str]:
    """What a process of the run needs in its environment for `Sandbox.from_environment`."""
    return {VARIABLE: json.dumps(strict.to_dict(settings))}


@functools.cache
def probe(settings: SandboxConfig) -> Probe:
    """Which layers boxes with these settings have on this machine, for a check at start-up, where no event loop runs:
    as `Sandbox.probe`, asked once. Whoever starts a run with `none` has to show it."""

    async def asked() -> Probe:
        sandbox = Sandbox(settings)
        try:
            return await sandbox.probe()
        finally:
            await sandbox.close()

    return asyncio.run(asked())


class Interpreter:
    """A session of Python in a box of its own, whose names stay from call to call. Of one event loop."""

    def __init__(self, link: RunnerClient, limits: dict[str, Any]) -> None:
        self._client, self._limits = link, limits
        self._number = 0
        """Of the box; 0 where there is none."""
        self._closed = False
        self._calling = asyncio.Lock()

    async def run(self, code: str, seconds: float | None = None) -> Output:
        """Run code; it has `seconds`, or those of the limits that the session was begun with. Calls at the same time
        come one after the other, and where `sandbox.processes` boxes run already each waits for its turn first.

        What hangs or takes too much is ended with all its processes: that output says so, the state is lost, and the
        next call begins anew. Never raises for what the code does; SandboxError where there can be no box."""
        async with self._calling:
            return await self._run(code, seconds)

    async def close(self) -> None:
        """End it; further calls come back at once with reason `closed`."""
        self._closed = True
        if self._number and self._client.runner_info is not None:
            await self._client.send({"number": self._number, "kind": "end"}, ())
            self._number = 0

    async def __aenter__(self) -> Interpreter:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        await self.close()

    async def _run(self, code: str, seconds: float | None) -> Output:
        if self._closed:
            return Output(False, "", "", 0.0, "closed")
        await self._client.connect()
        if self._number == 0:
            self._number = self._client.next_number()
            order = {"number": self._number, "kind": "open", "session": True, "channel": True, "files": [], "fetch": []}
            await self._client.send({**order, "command": channel.SESSION_COMMAND, "limits": self._limits}, [b"", b""])
        call = {"number": self._number, "kind": "call", "seconds": seconds or self._limits["seconds"]}
        try:
            said, blobs = await self._client.request(call, [json.dumps(code).encode() + b"\n"])
        except BaseException:
            self._number = 0
            raise
        stdout, stderr = (blob.decode(errors="replace") for blob in blobs[:2])
        if said["kind"] == "called":
            good = blobs[3] == b"1"
            return Output(good, stdout, stderr, said["seconds"], "" if good else "exit")
        self._number = 0
        return Output(False, stdout, stderr, said["seconds"], said["reason"] or "exit", is_state_lost=True)


def check_backend(settings: SandboxConfig) -> None:
    """Raise ConfigError for a backend that there is not, without trying it."""
    if settings.backend not in ("bubblewrap", "none") and not settings.backend.startswith(("http://", "https://")):
        given = strict.short_repr(settings.backend)
        raise ConfigError(f"sandbox.backend must be bubblewrap, http://..., https://... or none, not {given}")


class Sandbox:
    """Boxes of this machine, or those of a service. Starts nothing before the first run; any process and any event loop
    may use it, one loop at a time."""

    def __init__(self, settings: SandboxConfig) -> None:
        self.settings = settings
        self._service = SandboxFusion(settings) if settings.backend.startswith(("http://", "https://")) else None
        check_backend(settings)
        self._client = RunnerClient(settings)
        self._probed: Probe | None = None

    @classmethod
    def from_environment(cls) -> Sandbox:
        """With the settings of the run that this process belongs to; the defaults outside of one."""
        text = os.environ.get(VARIABLE, "{}")
        try:
            tree = json.loads(text)
        except ValueError:
            tree = None
        if not isinstance(tree, dict):
            raise ConfigError(f"{VARIABLE} must hold the section sandbox as JSON, not {strict.short_repr(text)}")
        return cls(strict.build_dataclass(SandboxConfig, tree, "sandbox.", root=SandboxConfig))

    async def run(
        self,
        command: Sequence[str],
        files: Mapping[str, bytes] = NO_FILES,
        stdin: bytes = b"",
        limits: Limits = Limits(),  # noqa: B008  frozen
        fetch: Sequence[str] = (),
    ) -> Result:
        """Run a command with files (by relative path) in a new box; `fetch` names files to bring back.

        Waits for a turn where `sandbox.processes` boxes run already; that is not part of its time. Raises ConfigError
        where there can be no box, SandboxError where one could not be made after all, ValueError for a path that leaves
        it and a command that is none."""
        for name in (*files, *fetch):
            check_path(name)
        command = check_command(command)
        if self._service is not None:
            return await self._service.run(command, files, stdin, self._limits(limits), fetch)
        said, blobs = await self._run_in_box(command, files, stdin, limits, fetch, b"")
        return _result(said, blobs)

    async def run_harness(
        self,
        harness: str,
        count: int,
        files: Mapping[str, bytes] = NO_FILES,
        stdin: bytes = b"",
        limits: Limits = Limits(),  # noqa: B008
    ) -> HarnessResult:
        """Run Python source in a new box, which sends `count` results on a channel of its own, whatever it prints.

        The source finds a function `send(number, value)`: number of 0 to count - 1, each once; the value whatever JSON
        has (tuples become lists; of subclasses of str, int and the like their plain value), else TypeError. The channel
        and the nonce that begins its lines are the sender's own; but code that runs in the same process can find them,
        so never send a verdict: send what came out, and compare here, where the expected answers are. They must not be
        in the source, the files or stdin."""
        for name in files:
            check_path(name)
        nonce = channel.new_nonce()
        opening = channel.encode_preamble(nonce, harness)
        if self._service is not None:
            run, sent = await self._service.run_harness(opening, nonce, files, stdin, self._limits(limits))
            return HarnessResult(channel.parse_results(sent, nonce, count), count, run)
        said, blobs = await self._run_in_box(channel.HARNESS_COMMAND, files, stdin, limits, (), opening)
        return HarnessResult(channel.parse_results(blobs[2], nonce, count), count, _result(said, blobs))

    async def interpreter(self, limits: Limits = Limits()) -> Interpreter:  # noqa: B008
        """Begin a session. While none of its calls runs, it takes none of `sandbox.processes`. Of `limits`, `seconds`
        is for each call. Raises ConfigError where there can be no box, or the backend keeps no state."""
        if self._service is not None:
            raise ConfigError(
                "sandbox.backend: a service with SandboxFusion's API keeps no state between calls, and interpreter "
                "sessions need it; set sandbox.backend=bubblewrap, or run whole programs"
            )
        await self._client.connect()
        return Interpreter(self._client, self._limits(limits))

    async def probe(self) -> Probe:
        """Which layers there are; asked once. Runs a box. Raises ConfigError, with the reason and the remedy, where
        there can be none, or one that does not hold."""
        if self._probed is None:
            self._probed = await self._probe()
        return self._probed

    @property
    def runner_pid(self) -> int:
        """The pid of the process that starts the boxes; 0 where there is none."""
        return self._client.pid

    async def close(self) -> None:
        """End all that it started; a run in flight ends with it."""
        self._client.close()
        if self._service is not None:
            await self._service.close()

    async def _probe(self) -> Probe:
        backend = self.settings.backend
        if self._service is not None:
            await self._service.check()
            return Probe(backend, ("what the service does",))
        try:
            seen = await self.run_harness(probing.SOURCE, 1, limits=probing.LIMITS)
        except SandboxError as error:
            raise ConfigError(f"sandbox.backend={backend} cannot hold here: {error}. Remedy: {REMEDY}") from None
        if backend == "none":
            return Probe(backend, (), (UNPROTECTED,))
        if faults := probing.list_faults(seen.results.get(0), seen.run):
            raise ConfigError(f"sandbox.backend={backend} does not hold here: {', '.join(faults)}. Remedy: {REMEDY}")
        assert self._client.runner_info is not None
        return Probe(backend, tuple(self._client.runner_info["layers"]), tuple(self._client.runner_info["missing"]))

    async def _run_in_box(
        self,
        command: Sequence[str],
        files: Mapping[str, bytes],
        stdin: bytes,
        limits: Limits,
        fetch: Sequence[str],
        opening: bytes,
    ) -> Frame:
        await self._client.connect()
        order = {
            "number": self._client.next_number(),
            "kind": "run",
            "session": False,
            "channel": bool(opening),
            "command": command,
            "files": list(files),
            "fetch": list(fetch),
            "limits": self._limits(limits),
        }
        return await self._client.request(order, [stdin, opening, *files.values()])

    def _limits(self, limits: Limits) -> dict[str, Any]:
        return {**dataclasses.asdict(limits), "memory_mb": limits.memory_mb or self.settings.memory_mb}


def _result(said: dict[str, Any], blobs: Sequence[bytes]) -> Result:
    files = dict(zip(said["files"], blobs[3:], strict=True))
    good = said["status"] == 0 and not said["reason"]
    return Result(good, said["status"], blobs[0], blobs[1], said["seconds"], said["reason"], files, said["refused"])
