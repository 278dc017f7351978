"""The rank's side of tools and environments: one session per conversation. User code is never imported into the rank.

`WorkerPool` leases processes of one kind to one conversation at a time, and reuses them. `ErrorLog` and `ToolCallStats`
log and count errors inside tools and environments, of which the policy reads only a line.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pickle
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarl.config import ConfigError
from megarl.config.plugins import format_error
from megarl.data.columns import parse_chat_messages
from megarl.environments.catalog import ENVIRONMENTS_KEY, SERVE, TOOLS_KEY, EnvironmentCatalog, build_row
from megarl.environments.protocol import EnvironmentInfo, SessionLost, ToolResult
from megarl.environments.tools import find_argument_error
from megarl.processes.children import NO_LIMITS, ProcessLimits
from megarl.processes.worker_process import ForkServer, WorkerPool, WorkerProcess, WorkerUnavailable
from megarl.types import Message, Prompt, RewardFailure, RewardResult
from megarl.types.reward_values import RewardError, parse_reward
from megarl.utils.text import replace_surrogates

_MAX_PER_KIND = 10  # an untrained policy can repeat the same error a million times
_MAX_KINDS = 100


@dataclass(frozen=True)
class ToolCallStats:
    """A tool's calls, how many failed inside it, and the first error."""

    num_calls: int = 0
    num_failed: int = 0
    first_error: str = ""

    def __add__(self, other: ToolCallStats) -> ToolCallStats:
        return ToolCallStats(
            self.num_calls + other.num_calls, self.num_failed + other.num_failed, self.first_error or other.first_error
        )

    def __sub__(self, before: ToolCallStats) -> ToolCallStats:
        """Return the difference since `before`; `first_error` is kept if any call failed since."""
        failed = self.num_failed - before.num_failed
        return ToolCallStats(self.num_calls - before.num_calls, failed, self.first_error if failed else "")


class ErrorLog:
    """Logs the first few errors of each kind. `file` is None for no log."""

    def __init__(self, file: Path | None) -> None:
        self._file = file
        self._counts: Counter[tuple[str, str]] = Counter()

    def write(self, name: str, arguments: Any, what: str, kind: str, output: str = "") -> None:
        """Append an error. A log that cannot be written must not end the run."""
        self._counts[name, kind] += 1
        if self._file is None or self._counts[name, kind] > _MAX_PER_KIND or len(self._counts) > _MAX_KINDS:
            return
        suffix = "; further ones are not logged" if self._counts[name, kind] == _MAX_PER_KIND else ""
        with contextlib.suppress(OSError, TypeError, ValueError, RecursionError):
            call = json.dumps(arguments)[:1000]
            text = f"--- {time.strftime('%F %T')} {name} {call}: {what[:1000]}{suffix}\n{output.strip()}\n"
            self._file.parent.mkdir(parents=True, exist_ok=True)
            with self._file.open("a", encoding="utf-8", errors="replace") as file:
                file.write(text)


AGENT_PRELOAD = ("openai", "openai.resources.chat")
"""Modules that most agents import, which takes a second; preloaded once for all agent processes, if installed."""


