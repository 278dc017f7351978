"""The API: `Sandbox` runs a command in a box, a harness whose results come back, or a session of Python.

    box = Sandbox.from_environment()
    result = await box.run(["python3", "main.py"], {"main.py": b"print(input())"}, stdin=b"hello")
    result.ok, result.stdout  # True, b"hello\n"

A box is empty but for a Python (`python3`; numpy and sympy where this machine's interpreter has them), /usr and the
files that are given, which lie in its working directory /tmp; no network, no other process, nothing of this machine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType

from megarl.config import SandboxConfig
from megarl.sandbox.results import Collected, Limits, Output, Probe, Result

VARIABLE = "MEGARL_SANDBOX"
"""Of the environment: the section `sandbox` of the configuration, as JSON."""
NOTHING: Mapping[str, bytes] = {}


class Interpreter:
    """A session of Python in a box of its own, whose names stay from call to call. Of one event loop."""

    async def run(self, code: str, seconds: float | None = None) -> Output:
        """Run code; it has `seconds`, or those of the limits that the session was begun with.

        What hangs or takes too much is ended with all its processes: that output says so, the state is lost, and the
        next call begins anew. A call never waits longer. Never raises for what the code does."""
        raise NotImplementedError

    async def close(self) -> None:
        """End it; further calls come back at once with reason `closed`."""
        raise NotImplementedError

    async def __aenter__(self) -> Interpreter:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        await self.close()


class Sandbox:
    """Boxes of this machine, or those of a service. Starts nothing before the first run; belongs to one event loop at
    a time, and to the process that made it (make another one after a fork)."""

    def __init__(self, settings: SandboxConfig) -> None:
        self.settings = settings

    @classmethod
    def from_environment(cls) -> Sandbox:
        """With the settings of the run that this process belongs to; the defaults outside of one."""
        raise NotImplementedError

    async def run(
        self,
        command: Sequence[str],
        files: Mapping[str, bytes] = NOTHING,
        stdin: bytes = b"",
        limits: Limits = Limits(),  # noqa: B008  frozen
        fetch: Sequence[str] = (),
    ) -> Result:
        """Run a command with files (by relative path) in a new box; `fetch` names files to bring back.

        Waits for a turn where `sandbox.processes` boxes run already; that is not part of its time. Raises ConfigError
        where there can be no box, ValueError for a path that leaves it."""
        raise NotImplementedError

    async def collect(
        self,
        harness: str,
        count: int,
        files: Mapping[str, bytes] = NOTHING,
        stdin: bytes = b"",
        limits: Limits = Limits(),  # noqa: B008
    ) -> Collected:
        """Run Python source in a new box, which sends `count` results on a channel of its own, whatever it prints.

        The source finds a function `send(number, value)`: number of 0 to count - 1, each once; the value whatever JSON
        has (tuples become lists; of subclasses of str, int and the like their plain value), else TypeError. The channel
        and the nonce that begins its lines are the sender's own; but code that runs in the same process can find them,
        so never send a verdict: send what came out, and compare here, where the expected answers are. They must not be
        in the source, the files or stdin."""
        raise NotImplementedError

    async def interpreter(self, limits: Limits = Limits()) -> Interpreter:  # noqa: B008
        """Begin a session. While none of its calls runs, it takes none of `sandbox.processes`. Of `limits`, `seconds`
        is for each call."""
        raise NotImplementedError

    async def probe(self) -> Probe:
        """Which layers there are; asked once in a process. Raises ConfigError, with the reason and the remedy, where
        one that must be there cannot be had."""
        raise NotImplementedError

    async def close(self) -> None:
        """End all that it started; a run in flight ends with it."""
        raise NotImplementedError
