"""The rank's side of tools and environments: one session per conversation. User code is never imported into the rank.

`Leases` lends out processes of one kind, one conversation at a time, and keeps them for the next.
"""

from __future__ import annotations

import asyncio
import math
import os
import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megarl.config import ConfigError
from megarl.config.plugins import worded
from megarl.data.chat_columns import chat_messages
from megarl.environments.catalog import ENVIRONMENTS, SERVE, TOOLS, Known, row_of
from megarl.environments.error_log import Calls, Notes
from megarl.environments.protocol import Described, SessionLost, ToolResult
from megarl.environments.tools import argument_error
from megarl.processes.process_limits import NO_LIMITS, Limits
from megarl.processes.worker_process import Gone, Nursery, Process
from megarl.types import Failed, Message, Prompt, Verdict
from megarl.types.reward_values import RewardError, reward_of
from megarl.utils.text import encodable


class Leases:
    """For one event loop. order: of each process, see `environment_process.py`. size: processes at most; they are
    started `at_once` at a time for as long as somebody waits, so that quick calls make do with few."""

    def __init__(self, nursery: Nursery, order: Mapping[str, Any], size: float = math.inf, at_once: int = 1) -> None:
        self._nursery, self._order, self._size, self._at_once = nursery, order, size, at_once
        self._idle: asyncio.Queue[Process | Gone] = asyncio.LifoQueue()
        self._all: set[Process] = set()
        self._waiting = self._starting = 0
        self._tasks: set[asyncio.Task[None]] = set()

    async def take(self) -> Process:
        """A free one. Raises Gone where none can be started."""
        while True:
            self._waiting += 1
            self._grow()
            try:
                found = await self._idle.get()
            finally:
                self._waiting -= 1
            if isinstance(found, Gone):
                raise found
            if found.alive:
                return found
            self.end(found)

    def give_back(self, process: Process) -> None:
        self._idle.put_nowait(process)

    def end(self, process: Process) -> None:
        """Have it killed with all that it has started; another takes its place where somebody waits."""
        self._all.discard(process)
        process.end()
        self._grow()

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        for process in list(self._all):
            process.end()

    def _grow(self) -> None:
        while (
            self._starting < self._at_once
            and self._waiting > self._idle.qsize() + self._starting
            and len(self._all) + self._starting < self._size
        ):
            self._starting += 1
            task = asyncio.create_task(self._start())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _start(self) -> None:
        try:
            try:
                process = await self._nursery.process(self._order)
            except Gone:  # once more, for the nursery itself may have been lost
                process = await self._nursery.process(self._order)
        except Gone as error:
            self._starting -= 1
            if self._waiting > self._idle.qsize():
                self._idle.put_nowait(error)
            return
        except BaseException:
            self._starting -= 1
            raise
        self._starting -= 1
        self._all.add(process)
        self._idle.put_nowait(process)
        self._grow()


OF_AGENTS = ("openai", "openai.resources.chat")
"""What most agents import, which takes a second: once for all of their processes, where it is installed."""