class EnvironmentPool:
    """All processes of tools and environments, for one event loop, until `aclose`.

    Args:
        timeout: seconds for a call, `reset`, `reward` or `close`, not counting the wait for a process
        size: maximum number of processes for tools; an environment has one per running conversation
        log: file for errors and for what the processes print
    """

    def __init__(
        self,
        catalog: EnvironmentCatalog,
        timeout: float,
        size: int,
        log: Path | None = None,
        limits: ProcessLimits = NO_LIMITS,
    ) -> None:
        self.catalog, self.timeout, self.max_tool_processes = catalog, timeout, size
        self.error_log = ErrorLog(log)
        self.tool_call_stats: dict[str, ToolCallStats] = {}
        """Calls that reached a tool, by its name."""
        has_agents = any(info.kind == "agent" for info in catalog.environments.values())
        settings = {"preload": AGENT_PRELOAD} if has_agents else {}
        self._fork_server = ForkServer(SERVE, settings, Path(os.devnull) if log is None else log, limits)
        specs = dict.fromkeys(tool.spec for tool in catalog.tools.values())
        self._tool_processes = WorkerPool(self._fork_server, {"load": [[TOOLS_KEY, spec] for spec in specs]}, size)
        cores = len(os.sched_getaffinity(0))
        self._environment_processes = {
            name: WorkerPool(self._fork_server, {"load": [[ENVIRONMENTS_KEY, info.spec]]}, max_starting=cores)
            for name, info in catalog.environments.items()
        }
        self._closing_tasks: set[asyncio.Task[None]] = set()

    async def open_session(self, prompt: Prompt) -> EnvironmentSession:
        """Open a session for a conversation.

        Raises SessionLost if `reset` fails or no process is available, ConfigError as
        `EnvironmentCatalog.find_environment`.
        """
        environment = self.catalog.find_environment(prompt)
        if environment is not None and environment.kind == "agent":
            raise RuntimeError(f"{environment.spec} is an agent, which is run, not reset")
        if environment is None:
            return EnvironmentSession(self, prompt.messages, self.catalog.select_schemas(prompt))
        name, pool = environment.name, self._environment_processes[environment.name]
        try:
            process = await pool.acquire()
        except WorkerUnavailable as error:
            raise SessionLost(f"{name}: {error}") from None
        world = _EnvironmentProcess(environment, pool, process)
        try:
            answer = await self.request(world, {"do": "begin", "row": build_row(prompt)}, "reset")
            if "failed" in answer:
                self.error_log.write(
                    name, prompt.id, answer["failed"], str(answer.get("kind")), str(answer.get("trace"))
                )
                raise SessionLost(f"{name}: {answer['failed']}")
            messages = _apply_reset(prompt.messages, answer["messages"], name)
            return EnvironmentSession(self, messages, self.catalog.select_schemas(prompt, answer["schemas"]), world)
        except BaseException:
            pool.kill(process)
            raise

    async def run_agent(self, prompt: Prompt, base_url: str, api_key: str, limit: float) -> Any:
        """Run an agent as a client of the policy, in an exclusive process, and return its result.

        Raises SessionLost if it raises, its process dies, or `limit` seconds have passed.
        """
        environment = self.catalog.find_environment(prompt)
        assert environment is not None and environment.kind == "agent"
        pool = self._environment_processes[environment.name]
        try:
            process = await pool.acquire()
        except WorkerUnavailable as error:
            raise SessionLost(f"{environment.name}: {error}") from None
        order = {"do": "run", "row": build_row(prompt), "base_url": base_url, "api_key": api_key}
        has_succeeded = False
        try:
            answer = await process.request(_pickle_order(order), limit)
            has_succeeded = "failed" not in answer
        except TimeoutError:
            raise SessionLost(f"{environment.name} was stopped after {limit:g} s") from None
        except (WorkerUnavailable, _UnpicklableOrder) as error:
            raise SessionLost(f"{environment.name}: {error}") from None
        finally:
            if has_succeeded:
                pool.release(process)
            else:  # unknown work may still be running in it
                pool.kill(process)
        if "failed" in answer:
            self.error_log.write(
                environment.name, prompt.id, answer["failed"], str(answer.get("kind")), str(answer.get("trace"))
            )
            raise SessionLost(f"{environment.name}: {answer['failed']}")
        return answer.get("value")

    async def call_tool(self, name: str, arguments: Any) -> ToolResult:
        """Call a tool of `rollout.tools`. Raises nothing: any failure becomes the result's text."""
        try:
            process = await self._tool_processes.acquire()
        except WorkerUnavailable as error:
            return self.record_failure(name, arguments, "the tool's process did not start", "start", str(error))
        order = {"do": "call", "spec": self.catalog.tools[name].spec, "name": name, "arguments": arguments}
        try:
            answer = await process.request(_pickle_order(order), self.timeout)
            if "lost" in answer:
                self._tool_processes.kill(process)
                return self.record_failure(
                    name, arguments, answer["lost"], str(answer.get("kind")), str(answer.get("trace"))
                )
            result = self.record_result(name, arguments, answer)
        except TimeoutError:
            self._tool_processes.kill(process)
            return self.record_failure(name, arguments, f"the tool was stopped after {self.timeout:g} s", "late")
        except (WorkerUnavailable, LookupError, ValueError, TypeError) as error:
            self._tool_processes.kill(process)
            return self.record_failure(name, arguments, "the tool's process died", "died", str(error))
        except BaseException:  # cancelled mid-call: the answer must not reach another call
            self._tool_processes.kill(process)
            raise
        self._tool_processes.release(process)
        return result

    def record_result(self, name: str, arguments: Any, output: Mapping[str, Any]) -> ToolResult:
        """Convert a process's answer. Raises LookupError or ValueError if it is invalid."""
        result = ToolResult(replace_surrogates(str(output["text"])), bool(output["ok"]))
        self._count_call(name, "" if result.ok else f"{result.text.removeprefix('Error: ')} ({output.get('kind')})")
        if not result.ok:
            self.error_log.write(name, arguments, result.text, str(output.get("kind")), str(output.get("trace")))
        return result

    def record_failure(self, name: str, arguments: Any, what: str, kind: str, output: str = "") -> ToolResult:
        self._count_call(name, " ".join(f"{what} {output}".split()))
        self.error_log.write(name, arguments, what, kind, output)
        return ToolResult(f"Error: {what}", False)

    def _count_call(self, name: str, failure: str) -> None:
        stats = ToolCallStats(1, int(bool(failure)), failure[:500])
        self.tool_call_stats[name] = self.tool_call_stats.get(name, ToolCallStats()) + stats

    async def request(self, process: _EnvironmentProcess, order: Mapping[str, Any], what: str) -> dict[str, Any]:
        """Send an order to an environment's process. Raises SessionLost if there is no answer."""
        limit = process.info.timeout or self.timeout
        try:
            return await process.process.request(_pickle_order(order), limit)
        except TimeoutError:
            reason = f"{what} was stopped after {limit:g} s"
        except (WorkerUnavailable, _UnpicklableOrder) as error:
            reason = f"{what}: {error}"
        self.error_log.write(process.info.name, "", reason, what)
        raise SessionLost(f"{process.info.name}: {reason}")

    def run_later(self, work: Any) -> None:
        """Run a coroutine in the background, after its conversation has ended."""
        task = asyncio.ensure_future(work)
        self._closing_tasks.add(task)
        task.add_done_callback(self._closing_tasks.discard)

    async def aclose(self) -> None:
        """Close remaining environment objects, then end all processes and their children."""
        await asyncio.gather(*self._closing_tasks, return_exceptions=True)
        for pool in (self._tool_processes, *self._environment_processes.values()):
            pool.close()
        await asyncio.to_thread(self._fork_server.close)


