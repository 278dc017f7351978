"""Reward functions in processes of their own, each call with a deadline, beside whatever the rank does meanwhile.

A function may hang, crash, leave the interpreter, or eat all memory: then its process is killed and replaced, and only
the call that did it fails. Own code, as the pools of `concurrent.futures` and `multiprocessing` run the user's script
again in each process, are lost when one of these dies, and leave what it has started.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path

from megarl.config import ConfigError, plugins
from megarl.processes.process_limits import NO_LIMITS, ProcessLimits
from megarl.processes.worker_process import ForkServer, WorkerProcess, WorkerUnavailable
from megarl.rewards.functions import RewardFunction
from megarl.rewards.reward_process import Kind, count_actions, decode_verdict, describe_timeout, encode_call
from megarl.types import Rollout
from megarl.types.reward_values import RewardFailure, RewardResult

MAX_CONCURRENT = 64
"""Calls of coroutine functions that a process has at the same time."""
GRACE_S = 10.0
"""How long a process of coroutines may take beyond the deadline, which it keeps itself, to say so."""

Verdicts = Mapping[str, RewardResult]
"""By the function's name."""


@dataclass(frozen=True)
class PendingVerdicts:
    """What the functions say of one rollout. known: what they have said so far, by name."""

    future: Future[Verdicts]
    completed: dict[str, RewardResult]

    def done(self) -> bool:
        return self.future.done()

    def result(self, seconds: float | None = None) -> Verdicts:
        return self.future.result(seconds)

    def cancel(self) -> Verdicts:
        """What there is of it, where nobody waits for more; functions that have not been called for it are not."""
        self.future.cancel()
        return dict(self.completed)


@dataclass(frozen=True)
class _Call:
    function: int
    rollout: Rollout
    future: asyncio.Future[RewardResult]


class _ProcessSlot:
    """For a process of a kind, which is made when there is something to do, and again when it is gone."""

    def __init__(self, nursery: ForkServer, kind: Kind) -> None:
        self._fork_server, self._kind = nursery, kind
        self._process: WorkerProcess | None = None
        self._making = asyncio.Lock()

    async def get_process(self) -> WorkerProcess:
        """Raises Gone."""
        async with self._making:
            if self._process is None or not self._process.is_alive:
                try:
                    self._process = await self._fork_server.start_worker({"kind": self._kind})
                except WorkerUnavailable:  # once more, for the nursery itself may have been lost
                    self._process = await self._fork_server.start_worker({"kind": self._kind})
            return self._process