class Sessions:
    """For one event loop, until `aclose`.

    timeout: seconds that a call may take, and `reset`, `reward` and `close`, not counting the wait for a process. size:
    processes for tools at most; an environment has one for each of its conversations. log: a file for what goes wrong,
    and for what they print.
    """

    def __init__(
        self, known: Known, timeout: float, size: int, log: Path | None = None, limits: Limits = NO_LIMITS
    ) -> None:
        self.known, self.timeout, self.size = known, timeout, size
        self.notes = Notes(log)
        self.calls: dict[str, Calls] = {}
        """Of tools, by name: those that reached the tool."""
        agents = any(one.kind == "agent" for one in known.environments.values())
        given = {"preload": OF_AGENTS} if agents else {}
        self._nursery = Nursery(SERVE, given, Path(os.devnull) if log is None else log, limits)
        specs = dict.fromkeys(tool.spec for tool in known.tools.values())
        self._tools = Leases(self._nursery, {"load": [[TOOLS, spec] for spec in specs]}, size)
        cores = len(os.sched_getaffinity(0))
        self._environments = {
            name: Leases(self._nursery, {"load": [[ENVIRONMENTS, one.spec]]}, at_once=cores)
            for name, one in known.environments.items()
        }
        self._ending: set[asyncio.Task[None]] = set()

    async def begin(self, prompt: Prompt) -> Session:
        """Raises SessionLost where `reset` fails, or no process can be had; ConfigError as `Known.of` does."""
        environment = self.known.of(prompt)
        if environment is not None and environment.kind == "agent":
            raise RuntimeError(f"{environment.spec} is an agent, which is run, not begun")
        if environment is None:
            return Session(self, prompt.messages, self.known.schemas(prompt))
        name, leases = environment.name, self._environments[environment.name]
        try:
            process = await leases.take()
        except Gone as error:
            raise SessionLost(f"{name}: {error}") from None
        world = _World(environment, leases, process)
        try:
            said = await self.ask(world, {"do": "begin", "row": row_of(prompt)}, "reset")
            if "failed" in said:
                self.notes.write(name, prompt.id, said["failed"], str(said.get("kind")), str(said.get("trace")))
                raise SessionLost(f"{name}: {said['failed']}")
            messages = _messages(prompt.messages, said["messages"], name)
            return Session(self, messages, self.known.schemas(prompt, said["schemas"]), world)
        except BaseException:
            leases.end(process)
            raise

    async def run_agent(self, prompt: Prompt, base_url: str, api_key: str, limit: float) -> Any:
        """What an agent returns, which is a client of the policy there; in a process that no other has meanwhile.
        Raises SessionLost where it raises, its process dies, or `limit` seconds are over."""
        environment = self.known.of(prompt)
        assert environment is not None and environment.kind == "agent"
        leases = self._environments[environment.name]
        try:
            process = await leases.take()
        except Gone as error:
            raise SessionLost(f"{environment.name}: {error}") from None
        order = {"do": "run", "row": row_of(prompt), "base_url": base_url, "api_key": api_key}
        done = False
        try:
            said = await process.ask(_pickled(order), limit)
            done = "failed" not in said
        except TimeoutError:
            raise SessionLost(f"{environment.name} was stopped after {limit:g} s") from None
        except (Gone, _Unsent) as error:
            raise SessionLost(f"{environment.name}: {error}") from None
        finally:
            if done:
                leases.give_back(process)
            else:  # who knows what is still going on there
                leases.end(process)
        if "failed" in said:
            self.notes.write(environment.name, prompt.id, said["failed"], str(said.get("kind")), str(said.get("trace")))
            raise SessionLost(f"{environment.name}: {said['failed']}")
        return said.get("value")

    async def call_tool(self, name: str, arguments: Any) -> ToolResult:
        """Of `rollout.tools`. Whatever goes wrong inside it is the result's text; nothing is raised."""
        try:
            process = await self._tools.take()
        except Gone as error:
            return self.failed(name, arguments, "the tool's process did not start", "start", str(error))
        order = {"do": "call", "spec": self.known.tools[name].spec, "name": name, "arguments": arguments}
        try:
            said = await process.ask(_pickled(order), self.timeout)
            if "lost" in said:
                self._tools.end(process)
                return self.failed(name, arguments, said["lost"], str(said.get("kind")), str(said.get("trace")))
            result = self.result(name, arguments, said)
        except TimeoutError:
            self._tools.end(process)
            return self.failed(name, arguments, f"the tool was stopped after {self.timeout:g} s", "late")
        except (Gone, LookupError, ValueError, TypeError) as error:
            self._tools.end(process)
            return self.failed(name, arguments, "the tool's process died", "died", str(error))
        except BaseException:  # cancelled in the middle of a call: its answer must not reach another call
            self._tools.end(process)
            raise
        self._tools.give_back(process)
        return result

    def result(self, name: str, arguments: Any, said: Mapping[str, Any]) -> ToolResult:
        """Of an answer. Raises LookupError or ValueError where it is none."""
        result = ToolResult(encodable(str(said["text"])), bool(said["ok"]))
        self._count(name, "" if result.ok else f"{result.text.removeprefix('Error: ')} ({said.get('kind')})")
        if not result.ok:
            self.notes.write(name, arguments, result.text, str(said.get("kind")), str(said.get("trace")))
        return result

    def failed(self, name: str, arguments: Any, what: str, kind: str, said: str = "") -> ToolResult:
        self._count(name, " ".join(f"{what} {said}".split()))
        self.notes.write(name, arguments, what, kind, said)
        return ToolResult(f"Error: {what}", False)

    def _count(self, name: str, failure: str) -> None:
        one = Calls(1, int(bool(failure)), failure[:500])
        self.calls[name] = self.calls.get(name, Calls()) + one

    async def ask(self, world: _World, order: Mapping[str, Any], what: str) -> dict[str, Any]:
        """Of an environment's process. Raises SessionLost where there is no answer."""
        limit = world.known.timeout or self.timeout
        try:
            return await world.process.ask(_pickled(order), limit)
        except TimeoutError:
            reason = f"{what} was stopped after {limit:g} s"
        except (Gone, _Unsent) as error:
            reason = f"{what}: {error}"
        self.notes.write(world.known.name, "", reason, what)
        raise SessionLost(f"{world.known.name}: {reason}")

    def later(self, work: Any) -> None:
        """Have it done while the conversation is gone."""
        task = asyncio.ensure_future(work)
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    async def aclose(self) -> None:
        """End the processes, and whatever was started in them; objects that have ended are closed first."""
        await asyncio.gather(*self._ending, return_exceptions=True)
        for leases in (self._tools, *self._environments.values()):
            leases.close()
        await asyncio.to_thread(self._nursery.close)