class _EnvironmentProcess:
    """An environment's object, in its leased process."""

    def __init__(self, info: EnvironmentInfo, pool: WorkerPool, process: WorkerProcess) -> None:
        self.info, self.pool, self.process = info, pool, process
        self.lock = asyncio.Lock()
        self.lost_reason = ""


class EnvironmentSession:
    """One conversation's tools and environment, opened by `EnvironmentPool.open_session`.

    Attributes:
        messages: the prompt's messages after `reset`
        schemas: all tools that the policy may call
    """

    def __init__(
        self,
        pool: EnvironmentPool,
        messages: tuple[Message, ...],
        schemas: Sequence[dict[str, Any]],
        process: _EnvironmentProcess | None = None,
    ) -> None:
        self.messages, self.schemas = messages, list(schemas)
        self._schema_by_name = {schema["function"]["name"]: schema for schema in schemas}
        self._pool, self._process = pool, process
        self._call_tasks: dict[int, asyncio.Task[ToolResult]] = {}

    async def call(self, number: int, name: str, arguments: Any) -> ToolResult:
        """Call a tool; failures inside it become the result's text.

        Repeating a `number`, which counts the conversation's calls, returns the earlier result without a new call, so
        that a conversation halted mid-call can continue. Raises SessionLost if the environment is lost.
        """
        if number not in self._call_tasks or self._call_tasks[number].cancelled():
            self._call_tasks[number] = asyncio.create_task(self._call(name, arguments))
            self._call_tasks[number].add_done_callback(_retrieve_exception)
        return await asyncio.shield(self._call_tasks[number])

    async def _call(self, name: str, arguments: Any) -> ToolResult:
        if name not in self._schema_by_name:
            available = ", ".join(self._schema_by_name) or "none"
            return ToolResult(f"Error: unknown tool {name!r}; available: {available}", False)
        if argument_error := find_argument_error(self._schema_by_name[name], arguments):
            return ToolResult(f"Error: {argument_error}", False)
        process, pool = self._process, self._pool
        if process is None or name in pool.catalog.tools:
            return await pool.call_tool(name, arguments)
        async with process.lock:  # calls run one at a time, in the policy's order
            order = {"do": "call", "spec": "", "name": name, "arguments": arguments}
            answer = await self._request(process, order, f"the tool {name}")
            if "lost" in answer:
                pool.error_log.write(name, arguments, answer["lost"], str(answer.get("kind")), str(answer.get("trace")))
                self._mark_lost(process, f"{process.info.name}: {answer['lost']}")
                raise SessionLost(process.lost_reason)
            try:
                return pool.record_result(name, arguments, answer)
            except (LookupError, ValueError, TypeError) as error:
                self._mark_lost(process, f"{process.info.name}: garbled answer: {error!r}")
                raise SessionLost(process.lost_reason) from None

    async def reward(self, answer: str, messages: Sequence[Message], turns: Sequence[str]) -> RewardResult | None:
        """Return the environment's reward, or None if it has no `reward`. Raises nothing."""
        process = self._process
        if process is None or not process.info.has_reward:
            return None
        order = {"do": "reward", "answer": answer, "messages": list(messages), "turns": list(turns)}
        try:
            async with process.lock:
                reply = await self._request(process, order, "reward")
        except SessionLost as error:
            return RewardFailure(str(error))
        if "failed" in reply:
            self._pool.error_log.write(
                process.info.name, answer[:200], reply["failed"], str(reply.get("kind")), str(reply.get("trace"))
            )
            return RewardFailure(f"{process.info.name}: {reply['failed']}")
        try:
            return parse_reward(reply.get("value"), len(turns))
        except (RewardError, TypeError) as error:
            return RewardFailure(f"{process.info.name}: reward: {error}")

    async def _request(self, process: _EnvironmentProcess, order: Mapping[str, Any], what: str) -> dict[str, Any]:
        if process.lost_reason:
            raise SessionLost(process.lost_reason)
        try:
            return await self._pool.request(process, order, what)
        except SessionLost as error:
            self._mark_lost(process, str(error))
            raise
        except BaseException:  # cancelled midway
            self._mark_lost(process, f"{process.info.name}: {what} was truncated")
            raise

    def _mark_lost(self, process: _EnvironmentProcess, why: str) -> None:
        process.lost_reason = why
        process.pool.kill(process.process)

    def close(self) -> None:
        """Release the process after the environment's `close`; safe to call twice.

        A running call is cancelled and its process killed.
        """
        for task in self._call_tasks.values():
            task.cancel()
        process, self._process = self._process, None
        if process is not None and not process.lost_reason:
            if process.lock.locked():
                self._mark_lost(process, "the conversation has ended")
            else:
                self._pool.run_later(self._close_environment(process))

    async def _close_environment(self, process: _EnvironmentProcess) -> None:
        try:
            answer = await self._request(process, {"do": "end"}, "close")
        except SessionLost:
            return
        if "failed" in answer:
            name = process.info.name
            self._pool.error_log.write(name, "", answer["failed"], str(answer.get("kind")), str(answer.get("trace")))
        process.pool.release(process.process)


