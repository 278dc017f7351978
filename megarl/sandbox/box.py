"""The sandbox API: `Sandbox` runs a command in a box, a harness that returns results, or a Python session.

A box contains only Python (`python3`, with numpy and sympy if this machine's interpreter has them), /usr, and the given
files, in its working directory /tmp. It has no network and sees no other process and nothing else of this machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import json
import os
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from megarl.config import ConfigError, SandboxConfig, strict
from megarl.sandbox.file_transfer import check_command, check_path
from megarl.sandbox.harness import (
    HARNESS_COMMAND,
    PROBE_LIMITS,
    PROBE_SOURCE,
    SESSION_COMMAND,
    encode_preamble,
    list_faults,
    parse_results,
)
from megarl.sandbox.results import HarnessResult, Limits, Output, Probe, Result
from megarl.sandbox.runner_client import REMEDY, RunnerClient, SandboxError
from megarl.sandbox.sandbox_fusion import SandboxFusion

VARIABLE = "MEGARL_SANDBOX"
"""Environment variable with the configuration's section `sandbox`, as JSON."""
NO_FILES: Mapping[str, bytes] = {}
UNPROTECTED = (
    "sandbox.backend=none: NOTHING protects this machine from the policy's code; it runs as the user who runs the "
    "training, with access to that user's files and the network"
)


def to_environment(settings: SandboxConfig) -> dict[str, str]:
    """Return the environment variables that `Sandbox.from_environment` needs in a process of the run."""
    return {VARIABLE: json.dumps(strict.to_dict(settings))}


@functools.cache
def probe(settings: SandboxConfig) -> Probe:
    """Return the isolation layers of boxes with these settings, for a check at startup without a running event loop.

    As `Sandbox.probe`, cached. The caller must show the result when a run starts with backend `none`.
    """

    async def probe_sandbox() -> Probe:
        sandbox = Sandbox(settings)
        try:
            return await sandbox.probe()
        finally:
            await sandbox.close()

    return asyncio.run(probe_sandbox())


class Interpreter(contextlib.AbstractAsyncContextManager["Interpreter"]):
    """A Python session in its own box, which keeps its names between calls. Bound to one event loop."""

    def __init__(self, client: RunnerClient, limits: dict[str, Any]) -> None:
        self._client, self._limits = client, limits
        self._number = 0
        """Number of the box; 0 without one."""
        self._is_closed = False
        self._calling = asyncio.Lock()

    async def run(self, code: str, seconds: float | None = None) -> Output:
        """Run code for at most `seconds`, by default the limit that the session was created with.

        Concurrent calls run one at a time, and each waits until fewer than `sandbox.max_boxes` boxes are running. Code
        that hangs or exceeds a limit is killed with all its processes: the output says so, the state is lost, and the
        next call starts a new session. Never raises for what the code does; raises SandboxError if there is no box.
        """
        async with self._calling:
            if self._is_closed:
                return Output(False, "", "", 0.0, "closed")
            await self._client.connect()
            if self._number == 0:
                self._number = next(self._client.numbers)
                order = {"kind": "open", "session": True, "channel": True, "files": [], "fetch": []}
                order |= {"number": self._number, "command": SESSION_COMMAND, "limits": self._limits}
                await self._client.send(order, [b"", b""])
            call = {"number": self._number, "kind": "call", "seconds": seconds or self._limits["seconds"]}
            try:
                response, blobs = await self._client.request(call, [json.dumps(code).encode() + b"\n"])
            except BaseException:
                self._number = 0
                raise
            stdout, stderr = (blob.decode(errors="replace") for blob in blobs[:2])
            if response["kind"] == "called":
                is_ok = blobs[3] == b"1"
                return Output(is_ok, stdout, stderr, response["seconds"], "" if is_ok else "exit")
            self._number = 0
            return Output(False, stdout, stderr, response["seconds"], response["reason"] or "exit", is_state_lost=True)

    async def close(self) -> None:
        """End the session. Further calls return at once with reason `closed`."""
        self._is_closed = True
        if self._number and self._client.runner_info is not None:
            await self._client.send({"number": self._number, "kind": "end"}, ())
            self._number = 0

    async def __aexit__(self, *error: object) -> None:
        await self.close()


def check_backend(settings: SandboxConfig) -> None:
    """Raise ConfigError for an unknown backend, without trying it."""
    if settings.backend not in ("bubblewrap", "none") and not settings.backend.startswith(("http://", "https://")):
        backend = strict.short_repr(settings.backend)
        raise ConfigError(f"sandbox.backend must be bubblewrap, http://..., https://... or none, not {backend}")