class _World:
    """An environment's object, in the process that it has."""

    def __init__(self, known: Described, leases: Leases, process: Process) -> None:
        self.known, self.leases, self.process = known, leases, process
        self.turn = asyncio.Lock()
        self.lost = ""


class Session:
    """One conversation's tools and environment. Made by `Sessions.begin`.

    messages: the prompt's, as `reset` has left them. schemas: of all tools that the policy may call.
    """

    def __init__(
        self,
        sessions: Sessions,
        messages: tuple[Message, ...],
        schemas: Sequence[dict[str, Any]],
        world: _World | None = None,
    ) -> None:
        self.messages, self.schemas = messages, list(schemas)
        self._by_name = {schema["function"]["name"]: schema for schema in schemas}
        self._sessions, self._world = sessions, world
        self._calls: dict[int, asyncio.Task[ToolResult]] = {}

    async def call(self, number: int, name: str, arguments: Any) -> ToolResult:
        """Call a tool; what goes wrong inside is the result's text. number: of the call within the conversation: one
        that was asked for before has the same result, and nothing is called again, so that a conversation which was
        stopped in the middle of a call can go on. Raises SessionLost where the environment is gone."""
        if number not in self._calls or self._calls[number].cancelled():
            self._calls[number] = asyncio.create_task(self._call(name, arguments))
            self._calls[number].add_done_callback(_is_seen)
        return await asyncio.shield(self._calls[number])

    async def _call(self, name: str, arguments: Any) -> ToolResult:
        if name not in self._by_name:
            there_are = ", ".join(self._by_name) or "none"
            return ToolResult(f"Error: there is no tool {name!r}; there are: {there_are}", False)
        if complaint := argument_error(self._by_name[name], arguments):
            return ToolResult(f"Error: {complaint}", False)
        world, sessions = self._world, self._sessions
        if world is None or name in sessions.known.tools:
            return await sessions.call_tool(name, arguments)
        async with world.turn:  # one call after the other, in the order in which the policy made them
            order = {"do": "call", "spec": "", "name": name, "arguments": arguments}
            said = await self._asked(world, order, f"the tool {name}")
            if "lost" in said:
                sessions.notes.write(name, arguments, said["lost"], str(said.get("kind")), str(said.get("trace")))
                self._lose(world, f"{world.known.name}: {said['lost']}")
                raise SessionLost(world.lost)
            try:
                return sessions.result(name, arguments, said)
            except (LookupError, ValueError, TypeError) as error:
                self._lose(world, f"{world.known.name}: garbled answer: {error!r}")
                raise SessionLost(world.lost) from None

    async def reward(self, answer: str, messages: Sequence[Message], turns: Sequence[str]) -> Verdict | None:
        """What the environment says the conversation was worth; None where it has no `reward`. Raises nothing."""
        world = self._world
        if world is None or not world.known.rewards:
            return None
        order = {"do": "reward", "answer": answer, "messages": list(messages), "turns": list(turns)}
        try:
            async with world.turn:
                said = await self._asked(world, order, "reward")
        except SessionLost as error:
            return Failed(str(error))
        if "failed" in said:
            self._sessions.notes.write(
                world.known.name, answer[:200], said["failed"], str(said.get("kind")), str(said.get("trace"))
            )
            return Failed(f"{world.known.name}: {said['failed']}")
        try:
            return reward_of(said.get("value"), len(turns))
        except (RewardError, TypeError) as error:
            return Failed(f"{world.known.name}: reward: {error}")

    async def _asked(self, world: _World, order: Mapping[str, Any], what: str) -> dict[str, Any]:
        if world.lost:
            raise SessionLost(world.lost)
        try:
            return await self._sessions.ask(world, order, what)
        except SessionLost as error:
            self._lose(world, str(error))
            raise
        except BaseException:  # cancelled in the middle of it
            self._lose(world, f"{world.known.name}: {what} was cut off")
            raise

    def _lose(self, world: _World, why: str) -> None:
        world.lost = why
        world.leases.end(world.process)

    def end(self) -> None:
        """Give the process back, when `close` is through; safe to call twice. What is under way is cut off, with its
        process."""
        for task in self._calls.values():
            task.cancel()
        world, self._world = self._world, None
        if world is not None and not world.lost:
            if world.turn.locked():
                self._lose(world, "the conversation has ended")
            else:
                self._sessions.later(self._close(world))

    async def _close(self, world: _World) -> None:
        try:
            said = await self._asked(world, {"do": "end"}, "close")
        except SessionLost:
            return
        if "failed" in said:
            name = world.known.name
            self._sessions.notes.write(name, "", said["failed"], str(said.get("kind")), str(said.get("trace")))
        world.leases.give_back(world.process)


class _Unsent(ValueError):
    """What an order holds cannot be pickled."""


def _pickled(order: Mapping[str, Any]) -> bytes:
    try:
        return pickle.dumps(order, 5)
    except Exception as error:  # of what a data set has put into a row
        raise _Unsent(f"the row cannot be sent to its process: {worded(error)}") from None


def _is_seen(task: asyncio.Task[ToolResult]) -> None:
    """Nobody may be there any more who wants to know."""
    if not task.cancelled():
        task.exception()


def _messages(prompt: tuple[Message, ...], said: Any, name: str) -> tuple[Message, ...]:
    """The prompt's as `reset` has left them. Raises SessionLost where they are none."""
    if said is None:
        return prompt
    if isinstance(said, str):
        return (*prompt, {"role": "user", "content": encodable(said)})
    try:
        found = chat_messages(encodable(said), name, "reset")
    except (ConfigError, ValueError) as error:
        raise SessionLost(f"{name}: what reset returned are no messages: {error}") from None
    if found[-1]["role"] == "assistant":
        raise SessionLost(
            f"{name}: what reset returned ends with the assistant's words, which leaves nothing to answer"
        )
    return found
