"""The rank's side of tools and environments: one session per conversation. A rank never imports user code."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import math
import os
import pickle
import time
from collections import Counter
from collections.abc import Coroutine, Mapping, Sequence
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
    """A tool's calls, how many failed inside it, and the first error.

    Malformed calls, whose arguments do not match the schema, do not reach the tool: `num_calls` excludes them.
    """

    num_calls: int = 0
    num_failed: int = 0
    first_error: str = ""
    num_malformed: int = 0
    first_mismatch: str = ""

    def __add__(self, other: ToolCallStats) -> ToolCallStats:
        return ToolCallStats(
            self.num_calls + other.num_calls,
            self.num_failed + other.num_failed,
            self.first_error or other.first_error,
            self.num_malformed + other.num_malformed,
            self.first_mismatch or other.first_mismatch,
        )

    def __sub__(self, before: ToolCallStats) -> ToolCallStats:
        """Return the difference since `before`; texts are of the first call ever, and empty if none failed since."""
        failed, malformed = self.num_failed - before.num_failed, self.num_malformed - before.num_malformed
        return ToolCallStats(
            self.num_calls - before.num_calls,
            failed,
            self.first_error if failed else "",
            malformed,
            self.first_mismatch if malformed else "",
        )


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

    def write_answer(self, name: str, arguments: Any, what: str, answer: Mapping[str, Any]) -> None:
        """Append an error that a process reported."""
        self.write(name, arguments, what, str(answer.get("kind")), str(answer.get("trace")))


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
        """Calls that named a tool, by its name."""
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
        if environment is None:
            return EnvironmentSession(self, prompt.messages, self.catalog.select_schemas(prompt))
        if environment.kind == "agent":
            raise RuntimeError(f"{environment.spec} is an agent, which is run, not reset")
        process = await self._lease(environment)
        try:
            answer = await process.request({"do": "begin", "row": build_row(prompt)}, "reset", prompt.id)
            messages = _apply_reset(prompt.messages, answer["messages"], environment.name)
            schemas = self.catalog.select_schemas(prompt, answer["schemas"])
        except BaseException:
            process.kill(f"{environment.name}: reset failed")
            raise
        return EnvironmentSession(self, messages, schemas, process)

    async def run_agent(self, prompt: Prompt, base_url: str, api_key: str) -> Any:
        """Run an agent as a client of the policy, in an exclusive process, and return its result.

        Raises SessionLost if it raises or its process dies.
        """
        environment = self.catalog.find_environment(prompt)
        assert environment is not None and environment.kind == "agent"
        process = await self._lease(environment)
        order = {"do": "run", "row": build_row(prompt), "base_url": base_url, "api_key": api_key}
        try:
            answer = await process.request(order, "", prompt.id, limit=math.inf)
        except BaseException:  # unknown work may still be running in it
            process.kill(f"{environment.name} failed")
            raise
        process.release()
        return answer.get("value")

    async def _lease(self, environment: EnvironmentInfo) -> _EnvironmentProcess:
        workers = self._environment_processes[environment.name]
        try:
            worker = await workers.acquire()
        except WorkerUnavailable as error:
            raise SessionLost(f"{environment.name}: {error}") from None
        return _EnvironmentProcess(environment, workers, worker, environment.timeout or self.timeout, self.error_log)

    async def call_tool(self, name: str, arguments: Any) -> ToolResult:
        """Call a tool of `rollout.tools`. Raises nothing: any failure becomes the result's text."""
        try:
            process = await self._tool_processes.acquire()
        except WorkerUnavailable as error:
            return self._record_failure(name, arguments, "the tool's process did not start", "start", str(error))
        order = {"do": "call", "spec": self.catalog.tools[name].spec, "name": name, "arguments": arguments}
        is_usable = False  # not if the call is cancelled: its answer must not reach another one
        try:
            answer = await process.request(pickle.dumps(order, 5), self.timeout)
            if "lost" in answer:
                kind, trace = str(answer.get("kind")), str(answer.get("trace"))
                return self._record_failure(name, arguments, answer["lost"], kind, trace)
            result = self.record_result(name, arguments, answer)
            is_usable = True
            return result
        except TimeoutError:
            return self._record_failure(name, arguments, f"the tool was stopped after {self.timeout:g} s", "late")
        except (WorkerUnavailable, LookupError, ValueError, TypeError) as error:
            return self._record_failure(name, arguments, "the tool's process died", "died", str(error))
        finally:
            if is_usable:
                self._tool_processes.release(process)
            else:
                self._tool_processes.kill(process)

    def record_result(self, name: str, arguments: Any, output: Mapping[str, Any]) -> ToolResult:
        """Convert a process's answer. Raises LookupError or ValueError if it is invalid."""
        images = tuple(base64.b64decode(image, validate=True) for image in output.get("images", ()))
        result = ToolResult(replace_surrogates(str(output["text"])), bool(output["ok"]), images)
        self._count_call(name, "" if result.ok else f"{result.text.removeprefix('Error: ')} ({output.get('kind')})")
        if not result.ok:
            self.error_log.write_answer(name, arguments, result.text, output)
        return result

    def _record_failure(self, name: str, arguments: Any, what: str, kind: str, output: str = "") -> ToolResult:
        self._count_call(name, " ".join(f"{what} {output}".split()))
        self.error_log.write(name, arguments, what, kind, output)
        return ToolResult(f"Error: {what}", False)

    def _count_call(self, name: str, failure: str) -> None:
        self.add_call(name, ToolCallStats(1, int(bool(failure)), failure[:500]))

    def add_call(self, name: str, stats: ToolCallStats) -> None:
        """Count a call."""
        self.tool_call_stats[name] = self.tool_call_stats.get(name, ToolCallStats()) + stats

    def run_later(self, work: Coroutine[Any, Any, None]) -> None:
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
    """A process leased to one conversation: an environment's object, or an agent."""

    def __init__(
        self, info: EnvironmentInfo, workers: WorkerPool, worker: WorkerProcess, timeout: float, error_log: ErrorLog
    ) -> None:
        self.info, self._workers, self._worker = info, workers, worker
        self._timeout, self._error_log = timeout, error_log
        self.lock = asyncio.Lock()
        self.lost_reason = ""

    async def request(self, order: Mapping[str, Any], what: str, topic: str = "", limit: float = 0.0) -> dict[str, Any]:
        """Send an order and return its answer. Raises SessionLost if it fails, or if the process is lost.

        what: the method that runs, "" for an agent. topic: what it is about, for the log. limit: seconds, 0 for the
        environment's timeout.
        """
        if self.lost_reason:
            raise SessionLost(self.lost_reason)
        name, limit = self.info.name, limit or self._timeout
        method = f"{name}: {what}" if what else name
        try:
            content = pickle.dumps(order, 5)
        except Exception as error:  # raised by values of the dataset
            raise self.kill(f"{method}: the row cannot be sent to its process: {format_error(error)}") from None
        try:
            answer = await self._worker.request(content, limit)
        except (TimeoutError, WorkerUnavailable) as error:
            is_late = not isinstance(error, WorkerUnavailable)
            lost = self.kill(f"{method} was stopped after {limit:g} s" if is_late else f"{method}: {error}")
            self._error_log.write(name, topic, str(lost), what)
            raise lost from None
        except BaseException:  # cancelled midway
            self.kill(f"{method} was truncated")
            raise
        if "failed" in answer:
            self._error_log.write_answer(name, topic, answer["failed"], answer)
            raise SessionLost(f"{name}: {answer['failed']}")
        return answer

    def kill(self, reason: str) -> SessionLost:
        """Kill the process. Returns the error that further requests raise."""
        self.lost_reason = self.lost_reason or reason
        self._workers.kill(self._worker)
        return SessionLost(self.lost_reason)

    def release(self) -> None:
        self._workers.release(self._worker)

    async def close(self) -> None:
        """Close the environment's object and release the process."""
        with contextlib.suppress(SessionLost):
            await self.request({"do": "end"}, "close")
        if not self.lost_reason:
            self.release()


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

    async def call(self, name: str, arguments: Any) -> ToolResult:
        """Call a tool; failures inside it become the result's text. Raises SessionLost if the environment is lost."""
        if name not in self._schema_by_name:
            available = ", ".join(self._schema_by_name) or "none"
            return ToolResult(f"Error: unknown tool {name!r}; available: {available}", False)
        if argument_error := find_argument_error(self._schema_by_name[name], arguments):
            result = ToolResult(f"Error: {argument_error}", False)
            self._pool.add_call(name, ToolCallStats(num_malformed=1, first_mismatch=result.text[:500]))
            return result
        process = self._process
        if process is None or name in self._pool.catalog.tools:
            return await self._pool.call_tool(name, arguments)
        async with process.lock:  # calls run one at a time, in the policy's order
            order = {"do": "call", "spec": "", "name": name, "arguments": arguments}
            answer = await process.request(order, f"the tool {name}")
            if "lost" in answer:
                self._pool.error_log.write_answer(name, arguments, answer["lost"], answer)
                raise process.kill(f"{process.info.name}: {answer['lost']}")
            try:
                return self._pool.record_result(name, arguments, answer)
            except (LookupError, ValueError, TypeError) as error:
                raise process.kill(f"{process.info.name}: garbled answer: {error!r}") from None

    async def reward(self, answer: str, messages: Sequence[Message], turns: Sequence[str]) -> RewardResult | None:
        """Return the environment's reward, or None if it has no `reward`. Raises nothing."""
        process = self._process
        if process is None or not process.info.has_reward:
            return None
        order = {"do": "reward", "answer": answer, "messages": list(messages), "turns": list(turns)}
        try:
            async with process.lock:
                reply = await process.request(order, "reward", answer[:200])
            return parse_reward(reply.get("value"), len(turns))
        except SessionLost as error:
            return RewardFailure(str(error))
        except (RewardError, TypeError) as error:
            return RewardFailure(f"{process.info.name}: reward: {error}")

    def close(self) -> None:
        """Release the process after the environment's `close`, or kill it if it is still at work; safe to call
        twice."""
        process, self._process = self._process, None
        if process is not None and not process.lost_reason:
            if process.lock.locked():
                process.kill("the conversation has ended")
            else:
                self._pool.run_later(process.close())


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
