"""Which steps' prompts are admitted, and what an algorithm may not ask of generation that goes on."""

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


class Talks:
    """Of an engine: what it was told."""

    def __init__(self) -> None:
        self.groups = 0
        self.admitted: list[tuple[str, int]] = []

    def start_stream(self, queue: Any, samples: int, max_groups: int, on_busy_interval: Any) -> None:
        self.groups = max_groups

    def admit(self, prompts: Sequence[Prompt], seed: int) -> None:
        self.admitted.append((prompts[0].id, seed))

    def resume(self) -> None:
        return None


def of(step: int) -> list[Prompt]:
    return [replace(Prompt("", ({"role": "user", "content": "?"},)), id=f"{step}/{i}") for i in range(4)]


def streaming(lag: int) -> tuple[RolloutStream, Talks, list[int]]:
    """now: the last step whose prompts were handed out."""
    talks, now = Talks(), [1]
    config = from_dict({"rollout": {"asynchronous": True, "max_staleness": lag}})

    def upcoming(steps: int) -> list[list[Prompt]]:
        return [of(step) for step in range(now[0] + 1, min(LAST, now[0] + steps) + 1)]

    created: Any = talks
    return RolloutStream(config, upcoming, LOCAL, created, 2, LocalKVStore(), lambda step: 10 * step, print), talks, now


@pytest.mark.parametrize("lag", [0, 1, 3])
def test_no_step_is_begun_by_weights_that_are_too_old_and_none_is_left_out(lag: int) -> None:
    stream, talks, now = streaming(lag)
    for step in range(1, LAST + 1):
        now[0] = step
        stream.request_groups(of(step), 8, step)
        assert len(talks.admitted) == min(LAST, step + lag)
        stream.resume(step)
        assert len(talks.admitted) == min(LAST, step + 1 + lag)
    assert talks.admitted == [(f"{step}/0", 10 * step) for step in range(1, LAST + 1)]
    assert talks.groups == 2 * (1 + lag)  # for two engines


def test_a_step_that_takes_nothing_or_wants_other_samples_is_an_error() -> None:
    stream, _, now = streaming(1)
    stream.request_groups(of(1), 8, 1)
    now[0] = 2
    with pytest.raises(ConfigError, match="wants 4 samples of each prompt, but 8 were already started"):
        stream.request_groups(of(2), 4, 2)
    now[0] = 3
    with pytest.raises(ConfigError, match="but step 2 took none"):
        stream.request_groups(of(3), 8, 3)
