"""The rollouts of a step in the order in which they are recorded: call by call, with their final rewards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megarl.observe.rollout_table import StepGeneration
from megarl.types import Rollout, Rollouts


class GenerateCall(NamedTuple):
    """The result of a step's call of `RolloutWorker.generate`."""

    rollouts: Rollouts
    is_greedy: bool


@dataclass(frozen=True)
class StepRecord:
    """A step's rollouts on this rank, in the order in which they are recorded."""

    total: int
    """Rollouts of the step on all ranks."""
    numbers: list[int]
    """Index of each local rollout in the step."""
    rollouts: list[Rollout]
    calls: list[int | None]
    """Index of the call that generated each; None if the algorithm made the rollout itself."""
    generation: StepGeneration


def make_step_record(
    calls: Sequence[GenerateCall], result: Rollouts | None = None, metrics: Mapping[str, float] | None = None
) -> StepRecord:
    """Return the record of a step: all generated rollouts, call by call, then those that the algorithm made itself.

    A replay of the step gets every call's rollouts in the order in which the call returned them. Collective with
    `result`.

    Args:
        result: rollouts that the algorithm returned. Those that were generated in this step are recorded as they are
            here, with their final rewards; they still have the `Turn` object of their prompt.
        metrics: of the rollout worker.
    """
    final = {id(rollout.turns[0]): rollout for rollout in (() if result is None else result.local)}
    numbers: list[int] = []
    rollouts: list[Rollout] = []
    indices: list[int | None] = []
    total = 0
    for index, (part, _) in enumerate(calls):
        numbers += [total + number for number in part.local_indices.tolist()]
        rollouts += [final.get(id(rollout.turns[0]), rollout) for rollout in part.local]
        indices += [index] * len(part.local)
        total += len(part)
    if result is not None:
        generated = {id(rollout.turns[0]) for part, _ in calls for rollout in part.local}
        pairs = zip(result.local_indices.tolist(), result.local, strict=True)
        extra = {number: rollout for number, rollout in pairs if id(rollout.turns[0]) not in generated}
        extra_numbers = sorted(number for group in result.comm.all_gather_objects(list(extra)) for number in group)
        numbers += [total + extra_numbers.index(number) for number in extra]
        rollouts += extra.values()
        indices += [None] * len(extra)
        total += len(extra_numbers)
    is_greedy = tuple(call.is_greedy for call in calls)
    version = calls[0].rollouts.version if calls else -1
    return StepRecord(total, numbers, rollouts, indices, StepGeneration(is_greedy, version, dict(metrics or {})))