class Sandbox:
    """Boxes on this machine or of a service.

    Starts nothing before the first run. Any process and any event loop may use it, one loop at a time.
    """

    def __init__(self, settings: SandboxConfig) -> None:
        self.settings = settings
        check_backend(settings)
        is_service = settings.backend.startswith(("http://", "https://"))
        self._client = SandboxFusion(settings) if is_service else RunnerClient(settings)

    @classmethod
    def from_environment(cls) -> Sandbox:
        """Build a sandbox with the settings of this process's run, or with defaults outside of a run."""
        settings_json = os.environ.get(VARIABLE, "{}")
        try:
            tree = json.loads(settings_json)
        except ValueError:
            value = strict.short_repr(settings_json)
            raise ConfigError(f"{VARIABLE} must hold the section sandbox as JSON, not {value}") from None
        return cls(strict.build_dataclass(SandboxConfig, tree, "sandbox.", root=SandboxConfig))

    async def run(
        self,
        command: Sequence[str],
        files: Mapping[str, bytes] = NO_FILES,
        stdin: bytes = b"",
        limits: Limits = Limits(),  # noqa: B008  frozen
        fetch: Sequence[str] = (),
    ) -> Result:
        """Run a command with files (by relative path) in a new box. `fetch` names files to return.

        Waits until fewer than `sandbox.max_boxes` boxes are running; the wait does not count as run time. Raises
        ConfigError if boxes cannot work here, SandboxError if one could not be created, and ValueError for an invalid
        command or a path outside the box.
        """
        for name in (*files, *fetch):
            check_path(name)
        result, _ = await self._client.run(check_command(command), files, stdin, self._limits(limits), fetch)
        return result

    async def run_harness(
        self,
        harness: str,
        count: int,
        files: Mapping[str, bytes] = NO_FILES,
        stdin: bytes = b"",
        limits: Limits = Limits(),  # noqa: B008
    ) -> HarnessResult:
        """Run Python source in a new box, which sends `count` results on a private channel, whatever it prints.

        The source calls a function `send(number, value)`, with each number from 0 to count - 1 once. The value is JSON
        data (tuples become lists, subclasses of str, int, etc. their plain value), else `send` raises TypeError. The
        channel and the nonce that begins its lines belong to the sender, but code in the same process can find them. So
        never send a verdict: send the outcome and compare it here, where the expected answers are. They must not be in
        the source, the files, or stdin.
        """
        for name in files:
            check_path(name)
        nonce = secrets.token_hex(16)
        preamble = encode_preamble(nonce, harness)
        run, sent = await self._client.run(HARNESS_COMMAND, files, stdin, self._limits(limits), (), preamble)
        return HarnessResult(parse_results(sent, nonce, count), count, run)

    async def interpreter(self, limits: Limits = Limits()) -> Interpreter:  # noqa: B008
        """Create a session. It occupies one of `sandbox.max_boxes` only during a call.

        `limits.seconds` applies to each call. Raises ConfigError if boxes cannot work here, or if the backend keeps no
        state.
        """
        if isinstance(self._client, SandboxFusion):
            raise ConfigError(
                "sandbox.backend: a service with SandboxFusion's API keeps no state between calls, and interpreter "
                "sessions need it; set sandbox.backend=bubblewrap, or run whole programs"
            )
        await self._client.connect()
        return Interpreter(self._client, self._limits(limits))

    async def probe(self) -> Probe:
        """Return the isolation layers. Runs a box.

        Raises ConfigError, with the reason and the remedy, if boxes cannot work here or a required layer does not hold.
        """
        backend = self.settings.backend
        if isinstance(self._client, SandboxFusion):
            await self._client.check()
            return Probe(backend, ("the service's sandbox",))
        try:
            harness_result = await self.run_harness(PROBE_SOURCE, 1, limits=PROBE_LIMITS)
        except SandboxError as error:
            raise ConfigError(
                f"sandbox.backend={backend} does not work on this machine: {error}. Remedy: {REMEDY}"
            ) from None
        if backend == "none":
            return Probe(backend, (), (UNPROTECTED,))
        if faults := list_faults(harness_result.results.get(0), harness_result.run):
            raise ConfigError(
                f"sandbox.backend={backend} does not isolate on this machine: {', '.join(faults)}. Remedy: {REMEDY}"
            )
        assert self._client.runner_info is not None
        return Probe(backend, tuple(self._client.runner_info["layers"]), tuple(self._client.runner_info["missing"]))

    @property
    def runner_pid(self) -> int:
        """Pid of the process that starts the boxes; 0 without one."""
        info = None if isinstance(self._client, SandboxFusion) else self._client.runner_info
        return int(info["pid"]) if info else 0

    async def close(self) -> None:
        """End everything that the sandbox has started, including runs in flight."""
        if isinstance(self._client, SandboxFusion):
            await self._client.close()
        else:
            self._client.close()

    def _limits(self, limits: Limits) -> dict[str, Any]:
        return {**dataclasses.asdict(limits), "memory_mb": limits.memory_mb or self.settings.memory_mb}