class RewardPool:
    """In a thread of its own, until `close`.

    functions: by name, of the modules `specs`, in the same order. limit: seconds of a call. size: processes, each made
    when it is first needed; functions and coroutine functions are called in different ones, of which there is one of
    each at least, and one more for what a process of many calls has died of. log: a file for what functions print.
    limits: of the processes, which have nothing else of this one's environment. at_once: calls of coroutine functions
    that a process has at the same time; the time of one that waits for its turn does not count.
    """

    def __init__(
        self,
        functions: Mapping[str, RewardFunction],
        specs: Sequence[str],
        limit: float,
        size: int,
        log: Path,
        limits: ProcessLimits = NO_LIMITS,
        at_once: int = MAX_CONCURRENT,
    ) -> None:
        self._max_concurrent = at_once
        self._names, self._limit = list(functions), limit
        self._kinds: list[Kind] = ["async" if plugins.is_async(function) else "sync" for function in functions.values()]
        present = sorted(set(self._kinds))
        self._sizes = {kind: max(1, (size + place) // len(present)) for place, kind in enumerate(present)}
        self._log = log
        self._fork_server = ForkServer(
            "megarl.rewards.reward_process:serve", {"specs": list(specs), "limit": limit}, log, limits
        )
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rewards", daemon=True)
        self._starting, self._closed = threading.Lock(), False
        self._first_starts: list[asyncio.Task[WorkerProcess]] = []

    def start(self) -> None:
        """Have a process of each kind come up, in the background."""
        with self._starting:
            if not self._thread.is_alive():
                self._thread.start()
                asyncio.run_coroutine_threadsafe(self._set_up(), self._loop).result()

    def wait_ready(self) -> None:
        """Wait for these, if it was started. Raises ConfigError where other processes cannot have the functions."""
        for first in self._first_starts:
            try:
                asyncio.run_coroutine_threadsafe(_result(first), self._loop).result()
            except WorkerUnavailable as error:
                raise ConfigError(f"reward.functions={list(self._names)}: {error}; see {self._log}") from None

    def submit(self, rollout: Rollout) -> PendingVerdicts:
        """What each function says of a rollout; from any thread. The functions are shown a copy, without the engine's
        records, group, episode and reward."""
        shown = replace(
            rollout, routing=None, sampling_mask=None, reward=0.0, reward_parts={}, unscored={}, group=0, episode=-1
        )
        if self._closed:
            (never := Future[Verdicts]()).cancel()
            return PendingVerdicts(never, {})
        self.start()
        known: dict[str, RewardResult] = {}
        return PendingVerdicts(
            asyncio.run_coroutine_threadsafe(self._collect_verdicts(shown, known), self._loop), known
        )

    def close(self) -> None:
        """End all processes; calls that are under way are cancelled. Safe to call twice."""
        self._closed = True
        with self._starting:
            if self._thread.is_alive():
                asyncio.run_coroutine_threadsafe(self._shut_down(), self._loop).result()
                self._loop.call_soon_threadsafe(self._loop.stop)
                self._thread.join()
            if not self._loop.is_closed():
                self._loop.close()

    # --- in the thread

    async def _set_up(self) -> None:
        self._queues: dict[str, asyncio.Queue[_Call]] = {name: asyncio.Queue() for name in (*self._sizes, "alone")}
        places = {
            kind: [_ProcessSlot(self._fork_server, kind) for _ in range(size)] for kind, size in self._sizes.items()
        }
        self._first_starts = [asyncio.create_task(of_kind[0].get_process()) for of_kind in places.values()]
        work = [(place, "sync") for place in places.get("sync", ())]
        for _ in range(self._max_concurrent):  # the first call goes to each process in turn, then the second ...
            work += [(place, "async") for place in places.get("async", ())]
        if "async" in places:
            work.append((_ProcessSlot(self._fork_server, "async"), "alone"))
        self._tasks = [asyncio.create_task(self._run_queue(place, queue)) for place, queue in work]

    async def _collect_verdicts(self, rollout: Rollout, known: dict[str, RewardResult]) -> Verdicts:
        loop = asyncio.get_running_loop()

        async def answer(number: int, name: str) -> RewardResult:
            call = _Call(number, rollout, loop.create_future())
            self._queues[self._kinds[number]].put_nowait(call)
            known[name] = await call.future
            return known[name]

        said = await asyncio.gather(*(answer(number, name) for number, name in enumerate(self._names)))
        return dict(zip(self._names, said, strict=True))

    async def _run_queue(self, place: _ProcessSlot, queue: str) -> None:
        """Make the calls of a queue, one after the other."""
        while True:
            call = await self._queues[queue].get()
            if call.future.done():
                continue
            try:
                verdict = await self._call_function(place, call, among_others=queue == "async")
            except Exception as error:  # noqa: BLE001  ours, which is for who waits for it
                call.future.set_exception(error)
                continue
            if isinstance(verdict, RewardFailure):
                self._log_failure(call, verdict.reason)
            if verdict is None:
                self._queues["alone"].put_nowait(call)
            elif not call.future.done():
                call.future.set_result(verdict)

    def _log_failure(self, call: _Call, why: str) -> None:
        """Into the log, where it stands beside what the function has printed."""
        when, line = time.strftime("%Y-%m-%d %H:%M:%S"), " ".join(why.split())
        try:
            with self._log.open("a", encoding="utf-8", errors="backslashreplace") as log:
                log.write(f"{when}  {self._names[call.function]} of prompt {call.rollout.prompt.id!r}: {line}\n")
        except OSError:
            pass  # it is in the rollout, too

    async def _call_function(self, place: _ProcessSlot, call: _Call, among_others: bool) -> RewardResult | None:
        """None where a process has ended that had other calls, too, any of which may have done it."""
        limit = self._limit if self._kinds[call.function] == "sync" else self._limit + GRACE_S
        try:
            order = encode_call(call.function, call.rollout)
        except Exception as error:  # of pickling what a data set or a tool has put into it
            return RewardFailure(f"the conversation cannot be sent to its process: {plugins.format_error(error)}")
        try:
            process = await place.get_process()
        except WorkerUnavailable as error:
            return RewardFailure(str(error))
        try:
            said = await process.request(order, limit)
            return decode_verdict(said, count_actions(call.rollout))
        except TimeoutError:
            process.end()
            return None if among_others else RewardFailure(describe_timeout(self._limit))
        except WorkerUnavailable as error:
            return None if among_others else RewardFailure(str(error))
        except (ConfigError, LookupError, TypeError) as error:
            process.end()
            return RewardFailure(f"its process gave a garbled answer: {error!r}")

    async def _shut_down(self) -> None:
        for task in (others := asyncio.all_tasks() - {asyncio.current_task()}):
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        self._fork_server.close()


async def _result(task: asyncio.Task[WorkerProcess]) -> None:
    await task
