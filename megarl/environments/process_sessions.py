"""The rank's side of tools and environments: one session per conversation. User code is never imported into the rank.

`ProcessPool` lends out processes of one kind, one conversation at a time, and keeps them for the next.
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
from megarl.config.plugins import format_error
from megarl.data.chat_columns import parse_chat_messages
from megarl.environments.catalog import ENVIRONMENTS_KEY, SERVE, TOOLS_KEY, EnvironmentCatalog, build_row
from megarl.environments.error_log import ErrorLog, ToolCallStats
from megarl.environments.protocol import EnvironmentInfo, SessionLost, ToolResult
from megarl.environments.tools import find_argument_error
from megarl.processes.process_limits import NO_LIMITS, ProcessLimits
from megarl.processes.worker_process import ForkServer, WorkerProcess, WorkerUnavailable
from megarl.types import Message, Prompt, RewardFailure, RewardResult
from megarl.types.reward_values import RewardError, parse_reward
from megarl.utils.text import replace_surrogates


class ProcessPool:
    """For one event loop. order: of each process, see `environment_process.py`. size: processes at most; they are
    started `at_once` at a time for as long as somebody waits, so that quick calls make do with few."""

    def __init__(self, nursery: ForkServer, order: Mapping[str, Any], size: float = math.inf, at_once: int = 1) -> None:
        self._fork_server, self._order, self._max_processes, self._max_starting = nursery, order, size, at_once
        self._idle: asyncio.Queue[WorkerProcess | WorkerUnavailable] = asyncio.LifoQueue()
        self._processes: set[WorkerProcess] = set()
        self._num_waiting = self._num_starting = 0
        self._tasks: set[asyncio.Task[None]] = set()

    async def acquire(self) -> WorkerProcess:
        """A free one. Raises Gone where none can be started."""
        while True:
            self._num_waiting += 1
            self._grow()
            try:
                found = await self._idle.get()
            finally:
                self._num_waiting -= 1
            if isinstance(found, WorkerUnavailable):
                raise found
            if found.is_alive:
                return found
            self.kill(found)

    def release(self, process: WorkerProcess) -> None:
        self._idle.put_nowait(process)

    def kill(self, process: WorkerProcess) -> None:
        """Have it killed with all that it has started; another takes its place where somebody waits."""
        self._processes.discard(process)
        process.end()
        self._grow()

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        for process in list(self._processes):
            process.end()

    def _grow(self) -> None:
        while (
            self._num_starting < self._max_starting
            and self._num_waiting > self._idle.qsize() + self._num_starting
            and len(self._processes) + self._num_starting < self._max_processes
        ):
            self._num_starting += 1
            task = asyncio.create_task(self._start())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _start(self) -> None:
        try:
            try:
                process = await self._fork_server.start_worker(self._order)
            except WorkerUnavailable:  # once more, for the nursery itself may have been lost
                process = await self._fork_server.start_worker(self._order)
        except WorkerUnavailable as error:
            self._num_starting -= 1
            if self._num_waiting > self._idle.qsize():
                self._idle.put_nowait(error)
            return
        except BaseException:
            self._num_starting -= 1
            raise
        self._num_starting -= 1
        self._processes.add(process)
        self._idle.put_nowait(process)
        self._grow()


AGENT_PRELOAD = ("openai", "openai.resources.chat")
"""What most agents import, which takes a second: once for all of their processes, where it is installed."""


class EnvironmentPool:
    """For one event loop, until `aclose`.

    timeout: seconds that a call may take, and `reset`, `reward` and `close`, not counting the wait for a process. size:
    processes for tools at most; an environment has one for each of its conversations. log: a file for what goes wrong,
    and for what they print.
    """

    def __init__(
        self,
        known: EnvironmentCatalog,
        timeout: float,
        size: int,
        log: Path | None = None,
        limits: ProcessLimits = NO_LIMITS,
    ) -> None:
        self.catalog, self.timeout, self.max_tool_processes = known, timeout, size
        self.error_log = ErrorLog(log)
        self.tool_call_stats: dict[str, ToolCallStats] = {}
        """Of tools, by name: those that reached the tool."""
        agents = any(one.kind == "agent" for one in known.environments.values())
        given = {"preload": AGENT_PRELOAD} if agents else {}
        self._fork_server = ForkServer(SERVE, given, Path(os.devnull) if log is None else log, limits)
        specs = dict.fromkeys(tool.spec for tool in known.tools.values())
        self._tool_processes = ProcessPool(self._fork_server, {"load": [[TOOLS_KEY, spec] for spec in specs]}, size)
        cores = len(os.sched_getaffinity(0))
        self._environment_processes = {
            name: ProcessPool(self._fork_server, {"load": [[ENVIRONMENTS_KEY, one.spec]]}, at_once=cores)
            for name, one in known.environments.items()
        }
        self._closing_tasks: set[asyncio.Task[None]] = set()

    async def open_session(self, prompt: Prompt) -> EnvironmentSession:
        """Raises SessionLost where `reset` fails, or no process can be had; ConfigError as `TrackerInfo.find_environment` does."""
        environment = self.catalog.find_environment(prompt)
        if environment is not None and environment.kind == "agent":
            raise RuntimeError(f"{environment.spec} is an agent, which is run, not begun")
        if environment is None:
            return EnvironmentSession(self, prompt.messages, self.catalog.select_schemas(prompt))
        name, leases = environment.name, self._environment_processes[environment.name]
        try:
            process = await leases.acquire()
        except WorkerUnavailable as error:
            raise SessionLost(f"{name}: {error}") from None
        world = _EnvironmentProcess(environment, leases, process)
        try:
            said = await self.request(world, {"do": "begin", "row": build_row(prompt)}, "reset")
            if "failed" in said:
                self.error_log.write(name, prompt.id, said["failed"], str(said.get("kind")), str(said.get("trace")))
                raise SessionLost(f"{name}: {said['failed']}")
            messages = _apply_reset(prompt.messages, said["messages"], name)
            return EnvironmentSession(self, messages, self.catalog.select_schemas(prompt, said["schemas"]), world)
        except BaseException:
            leases.kill(process)
            raise

    async def run_agent(self, prompt: Prompt, base_url: str, api_key: str, limit: float) -> Any:
        """What an agent returns, which is a client of the policy there; in a process that no other has meanwhile.
        Raises SessionLost where it raises, its process dies, or `limit` seconds are over."""
        environment = self.catalog.find_environment(prompt)
        assert environment is not None and environment.kind == "agent"
        leases = self._environment_processes[environment.name]
        try:
            process = await leases.acquire()
        except WorkerUnavailable as error:
            raise SessionLost(f"{environment.name}: {error}") from None
        order = {"do": "run", "row": build_row(prompt), "base_url": base_url, "api_key": api_key}
        done = False
        try:
            said = await process.request(_pickle_order(order), limit)
            done = "failed" not in said
        except TimeoutError:
            raise SessionLost(f"{environment.name} was stopped after {limit:g} s") from None
        except (WorkerUnavailable, _UnpicklableOrder) as error:
            raise SessionLost(f"{environment.name}: {error}") from None
        finally:
            if done:
                leases.release(process)
            else:  # who knows what is still going on there
                leases.kill(process)
        if "failed" in said:
            self.error_log.write(
                environment.name, prompt.id, said["failed"], str(said.get("kind")), str(said.get("trace"))
            )
            raise SessionLost(f"{environment.name}: {said['failed']}")
        return said.get("value")

    async def call_tool(self, name: str, arguments: Any) -> ToolResult:
        """Of `rollout.tools`. Whatever goes wrong inside it is the result's text; nothing is raised."""
        try:
            process = await self._tool_processes.acquire()
        except WorkerUnavailable as error:
            return self.record_failure(name, arguments, "the tool's process did not start", "start", str(error))
        order = {"do": "call", "spec": self.catalog.tools[name].spec, "name": name, "arguments": arguments}
        try:
            said = await process.request(_pickle_order(order), self.timeout)
            if "lost" in said:
                self._tool_processes.kill(process)
                return self.record_failure(name, arguments, said["lost"], str(said.get("kind")), str(said.get("trace")))
            result = self.record_result(name, arguments, said)
        except TimeoutError:
            self._tool_processes.kill(process)
            return self.record_failure(name, arguments, f"the tool was stopped after {self.timeout:g} s", "late")
        except (WorkerUnavailable, LookupError, ValueError, TypeError) as error:
            self._tool_processes.kill(process)
            return self.record_failure(name, arguments, "the tool's process died", "died", str(error))
        except BaseException:  # cancelled in the middle of a call: its answer must not reach another call
            self._tool_processes.kill(process)
            raise
        self._tool_processes.release(process)
        return result

    def record_result(self, name: str, arguments: Any, said: Mapping[str, Any]) -> ToolResult:
        """Of an answer. Raises LookupError or ValueError where it is none."""
        result = ToolResult(replace_surrogates(str(said["text"])), bool(said["ok"]))
        self._count_call(name, "" if result.ok else f"{result.text.removeprefix('Error: ')} ({said.get('kind')})")
        if not result.ok:
            self.error_log.write(name, arguments, result.text, str(said.get("kind")), str(said.get("trace")))
        return result

    def record_failure(self, name: str, arguments: Any, what: str, kind: str, said: str = "") -> ToolResult:
        self._count_call(name, " ".join(f"{what} {said}".split()))
        self.error_log.write(name, arguments, what, kind, said)
        return ToolResult(f"Error: {what}", False)

    def _count_call(self, name: str, failure: str) -> None:
        one = ToolCallStats(1, int(bool(failure)), failure[:500])
        self.tool_call_stats[name] = self.tool_call_stats.get(name, ToolCallStats()) + one

    async def request(self, world: _EnvironmentProcess, order: Mapping[str, Any], what: str) -> dict[str, Any]:
        """Of an environment's process. Raises SessionLost where there is no answer."""
        limit = world.info.timeout or self.timeout
        try:
            return await world.process.request(_pickle_order(order), limit)
        except TimeoutError:
            reason = f"{what} was stopped after {limit:g} s"
        except (WorkerUnavailable, _UnpicklableOrder) as error:
            reason = f"{what}: {error}"
        self.error_log.write(world.info.name, "", reason, what)
        raise SessionLost(f"{world.info.name}: {reason}")

    def run_later(self, work: Any) -> None:
        """Have it done while the conversation is gone."""
        task = asyncio.ensure_future(work)
        self._closing_tasks.add(task)
        task.add_done_callback(self._closing_tasks.discard)

    async def aclose(self) -> None:
        """End the processes, and whatever was started in them; objects that have ended are closed first."""
        await asyncio.gather(*self._closing_tasks, return_exceptions=True)
        for leases in (self._tool_processes, *self._environment_processes.values()):
            leases.close()
        await asyncio.to_thread(self._fork_server.close)


