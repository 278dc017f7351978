"""What a class must have to be an environment, and what is known of one without importing it.

    class Guess:
        def reset(self, ground_truth: int) -> str:
            self.number, self.tries = ground_truth, 0
            return "I think of a number from 1 to 100."

        def guess(self, number: int) -> str:
            '''Compare a number with mine.

            Args:
                number: from 1 to 100
            '''
            self.tries += 1
            return "right" if number == self.number else "higher" if number < self.number else "lower"

        def reward(self, answer: str) -> float:
            return float(answer.strip() == str(self.number)) - 0.01 * self.tries

`Environment` below has the rules. `rollout.environments: [my_module:Guess]` names it; a prompt's column `environment`
says which one is its own where there are several. Any method may be a coroutine. An object of the class lives from
`reset` to the end of one conversation, in a process that no other conversation uses meanwhile; then
the process is given a new object. Nothing here imports anything heavy, for those processes import it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

EnvironmentKind = Literal["tools", "environment", "agent"]
"""tools: without a state, called by whichever process is free. environment: an object for each conversation. agent: a
coroutine function that is a client of the policy, `async def run(row, base_url, api_key) -> float | dict | None`,
which has a process to itself meanwhile, and that plays further episodes later."""

ADAPTER_PREFIXES = ("mcp", "verifiers", "harbor", "program")
"""`mcp:FILE` stands for what `megarl.environments.mcp:environment` makes of FILE: a class as here, or an agent."""

RESERVED_METHODS = ("reset", "reward", "close", "tools", "call")
"""Methods that are no tools."""

REWARD_ARGUMENTS = ("answer", "messages", "turns")
"""What `reward` may be given, each where it names it. answer: str, what the policy said last. messages: list of chat
messages, the whole conversation. turns: list of str, each of the policy's turns as it was written, calls included."""


class Environment(Protocol):
    """A class; its constructor takes no arguments.

    Any further public method is a tool: its name, docstring and type hints make the schema (`schemas.py`). A class
    whose tools are found only when it runs has two methods in place of those, sync or async:

        def tools(self) -> list[dict]:              OpenAI schemas, asked for after `reset`
        def call(self, name: str, arguments: dict) -> Any

    It may have an attribute `timeout`, the seconds that each of its methods may take, in place of
    `rollout.tool_timeout`.
    """

    def reset(self, **row: Any) -> Any:
        """Begin. row: the prompt's columns: `prompt` (list of messages), `ground_truth`, `data_source`, and all others
        that the data set has; where there is no `**`, those that the signature names. Optional.

        Returns None; or text, a further message of the user's behind the prompt's; or a list of messages in place of
        the prompt's. Whatever it raises aborts the conversation.
        """

    def reward(self) -> Any:
        """What it was worth: a number, or {"reward", "parts", "turns"} as a reward function returns it. May name what
        `REWARD_ARGUMENTS` lists. Optional, where `reward.functions` has some: it is the part `environment` of the reward."""

    def close(self) -> None:
        """Give back what it holds. Optional; called once, also where the conversation was aborted, but for a process
        that had to be killed."""


@dataclass(frozen=True)
class ToolResult:
    """text: what the policy reads; ok: whether the tool returned of its own accord and without an error."""

    text: str
    ok: bool


class SessionLost(Exception):
    """An environment can go on no more, in one line: its process died or hung, `reset` raised, a tool raised this."""


@dataclass(frozen=True)
class EnvironmentInfo:
    """What is known of one without importing it: its own process has said so. All of it JSON can hold.

    spec: as the configuration has it; name: of the class or function, or what comes behind a prefix's colon. schemas:
    of its tools, () where they are found at run time (`dynamic`). required: columns that `reset` must have; takes:
    those that it may have, None for all. rewards: whether it has a `reward`; an agent may. timeout: its own seconds, 0
    for none. sandboxed: whether it runs what the policy writes in the sandbox, which an attribute of that name says.
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
