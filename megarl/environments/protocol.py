"""Values that a rank and an environment's process exchange. `README.md` has the interface of environments.

Imports nothing heavy, because those processes import it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

EnvironmentKind = Literal["tools", "environment", "agent"]
"""Stateless tools, called in whichever process is free; an environment with an object per conversation; or an agent, a
client of the policy: `async def run(row, base_url, api_key) -> float | dict | None`."""

ADAPTER_PREFIXES = ("mcp", "verifiers", "harbor", "program")
"""`mcp:FILE` stands for the class or agent that `megarl.environments.mcp:environment` makes of FILE."""

RESERVED_METHODS = ("reset", "reward", "close", "tools", "call")
"""Public methods that are not tools."""

REWARD_ARGUMENTS = ("answer", "messages", "turns")
"""Arguments that `reward` may declare.

- answer: str, the policy's last message.
- messages: list of chat messages, the whole conversation.
- turns: list of str, each policy turn as written, including calls.
"""


@dataclass(frozen=True)
class ToolResult:
    """A tool's result. `text` is what the policy reads; `ok` is False if the tool failed or was stopped.

    `images` are encoded files, which the policy reads before the text.
    """

    text: str
    ok: bool
    images: tuple[bytes, ...] = ()


class SessionLost(Exception):
    """The environment cannot continue: its process died or hung, `reset` raised, or a tool raised this."""


@dataclass(frozen=True)
class EnvironmentInfo:
    """Description of an environment or tool, sent as JSON by its own process.

    Attributes:
        spec: as in the configuration
        name: of the class or function, or what follows a prefix's colon
        schemas: of its tools, () if `has_dynamic_tools`
        has_dynamic_tools: the tools are known only at run time
        required_columns: columns that `reset` requires
        accepted_columns: columns that `reset` accepts, None for all
        has_reward: whether it has a `reward`; an agent may return one
        reward_arguments: which of `REWARD_ARGUMENTS` its `reward` takes
        timeout: its own timeout in seconds, 0 for none
        is_sandboxed: whether it runs the policy's code in the sandbox, as its attribute `sandboxed` says
    """

    spec: str
    name: str
    kind: EnvironmentKind
    schemas: tuple[dict[str, Any], ...] = ()
    has_dynamic_tools: bool = False
    required_columns: tuple[str, ...] = ()
    accepted_columns: tuple[str, ...] | None = None
    has_reward: bool = False
    reward_arguments: tuple[str, ...] = ()
    timeout: float = 0.0
    is_sandboxed: bool = False
    is_async: bool = field(default=False, compare=False)
