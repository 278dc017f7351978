"""The rollout stream: which steps' prompts it admits, and invalid requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from megarl.config import ConfigError, from_dict
from megarl.rollout.group_queue import LocalKVStore
from megarl.types import LOCAL, Prompt
from megarl.workers.async_rollout import RolloutStream

LAST = 6


class FakeStreamRunner:
    """A fake engine runner that records admitted prompts."""

    def __init__(self) -> None:
        self.groups = 0
        self.admitted: list[tuple[str, int]] = []

    def start_stream(self, queue: Any, samples: int, max_groups: int, on_busy_interval: Any) -> None:
        self.groups = max_groups

    def admit(self, prompts: Sequence[Prompt], seed: int) -> None:
        self.admitted.append((prompts[0].id, seed))

    def resume(self) -> None:
        return None


def prompts_of(step: int) -> list[Prompt]:
    return [replace(Prompt("", ({"role": "user", "content": "?"},)), id=f"{step}/{i}") for i in range(4)]


def make_stream(max_staleness: int) -> tuple[RolloutStream, FakeStreamRunner, list[int]]:
    """Return a stream, its runner, and the [step] whose prompts were drawn last."""
    runner, current_step = FakeStreamRunner(), [1]
    config = from_dict({"rollout": {"asynchronous": True, "max_staleness": max_staleness}})

    def upcoming(steps: int) -> list[list[Prompt]]:
        return [prompts_of(step) for step in range(current_step[0] + 1, min(LAST, current_step[0] + steps) + 1)]

    untyped_runner: Any = runner
    return (
        RolloutStream(config, upcoming, LOCAL, untyped_runner, 2, LocalKVStore(), lambda step: 10 * step, print),
        runner,
        current_step,
    )


@pytest.mark.parametrize("max_staleness", [0, 1, 3])
def test_admits_each_step_within_max_staleness(max_staleness: int) -> None:
    stream, runner, current_step = make_stream(max_staleness)
    for step in range(1, LAST + 1):
        current_step[0] = step
        stream.request_groups(prompts_of(step), 8, step)
        assert len(runner.admitted) == min(LAST, step + max_staleness)
        stream.resume(step)
        assert len(runner.admitted) == min(LAST, step + 1 + max_staleness)
    assert runner.admitted == [(f"{step}/0", 10 * step) for step in range(1, LAST + 1)]
    assert runner.groups == 2 * (1 + max_staleness)  # for two engines


def test_skipped_step_or_changed_samples_raise() -> None:
    stream, _, current_step = make_stream(1)
    stream.request_groups(prompts_of(1), 8, 1)
    current_step[0] = 2
    with pytest.raises(ConfigError, match="wants 4 samples of each prompt, but 8 were already started"):
        stream.request_groups(prompts_of(2), 4, 2)
    current_step[0] = 3
    with pytest.raises(ConfigError, match="but step 2 took none"):
        stream.request_groups(prompts_of(3), 8, 3)
