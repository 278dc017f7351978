"""The interface of environments, and the description of one that the rank has without importing it; see `README.md`.

An object of a class lives from `reset` to the end of one conversation, in a process that no other conversation uses
meanwhile; the next conversation gets a new object. Imports nothing heavy, because those processes import it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

EnvironmentKind = Literal["tools", "environment", "agent"]
"""Kind of an entry of `rollout.tools` or `rollout.environments`.

- tools: stateless, called in whichever process is free.
- environment: one object per conversation.
- agent: a coroutine function that is a client of the policy,
  `async def run(row, base_url, api_key) -> float | dict | None`. It has a process to itself during an episode; the
  process is then reused.
"""

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


class Environment(Protocol):
    """An environment class; its constructor takes no arguments.

    Every other public method is a tool: its name, docstring and type hints make the schema (`schemas.py`). A class
    whose tools are known only at run time has two methods instead, sync or async:

        def tools(self) -> list[dict]:              OpenAI schemas, requested after `reset`
        def call(self, name: str, arguments: dict) -> Any

    An attribute `timeout` sets the seconds that each method may take, in place of `rollout.tool_timeout`.
    """

    def reset(self, **row: Any) -> Any:
        """Start a conversation. Optional.

        `row` holds the prompt's columns: `prompt` (list of messages), `ground_truth`, `data_source`, and all others of
        the dataset; without `**`, only those the signature names.

        Returns None, or text for a further user message after the prompt's, or a list of messages to replace the
        prompt's. An exception aborts the conversation.
        """

    def reward(self) -> Any:
        """Return the conversation's reward: a number, or {"reward", "parts", "turns"} as from a reward function.

        It may declare any of `REWARD_ARGUMENTS`. Optional if `reward.functions` is set; it becomes the part
        `environment` of the reward.
        """

    def close(self) -> None:
        """Release resources. Optional.

        Called once, even if the conversation was aborted, unless the process had to be killed.
        """


@dataclass(frozen=True)
class ToolResult:
    """A tool's result. `text` is what the policy reads; `ok` is False if the tool failed or was stopped."""

    text: str
    ok: bool


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
