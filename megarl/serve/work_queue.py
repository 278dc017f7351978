"""The queue of clients' requests between the HTTP server's thread and the thread that executes commands."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from megarl.serve.commands import Command, ForwardBackward, ForwardBackwardBatch, Idle, Stop
from megarl.serve.tinker_wire import RequestRefused, SampleRequest

IDLE_S = 5.0
"""Seconds between `Idle` commands."""


class Request:
    """A request in progress. answer: its result, or RequestRefused or another exception."""

    def __init__(self) -> None:
        self.answer: Future[Any] = Future()

    def finish(self, result: Any) -> None:
        if not self.answer.done():
            self.answer.set_result(result)

    def fail(self, text: str) -> None:
        if not self.answer.done():
            self.answer.set_exception(RequestRefused(text))


class Job(Request):
    """A command for all ranks. complete: called after it has succeeded, before its client learns of it."""

    def __init__(self, command: Command, complete: Callable[[], None] = lambda: None) -> None:
        super().__init__()
        self.command, self._complete = command, complete

    def finish(self, result: Any) -> None:
        try:
            self._complete()
        except OSError as error:
            self.fail(f"the server cannot write: {error}")
        super().finish(result)


class SampleJob(Request):
    """A request to the engines. folder: of the sampler's weights."""

    def __init__(self, folder: str, request: SampleRequest) -> None:
        super().__init__()
        self.folder, self.request = folder, request


class WorkQueue:
    """Jobs in the order of arrival.

    capacity: how many may wait. max_batched: of how many clients forward_backward requests may be executed together.
    """

    def __init__(self, capacity: int, max_batched: int = 1) -> None:
        self.capacity, self._max_batched = capacity, max_batched
        self._jobs: deque[Job | SampleJob] = deque()
        self._changed = threading.Condition()

    def put(self, job: Job | SampleJob, is_limited: bool = True) -> None:
        """Add a job. Raises RequestRefused with status 429 if too many wait, unless this one frees memory."""
        with self._changed:
            if is_limited and len(self._jobs) >= self.capacity:
                raise RequestRefused(f"{self.capacity} requests wait already; try again later", 429)
            self._jobs.append(job)
            self._changed.notify()

    def next_job(self, should_stop: Callable[[], bool]) -> tuple[Job, list[SampleJob] | list[Job]]:
        """Take the next job, or jobs that run together: all waiting samples of the next job's weights, or
        forward_backward requests of several clients, for which the first item is a job of all.

        Waits for at most `IDLE_S`; the job is then `Idle`.
        """
        with self._changed:
            if not self._jobs:
                self._changed.wait(IDLE_S)
            if should_stop():
                return Job(Stop()), []
            if not self._jobs:
                return Job(Idle()), []
            first = self._jobs.popleft()
            if isinstance(first, Job):
                batch = self._take_batch(first)
                if len(batch) == 1:
                    return first, []
                return Job(ForwardBackwardBatch(tuple(job.command for job in batch))), batch  # type: ignore[misc]
            samples = [job for job in self._jobs if isinstance(job, SampleJob) and job.folder == first.folder]
            chosen = set(map(id, samples))
            self._jobs = deque(job for job in self._jobs if id(job) not in chosen)
            return Job(Idle()), [first, *samples]

    def _take_batch(self, first: Job) -> list[Job]:
        """Take the requests that are executed with `first`: the next of other clients. Each client's stay in order."""
        batch = [first]
        if not _is_batchable(first):
            return batch
        passed = {first.command.model_id}  # type: ignore[union-attr]
        for job in list(self._jobs):
            if len(batch) == self._max_batched:
                break
            if not isinstance(job, Job) or (model_id := getattr(job.command, "model_id", "")) in passed:
                continue
            passed.add(model_id)
            if _is_batchable(job):
                batch.append(job)
                self._jobs.remove(job)
        return batch

    def __len__(self) -> int:
        return len(self._jobs)


def _is_batchable(job: Job) -> bool:
    return isinstance(job.command, ForwardBackward) and not job.command.forward_only
