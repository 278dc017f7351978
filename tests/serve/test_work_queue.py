"""Which waiting requests run together, and in which order."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from megarl.serve import work_queue
from megarl.serve.commands import ForwardBackward, ForwardBackwardBatch, Idle, OptimStep
from megarl.serve.tinker_wire import Example, SampleRequest
from megarl.serve.work_queue import Job, SampleJob, WorkQueue
from megarl.types.adam_settings import AdamSettings

EXAMPLE = Example(np.array([1]), np.array([2]), {"weights": np.ones(1, np.float32)})


def passing(model: str, forward_only: bool = False) -> Job:
    return Job(ForwardBackward(model, (EXAMPLE,), "cross_entropy", {}, forward_only))


def updating(model: str) -> Job:
    return Job(OptimStep(model, AdamSettings(1e-3, 0.9, 0.9, 1e-8, 0.0, 0.0)))


def sampling(folder: str) -> SampleJob:
    return SampleJob(folder, SampleRequest([1], 1, 1, None, None, 1.0, 1, 1.0))


def runs(max_batched: int, jobs: list[Any], monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Return the numbers of the jobs that run together, in the order in which they run."""
    monkeypatch.setattr(work_queue, "IDLE_S", 0.0)
    queue, numbers = WorkQueue(100, max_batched), {id(job): number for number, job in enumerate(jobs)}
    for job in jobs:
        queue.put(job)
    result = []
    while True:
        job, together = queue.next_job(lambda: False)
        if isinstance(job.command, Idle) and not together:
            return result
        if isinstance(job.command, ForwardBackwardBatch):
            assert list(job.command.requests) == [item.command for item in together if isinstance(item, Job)]
        result.append([numbers[id(item)] for item in together or [job]])


@pytest.mark.parametrize(
    ("max_batched", "jobs", "expected"),
    [
        (1, "pa pb pc", [[0], [1], [2]]),
        (4, "pa pb pc", [[0, 1, 2]]),
        (2, "pa pb pc", [[0, 1], [2]]),
        (4, "pa pa pb", [[0, 2], [1]]),  # one request of each client
        (4, "pa ub pb pc", [[0, 3], [1], [2]]),  # b's update comes before its next pass
        (4, "pa fb pb", [[0], [1], [2]]),
        (4, "pa sx pb sx", [[0, 2], [1, 3]]),
        (4, "ua pb pc", [[0], [1, 2]]),
        (4, "pa ua pa pb ub pb", [[0, 3], [1], [2], [4], [5]]),
    ],
)
def test_requests_of_several_clients_run_together_in_each_ones_order(
    max_batched: int, jobs: str, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    make: dict[str, Any] = {
        "p": passing,
        "f": lambda model: passing(model, forward_only=True),
        "u": updating,
        "s": sampling,
    }
    assert runs(max_batched, [make[name[0]](name[1]) for name in jobs.split()], monkeypatch) == expected
