"""A sandbox for tests that are not asynchronous themselves, and why there may be none here."""

import asyncio
import shutil

import pytest

from megarl.config import ConfigError, SandboxConfig
from megarl.sandbox.box import Sandbox


class Boxes:
    """`Sandbox`, each of whose calls is waited for."""

    def __init__(self, **settings):
        self.loop = asyncio.new_event_loop()
        self.sandbox = Sandbox(SandboxConfig(**settings))

    def __getattr__(self, name):
        return lambda *args, **kwargs: self.wait(getattr(self.sandbox, name)(*args, **kwargs))

    def wait(self, coroutine):
        return self.loop.run_until_complete(coroutine)

    def all(self, coroutines):
        """What each comes to, by its name."""

        async def gathered():
            return await asyncio.gather(*coroutines.values())

        return dict(zip(coroutines, self.wait(gathered()), strict=True))

    def end(self):
        self.wait(self.sandbox.close())
        self.loop.close()


def why_none():
    """Empty where there can be boxes."""
    if shutil.which("bwrap") is None:
        return "there is no bubblewrap on this machine"
    boxes = Boxes()
    try:
        boxes.probe()
    except ConfigError as error:
        return f"there can be no boxes here: {error}"
    finally:
        boxes.end()
    return ""


WHY = why_none()
needs_boxes = pytest.mark.skipif(bool(WHY), reason=WHY)