class _EnvironmentProcess:
    """An environment's object, in the process that it has."""

    def __init__(self, known: EnvironmentInfo, leases: ProcessPool, process: WorkerProcess) -> None:
        self.info, self.pool, self.process = known, leases, process
        self.lock = asyncio.Lock()
        self.lost_reason = ""


class EnvironmentSession:
    """One conversation's tools and environment. Made by `EnvironmentPool.open_session`.

    messages: the prompt's, as `reset` has left them. schemas: of all tools that the policy may call.
    """

    def __init__(
        self,
        sessions: EnvironmentPool,
        messages: tuple[Message, ...],
        schemas: Sequence[dict[str, Any]],
        world: _EnvironmentProcess | None = None,
    ) -> None:
        self.messages, self.schemas = messages, list(schemas)
        self._schema_by_name = {schema["function"]["name"]: schema for schema in schemas}
        self._pool, self._process = sessions, world
        self._call_tasks: dict[int, asyncio.Task[ToolResult]] = {}

    async def call(self, number: int, name: str, arguments: Any) -> ToolResult:
        """Call a tool; what goes wrong inside is the result's text. number: of the call within the conversation: one
        that was asked for before has the same result, and nothing is called again, so that a conversation which was
        stopped in the middle of a call can go on. Raises SessionLost where the environment is gone."""
        if number not in self._call_tasks or self._call_tasks[number].cancelled():
            self._call_tasks[number] = asyncio.create_task(self._call(name, arguments))
            self._call_tasks[number].add_done_callback(_retrieve_exception)
        return await asyncio.shield(self._call_tasks[number])

    async def _call(self, name: str, arguments: Any) -> ToolResult:
        if name not in self._schema_by_name:
            there_are = ", ".join(self._schema_by_name) or "none"
            return ToolResult(f"Error: there is no tool {name!r}; there are: {there_are}", False)
        if complaint := find_argument_error(self._schema_by_name[name], arguments):
            return ToolResult(f"Error: {complaint}", False)
        world, sessions = self._process, self._pool
        if world is None or name in sessions.catalog.tools:
            return await sessions.call_tool(name, arguments)
        async with world.lock:  # one call after the other, in the order in which the policy made them
            order = {"do": "call", "spec": "", "name": name, "arguments": arguments}
            said = await self._request(world, order, f"the tool {name}")
            if "lost" in said:
                sessions.error_log.write(name, arguments, said["lost"], str(said.get("kind")), str(said.get("trace")))
                self._mark_lost(world, f"{world.info.name}: {said['lost']}")
                raise SessionLost(world.lost_reason)
            try:
                return sessions.record_result(name, arguments, said)
            except (LookupError, ValueError, TypeError) as error:
                self._mark_lost(world, f"{world.info.name}: garbled answer: {error!r}")
                raise SessionLost(world.lost_reason) from None

    async def reward(self, answer: str, messages: Sequence[Message], turns: Sequence[str]) -> RewardResult | None:
        """What the environment says the conversation was worth; None where it has no `reward`. Raises nothing."""
        world = self._process
        if world is None or not world.info.has_reward:
            return None
        order = {"do": "reward", "answer": answer, "messages": list(messages), "turns": list(turns)}
        try:
            async with world.lock:
                said = await self._request(world, order, "reward")
        except SessionLost as error:
            return RewardFailure(str(error))
        if "failed" in said:
            self._pool.error_log.write(
                world.info.name, answer[:200], said["failed"], str(said.get("kind")), str(said.get("trace"))
            )
            return RewardFailure(f"{world.info.name}: {said['failed']}")
        try:
            return parse_reward(said.get("value"), len(turns))
        except (RewardError, TypeError) as error:
            return RewardFailure(f"{world.info.name}: reward: {error}")

    async def _request(self, world: _EnvironmentProcess, order: Mapping[str, Any], what: str) -> dict[str, Any]:
        if world.lost_reason:
            raise SessionLost(world.lost_reason)
        try:
            return await self._pool.request(world, order, what)
        except SessionLost as error:
            self._mark_lost(world, str(error))
            raise
        except BaseException:  # cancelled in the middle of it
            self._mark_lost(world, f"{world.info.name}: {what} was cut off")
            raise

    def _mark_lost(self, world: _EnvironmentProcess, why: str) -> None:
        world.lost_reason = why
        world.pool.kill(world.process)

    def close(self) -> None:
        """Give the process back, when `close` is through; safe to call twice. What is under way is cut off, with its
        process."""
        for task in self._call_tasks.values():
            task.cancel()
        world, self._process = self._process, None
        if world is not None and not world.lost_reason:
            if world.lock.locked():
                self._mark_lost(world, "the conversation has ended")
            else:
                self._pool.run_later(self._close_environment(world))

    async def _close_environment(self, world: _EnvironmentProcess) -> None:
        try:
            said = await self._request(world, {"do": "end"}, "close")
        except SessionLost:
            return
        if "failed" in said:
            name = world.info.name
            self._pool.error_log.write(name, "", said["failed"], str(said.get("kind")), str(said.get("trace")))
        world.pool.release(world.process)


class _UnpicklableOrder(ValueError):
    """What an order holds cannot be pickled."""


def _pickle_order(order: Mapping[str, Any]) -> bytes:
    try:
        return pickle.dumps(order, 5)
    except Exception as error:  # of what a data set has put into a row
        raise _UnpicklableOrder(f"the row cannot be sent to its process: {format_error(error)}") from None


def _retrieve_exception(task: asyncio.Task[ToolResult]) -> None:
    """Nobody may be there any more who wants to know."""
    if not task.cancelled():
        task.exception()


def _apply_reset(prompt: tuple[Message, ...], said: Any, name: str) -> tuple[Message, ...]:
    """The prompt's as `reset` has left them. Raises SessionLost where they are none."""
    if said is None:
        return prompt
    if isinstance(said, str):
        return (*prompt, {"role": "user", "content": replace_surrogates(said)})
    try:
        found = parse_chat_messages(replace_surrogates(said), name, "reset")
    except (ConfigError, ValueError) as error:
        raise SessionLost(f"{name}: what reset returned are no messages: {error}") from None
    if found[-1]["role"] == "assistant":
        raise SessionLost(
            f"{name}: what reset returned ends with the assistant's words, which leaves nothing to answer"
        )
    return found
