"""Call reward functions in worker processes, each call with a timeout, concurrently with the rank's work.

A function may hang, crash, exit the interpreter, or exhaust memory: its process is then killed and replaced, and only
that call fails. The pools of the standard library break when a process dies, and leak what it has started.
"""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from megarl.config import ConfigError, plugins
from megarl.processes.children import NO_LIMITS, ProcessLimits
from megarl.processes.worker_process import ForkServer, WorkerPool, WorkerProcess, WorkerUnavailable
from megarl.rewards.functions import RewardFunction
from megarl.rewards.reward_process import GRACE_S, MAX_CONCURRENT, count_actions, decode_verdict, describe_timeout
from megarl.types import Rollout
from megarl.types.reward_values import RewardFailure, RewardResult

Verdicts = Mapping[str, RewardResult]
"""Verdicts by function name."""


class PendingVerdicts(NamedTuple):
    """Verdicts on one rollout that are still being computed. completed: those available so far, by function name."""

    future: Future[Verdicts]
    completed: dict[str, RewardResult]

    def done(self) -> bool:
        return self.future.done()

    def result(self, seconds: float | None = None) -> Verdicts:
        return self.future.result(seconds)

    def cancel(self) -> Verdicts:
        """Stop waiting and return the verdicts so far. Functions that have not been called yet are not called."""
        self.future.cancel()
        return dict(self.completed)


class RewardPool:
    """Pool of worker processes for reward functions. Runs in its own thread until `close`.

    functions: by name, loaded from `specs`, in the same order. limit: seconds per call. size: number of processes, each
    started when first needed. Functions and coroutine functions use separate processes, at least one of each kind; one
    extra process isolates a call after a process of concurrent calls has died. log: file for what functions print.
    limits: limits of the processes. max_concurrent: concurrent calls of coroutine functions per process.
    """

    def __init__(
        self,
        functions: Mapping[str, RewardFunction],
        specs: Sequence[str],
        limit: float,
        size: int,
        log: Path,
        limits: ProcessLimits = NO_LIMITS,
        max_concurrent: int = MAX_CONCURRENT,
    ) -> None:
        self._names, self._limit, self._log = list(functions), limit, log
        self._kinds = ["async" if plugins.is_async(function) else "sync" for function in functions.values()]
        self._fork_server = ForkServer(
            "megarl.rewards.reward_process:serve", {"specs": list(specs), "limit": limit}, log, limits
        )
        self._pools = {"alone": WorkerPool(self._fork_server, {"kind": "async"}, size=1)}
        present = sorted(set(self._kinds))
        for index, kind in enumerate(present):
            size_of_kind = max(1, (size + index) // len(present))
            leases = 1 if kind == "sync" else max_concurrent
            self._pools[kind] = WorkerPool(self._fork_server, {"kind": kind}, size_of_kind, size_of_kind, leases)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rewards", daemon=True)
        self._starting, self._closed = threading.Lock(), False
        self._first_starts: list[Future[None]] = []

    def start(self) -> None:
        """Start a process of each kind in the background."""
        with self._starting:
            if not self._thread.is_alive():
                self._thread.start()
                for kind in sorted(set(self._kinds)):
                    first_start = _start_first(self._pools[kind])
                    self._first_starts.append(asyncio.run_coroutine_threadsafe(first_start, self._loop))

    def wait_ready(self) -> None:
        """Wait for the started processes. Raises ConfigError if worker processes cannot load the functions."""
        for first_start in self._first_starts:
            try:
                first_start.result()
            except WorkerUnavailable as error:
                raise ConfigError(f"reward.functions={list(self._names)}: {error}; see {self._log}") from None

    def submit(self, rollout: Rollout) -> PendingVerdicts:
        """Score a rollout, without the engine's records, group, episode and reward, by all functions. Thread-safe."""
        copied_rollout = replace(
            rollout,
            routing=None,
            sparse_indices=None,
            sampling_mask=None,
            reward=0.0,
            reward_parts={},
            unscored={},
            group=0,
            episode=-1,
        )
        completed: dict[str, RewardResult] = {}
        if self._closed:
            (never := Future[Verdicts]()).cancel()
            return PendingVerdicts(never, completed)
        self.start()
        verdicts = self._collect_verdicts(copied_rollout, completed)
        return PendingVerdicts(asyncio.run_coroutine_threadsafe(verdicts, self._loop), completed)

    def close(self) -> None:
        """End all processes; calls that are under way are cancelled. Safe to call twice."""
        self._closed = True
        with self._starting:
            if self._thread.is_alive():
                asyncio.run_coroutine_threadsafe(self._shut_down(), self._loop).result()
                self._loop.call_soon_threadsafe(self._loop.stop)
                self._thread.join()
            self._loop.close()

    # --- in the pool's thread

    async def _collect_verdicts(self, rollout: Rollout, completed: dict[str, RewardResult]) -> Verdicts:
        async def call_function(index: int, name: str) -> None:
            verdict = await self._call_function(self._kinds[index], index, rollout)
            if verdict is None:
                verdict = await self._call_function("alone", index, rollout)
            assert verdict is not None
            completed[name] = verdict
            if isinstance(verdict, RewardFailure):
                when, line = time.strftime("%Y-%m-%d %H:%M:%S"), " ".join(verdict.reason.split())
                with contextlib.suppress(OSError):  # the rollout records it, too
                    with self._log.open("a", encoding="utf-8", errors="backslashreplace") as log:
                        log.write(f"{when}  {name} of prompt {rollout.prompt.id!r}: {line}\n")

        await asyncio.gather(*(call_function(index, name) for index, name in enumerate(self._names)))
        return {name: completed[name] for name in self._names}

    async def _call_function(self, pool_name: str, function: int, rollout: Rollout) -> RewardResult | None:
        """Run one call. Returns None if the process died with other calls in flight, any of which may be the cause."""
        pool = self._pools[pool_name]
        try:
            process = await pool.acquire()
        except WorkerUnavailable as error:
            return RewardFailure(str(error))
        # Once it has begun, a call goes on when nobody waits for it any more: its process is busy until it ends.
        return await asyncio.shield(self._request(pool, process, function, rollout, pool_name == "async"))

    async def _request(
        self, pool: WorkerPool, process: WorkerProcess, function: int, rollout: Rollout, is_concurrent: bool
    ) -> RewardResult | None:
        limit = self._limit if self._kinds[function] == "sync" else self._limit + GRACE_S
        try:
            order = pickle.dumps((function, rollout), 5)
        except Exception as error:  # objects from a data set or a tool
            pool.release(process)
            return RewardFailure(f"the conversation cannot be sent to its process: {plugins.format_error(error)}")
        try:
            verdict = decode_verdict(await process.request(order, limit), count_actions(rollout))
            pool.release(process)
            return verdict
        except BaseException as error:
            pool.kill(process)
            if isinstance(error, TimeoutError | WorkerUnavailable):
                reason = describe_timeout(self._limit) if isinstance(error, TimeoutError) else str(error)
                return None if is_concurrent else RewardFailure(reason)
            if isinstance(error, ConfigError | LookupError | TypeError):
                return RewardFailure(f"its process sent a garbled answer: {error!r}")
            raise  # a bug of ours, or the end of the pool

    async def _shut_down(self) -> None:
        for task in (tasks := asyncio.all_tasks() - {asyncio.current_task()}):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._fork_server.close()


async def _start_first(pool: WorkerPool) -> None:
    pool.release(await pool.acquire())
