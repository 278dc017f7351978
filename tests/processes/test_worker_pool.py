"""Lease worker processes from a pool, with fake processes."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest

from megarl.processes.worker_process import WorkerPool, WorkerUnavailable

pytestmark = pytest.mark.alone


class FakeProcess:
    is_alive = True

    def end(self) -> None:
        self.is_alive = False


class FakeForkServer:
    """Start fake processes after a number of failures."""

    def __init__(self, failures: int = 0) -> None:
        self.failures, self.started = failures, 0

    async def start_worker(self, order: Mapping[str, Any]) -> FakeProcess:
        await asyncio.sleep(0)
        if self.failures > 0:
            self.failures -= 1
            raise WorkerUnavailable("it cannot start")
        self.started += 1
        return FakeProcess()


def make_pool(server: FakeForkServer, **options: Any) -> Any:
    return WorkerPool(server, {}, **options)  # type: ignore[arg-type]


def test_reuses_idle_processes_and_starts_others() -> None:
    async def run() -> None:
        server = FakeForkServer()
        processes = make_pool(server)
        first = await processes.acquire()
        second = await processes.acquire()
        processes.release(first)
        assert await processes.acquire() is first and first is not second and server.started == 2

    asyncio.run(run())


def test_spreads_leases_up_to_the_pool_size() -> None:
    async def run() -> None:
        server = FakeForkServer()
        processes = make_pool(server, size=2, max_starting=2, max_leases=3)
        leases = [asyncio.create_task(processes.acquire()) for _ in range(7)]
        done, waiting = await asyncio.wait(leases, timeout=0.1)
        assert sorted(Counter(task.result() for task in done).values()) == [3, 3] and server.started == 2
        processes.release(done.pop().result())
        await asyncio.wait_for(waiting.pop(), 1)

    asyncio.run(run())


def test_reports_failed_starts_to_every_waiter() -> None:
    async def run() -> None:
        results = await asyncio.gather(*[processes.acquire() for _ in range(3)], return_exceptions=True)
        assert all(isinstance(result, WorkerUnavailable) for result in results)
        assert isinstance(await processes.acquire(), FakeProcess)

    processes = make_pool(FakeForkServer(failures=7))
    asyncio.run(asyncio.wait_for(run(), 10))


@pytest.mark.parametrize("is_killed", [True, False])
def test_replaces_ended_processes(is_killed: bool) -> None:
    async def run() -> None:
        processes = make_pool(FakeForkServer(), size=1)
        first = await processes.acquire()
        waiting = asyncio.create_task(processes.acquire())
        await asyncio.sleep(0)
        if is_killed:
            processes.kill(first)
        else:
            first.is_alive = False
            processes.release(first)
        assert await asyncio.wait_for(waiting, 1) is not first

    asyncio.run(run())


def test_cancelled_waiters_leave_the_process_free() -> None:
    async def run() -> None:
        processes = make_pool(FakeForkServer(), size=1)
        first = await processes.acquire()
        cancelled = [asyncio.create_task(processes.acquire()) for _ in range(2)]
        await asyncio.sleep(0)
        cancelled[0].cancel()
        processes.release(first)  # goes to the second waiter, which is cancelled before it runs
        await asyncio.sleep(0)
        cancelled[1].cancel()
        await asyncio.gather(*cancelled, return_exceptions=True)
        assert cancelled[0].cancelled()
        if not cancelled[1].cancelled():
            processes.release(cancelled[1].result())
        assert await asyncio.wait_for(processes.acquire(), 1) is first

    asyncio.run(run())
