"""Processes of one kind, each lent to one at a time, and kept."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from typing import Any

from megarl.processes.process import Gone, Nursery, Process


class Leases:
    """For one event loop. order: of each process, see `serving.py`. size: processes at most; they are started `at_once`
    at a time for as long as somebody waits, so that quick calls make do with few."""

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
