"""Generation beside training: which steps' prompts are admitted, and its metrics.

All ranks keep the same counts. The lead rank of each engine runs a stream of conversations (`rollout/background.py`).
`Generation` is one generation that no step waits for, such as an evaluation: it continues through training and weight
syncs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager

import torch

from megarl.config import Config, ConfigError
from megarl.rollout.background import OnBusyInterval
from megarl.rollout.group_queue import UNLIMITED, GroupQueue, SharedStore
from megarl.rollout.rollout_context import RolloutRunner
from megarl.rollout.scheduler import GenerationResult
from megarl.types import Comm, Prompt, Rollout, Rollouts
from megarl.workers.staleness import staleness_metrics


class PendingGeneration:
    """Of all ranks together; those that lead no engine have no `mine`. begun: by which version of the weights.
    now: the version that the engines have. waiting: what is on while some ranks wait for theirs."""

    def __init__(
        self,
        mine: Future[GenerationResult] | None,
        tickets: GroupQueue,
        everyone: Comm,
        *,
        begun: int,
        now: Callable[[], int],
        waiting: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._future, self._queue, self._comm, self._current_version, self._wait_phase = (
            mine,
            tickets,
            everyone,
            now,
            waiting,
        )
        self.start_version = begun

    def is_done(self) -> bool:
        """Whether nobody has anything under way. Collective."""
        return all(self._comm.all_gather_objects(self._future is None or self._future.done()))

    def result(self) -> Rollouts:
        """What has come of it, when all of it is over; call it once. Raises ConfigError on all ranks where it failed,
        or an engine was lost with answers that no other has generated. Collective."""
        mine: list[Rollout] = []
        error = ""
        with self._wait_phase():
            try:
                mine = [] if self._future is None else self._future.result().rollouts
            except RuntimeError as failure:
                error = str(failure)
            errors = [text for text in self._comm.all_gather_objects(error) if text]
        if errors:
            raise ConfigError(errors[0])
        if left := max(self._comm.all_gather_objects(0 if self._future is None else self._queue.count_unclaimed())):
            raise ConfigError(f"an engine was lost, and with it the answers to {left} prompts")
        return Rollouts.gather(mine, [one.group for one in mine], self._comm, self._current_version())


def newest_version(rollouts: Rollouts) -> int:
    """Of the weights that chose any of their tokens; -1 where none did. Collective."""
    mine = max((version for one in rollouts.local for version, _ in one.version_spans), default=-1)
    return max(rollouts.comm.all_gather_objects(mine))


STREAM_NAME = "megarl/generation/stream"

NextPrompts = Callable[[int], Sequence[Sequence[Prompt]]]
"""The prompts of so many further steps, as far as there are any."""


class RolloutStream:
    """talks: of this rank's engine, where it leads one. board: that all leads see. seed_of: a step's."""

    def __init__(
        self,
        config: Config,
        upcoming: NextPrompts,
        everyone: Comm,
        talks: RolloutRunner | None,
        engines: int,
        board: SharedStore,
        seed_of: Callable[[int], int],
        at_work: OnBusyInterval,
    ) -> None:
        self._config, self._next_prompts, self._comm, self._runner = config, upcoming, everyone, talks
        self._num_engines, self._kv_store, self._step_seed, self._on_generated = engines, board, seed_of, at_work
        self._samples = 0
        self._last_admitted_step = 0
        """The last step whose prompts may be begun; 0 before it all begins."""
        self._last_step = 0
        """The last step that took its groups."""
        self.metrics: dict[str, float] = {}
        self.lost_counts = 0, 0
        """Conversations that were lost with their engines, and those begun anew, of the last step."""

    def request_groups(self, prompts: Sequence[Prompt], samples: int, step: int) -> None:
        """A step asks for its groups: the first one begins the stream."""
        lag = self._config.rollout.max_lag
        if self._samples not in (0, samples):
            raise ConfigError(
                f"step {step} wants {samples} samples of each prompt, of which {self._samples} were begun before it; "
                "with rollout.asynchronous an algorithm has to ask for as many in each step"
            )
        if self._samples and step != self._last_step + 1:
            raise ConfigError(
                f"step {step} takes the answers that were begun for it, but step {self._last_step + 1} took none: with "
                "rollout.asynchronous an algorithm has to begin each step by generating for the prompts it is given"
            )
        self._last_step = step
        if not self._samples:
            self._samples, self._last_admitted_step = samples, step - 1
            if self._runner is not None:
                groups = -(-(1 + lag) * len(prompts) // self._num_engines)
                tickets = GroupQueue(UNLIMITED, self._num_engines, self._kv_store, STREAM_NAME)
                self._runner.start_stream(tickets, samples=samples, groups=groups, at_work=self._on_generated)
            self._admit(step, prompts)
        self._admit_until(step, step + lag)

    def resume(self, step: int) -> None:
        """The engines have the weights that the step has made."""
        if self._runner is not None:
            self._runner.resume()
        if self._samples:
            self._admit_until(step, step + 1 + self._config.rollout.max_lag)

    def _admit_until(self, now: int, last: int) -> None:
        """now: the last step whose prompts were handed out."""
        for step, prompts in enumerate(self._next_prompts(last - now), now + 1):
            if step > self._last_admitted_step:
                self._admit(step, prompts)

    def _admit(self, step: int, prompts: Sequence[Prompt]) -> None:
        self._last_admitted_step = step
        if self._runner is not None:
            self._runner.admit(prompts, self._step_seed(step))

    def update_metrics(self, mine: GenerationResult | None, rollouts: Rollouts) -> None:
        """What is said of a step's generation. mine: of this engine, None without one. Collective."""
        numbers: list[list[float]] = []
        if mine is not None:
            ages = mine.group_ages
            of_ages = [sum(ages), max(ages, default=0.0), len(ages)]
            numbers.append(
                [mine.num_slots * mine.seconds, mine.busy_seconds, *of_ages, mine.num_interrupted, mine.num_restarted]
            )
        table = self._comm.all_gather_rows(torch.tensor(numbers, dtype=torch.float64).reshape(-1, 7))
        offered, busy, summed, oldest, groups, gone, again = table.T
        self.lost_counts = int(gone.sum()), int(again.sum())
        self.metrics = staleness_metrics(rollouts) | {
            "rollout/age_mean": float(summed.sum()) / max(1.0, float(groups.sum())),
            "rollout/age_max": max(oldest.tolist(), default=0.0),
        }
        if total := float(offered.sum()):
            self.metrics["rollout/idle_frac"] = 1 - float(busy.sum()) / total
