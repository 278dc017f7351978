"""A Python session in the sandbox: for mathematics, whose reward is `megarl.rewards.math_verify:math_verify`, and for
code, whose reward is `megarl.rewards.code:hidden_tests`."""

from __future__ import annotations

from megarl.sandbox.box import Interpreter, Sandbox
from megarl.sandbox.results import Limits


class Python:
    """A Python interpreter without network or access to this machine; names persist between calls."""

    sandboxed = True
    limits = Limits()
    """Subclasses may change them: `class Quick(Python): limits = Limits(seconds=2.0)`."""

    async def reset(self) -> None:
        self._box = Sandbox.from_environment()
        self._session: Interpreter | None = None

    async def python(self, code: str) -> str:
        """Run Python code. Shows what it prints, and the value of its last line; names are kept for the next call.

        Args:
            code: one line or many
        """
        if self._session is None:  # a conversation without a call needs none
            self._session = await self._box.interpreter(self.limits)
        output = await self._session.run(code)
        texts = [output.stdout.rstrip("\n"), output.stderr.rstrip("\n")]
        if output.reason not in ("", "exit"):
            texts.append(f"Error: the code exceeded its limit of {output.reason}; all names are lost")
        return "\n".join(text for text in texts if text)

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
        await self._box.close()
