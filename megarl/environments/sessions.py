"""The rank's side of environments: a session for each conversation, in a process that is its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megarl.environments.protocol import ToolResult
from megarl.types import Message, Prompt, Verdict


class Session:
    """One conversation's tools and environment.

    messages: the prompt's, as `reset` has left them. schemas: of all tools that the policy may call now.
    """

    messages: tuple[Message, ...]
    schemas: tuple[dict[str, Any], ...]

    async def call(self, number: int, name: str, arguments: Any) -> ToolResult:
        """Call a tool; what goes wrong inside is the result's text. number: of the call within the conversation: a
        number that was asked for before has the same result, and nothing is called again, so that a conversation which
        was stopped in the middle of a call can go on. Raises SessionLost where the environment is gone."""
        raise NotImplementedError

    async def reward(self, answer: str, messages: Sequence[Message], turns: Sequence[str]) -> Verdict | None:
        """What the environment says the conversation was worth; None where it has no `reward`. Never raises."""
        raise NotImplementedError

    async def end(self) -> None:
        """Give the process back; safe to call twice. What is under way is cut off, with its process."""
        raise NotImplementedError


class Sessions:
    """For one event loop, until `aclose`."""

    async def begin(self, prompt: Prompt) -> Session:
        """Raises SessionLost where `reset` fails, or no process can be had."""
        raise NotImplementedError

    async def aclose(self) -> None:
        raise NotImplementedError
