"""A synchronous wrapper of the sandbox, and a mark for tests that need bubblewrap."""

import asyncio
import shutil

import pytest

from megarl.config import ConfigError, SandboxConfig
from megarl.sandbox.box import Sandbox


class SyncSandbox:
    """Run the coroutines of a `Sandbox` to completion."""

    def __init__(self, **settings):
        self.loop = asyncio.new_event_loop()
        self.async_sandbox = Sandbox(SandboxConfig(**settings))

    def __getattr__(self, name):
        return lambda *args, **kwargs: self.wait(getattr(self.async_sandbox, name)(*args, **kwargs))

    def wait(self, coroutine):
        return self.loop.run_until_complete(coroutine)

    def all(self, coroutines):
        """Run coroutines concurrently and return their results by name."""

        async def gather_all():
            return await asyncio.gather(*coroutines.values())

        return dict(zip(coroutines, self.wait(gather_all()), strict=True))

    def close(self):
        self.wait(self.async_sandbox.close())
        self.loop.close()


def find_missing_requirement():
    """Return why this machine cannot run sandboxes, or an empty string."""
    if shutil.which("bwrap") is None:
        return "there is no bubblewrap on this machine"
    sandbox = SyncSandbox()
    try:
        sandbox.probe()
    except ConfigError as error:
        return f"sandboxes do not work on this machine: {error}"
    finally:
        sandbox.close()
    return ""


MISSING_REQUIREMENT = find_missing_requirement()
needs_bubblewrap = pytest.mark.skipif(bool(MISSING_REQUIREMENT), reason=MISSING_REQUIREMENT)