class _UnpicklableOrder(ValueError):
    """An order holds a value that cannot be pickled."""


def _pickle_order(order: Mapping[str, Any]) -> bytes:
    try:
        return pickle.dumps(order, 5)
    except Exception as error:  # raised by values of the dataset
        raise _UnpicklableOrder(f"the row cannot be sent to its process: {format_error(error)}") from None


def _retrieve_exception(task: asyncio.Task[ToolResult]) -> None:
    """Mark the exception as retrieved, because nobody may be waiting for it any more."""
    if not task.cancelled():
        task.exception()


def _apply_reset(prompt: tuple[Message, ...], reply: Any, name: str) -> tuple[Message, ...]:
    """Apply the result of `reset` to the prompt's messages. Raises SessionLost if it is invalid."""
    if reply is None:
        return prompt
    if isinstance(reply, str):
        return (*prompt, {"role": "user", "content": replace_surrogates(reply)})
    try:
        messages = parse_chat_messages(replace_surrogates(reply), name, "reset")
    except (ConfigError, ValueError) as error:
        raise SessionLost(f"{name}: reset did not return messages: {error}") from None
    if messages[-1]["role"] == "assistant":
        raise SessionLost(
            f"{name}: reset returned messages that end with the assistant's, so there is nothing to answer"
        )
    return messages
