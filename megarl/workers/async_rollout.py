"""Asynchronous generation during training: admission of steps' prompts, and metrics.

All ranks keep the same counts. The lead rank of each engine runs a stream of conversations (`rollout/background.py`).
A `PendingGeneration` is one that no step waits for, such as an evaluation: it continues through training and weight
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
    """A running generation, shared by all ranks.

    future: this rank's; None on ranks that lead no engine. start_version: version of the weights at the start.
    current_version: returns that of the engines. wait_phase: context that is active while ranks wait for the
    result.
    """

    def __init__(
        self,
        future: Future[GenerationResult] | None,
        queue: GroupQueue,
        comm: Comm,
        *,
        start_version: int,
        current_version: Callable[[], int],
        wait_phase: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._future, self._queue, self._comm, self._current_version, self._wait_phase = (
            future,
            queue,
            comm,
            current_version,
            wait_phase,
        )
        self.start_version = start_version

    def is_done(self) -> bool:
        """True if all ranks are done. Collective."""
        return all(self._comm.all_gather_objects(self._future is None or self._future.done()))

    def result(self) -> Rollouts:
        """Wait for the rollouts and return them; call it once. Collective.

        Raises ConfigError on all ranks if the generation failed, or an engine was lost with responses that no other
        engine has generated.
        """
        local_rollouts: list[Rollout] = []
        error = ""
        with self._wait_phase():
            try:
                local_rollouts = [] if self._future is None else self._future.result().rollouts
            except RuntimeError as failure:
                error = str(failure)
            errors = [text for text in self._comm.all_gather_objects(error) if text]
        if errors:
            raise ConfigError(errors[0])
        if num_missing := max(
            self._comm.all_gather_objects(0 if self._future is None else self._queue.count_unclaimed())
        ):
            raise ConfigError(f"an engine was lost, and with it the answers to {num_missing} prompts")
        return Rollouts.gather(
            local_rollouts, [rollout.group for rollout in local_rollouts], self._comm, self._current_version()
        )


def newest_version(rollouts: Rollouts) -> int:
    """Return the newest version of the weights that sampled any token; -1 without sampled tokens. Collective."""
    local_newest = max((version for rollout in rollouts.local for version, _ in rollout.version_spans), default=-1)
    return max(rollouts.comm.all_gather_objects(local_newest))


STREAM_NAME = "megarl/generation/stream"

NextPrompts = Callable[[int], Sequence[Sequence[Prompt]]]
"""Returns the prompts of this many further steps, or fewer at the end of the data."""


class RolloutStream:
    """The continuous generation of `rollout.asynchronous`: admits prompts up to `rollout.max_staleness` steps early.

    runner: that of this rank's engine, if it leads one. kv_store: shared by all lead ranks. step_seed: returns the seed
    of a step.
    """

    def __init__(
        self,
        config: Config,
        next_prompts: NextPrompts,
        comm: Comm,
        runner: RolloutRunner | None,
        num_engines: int,
        kv_store: SharedStore,
        step_seed: Callable[[int], int],
        on_busy_interval: OnBusyInterval,
    ) -> None:
        self._config, self._next_prompts, self._comm, self._runner = config, next_prompts, comm, runner
        self._num_engines, self._kv_store, self._step_seed, self._on_generated = (
            num_engines,
            kv_store,
            step_seed,
            on_busy_interval,
        )
        self._samples = 0
        self._last_admitted_step = 0
        """The last step whose prompts were admitted; 0 before the stream starts."""
        self._last_step = 0
        """The last step that requested its groups."""
        self.metrics: dict[str, float] = {}
        self.lost_counts = 0, 0
        """Conversations of the last step that were lost with their engines, and those that started over."""

    def request_groups(self, prompts: Sequence[Prompt], samples: int, step: int) -> None:
        """Request the groups of a step. The first request starts the stream."""
        max_staleness = self._config.rollout.max_staleness
        if self._samples not in (0, samples):
            raise ConfigError(
                f"step {step} wants {samples} samples of each prompt, but {self._samples} were already started; with "
                f"rollout.asynchronous an algorithm must ask for the same number in each step"
            )
        if self._samples and step != self._last_step + 1:
            raise ConfigError(
                f"step {step} takes answers that were started for it, but step {self._last_step + 1} took none: with "
                f"rollout.asynchronous an algorithm must begin each step by generating for its prompts"
            )
        self._last_step = step
        if not self._samples:
            self._samples, self._last_admitted_step = samples, step - 1
            if self._runner is not None:
                groups = -(-(1 + max_staleness) * len(prompts) // self._num_engines)
                group_queue = GroupQueue(UNLIMITED, self._num_engines, self._kv_store, STREAM_NAME)
                self._runner.start_stream(
                    group_queue, samples=samples, max_groups=groups, on_busy_interval=self._on_generated
                )
            self._admit(step, prompts)
        self._admit_until(step, step + max_staleness)

    def resume(self, step: int) -> None:
        """Continue after a weight sync: the engines have the weights of this step."""
        if self._runner is not None:
            self._runner.resume()
        if self._samples:
            self._admit_until(step, step + 1 + self._config.rollout.max_staleness)

    def _admit_until(self, current_step: int, last_step: int) -> None:
        """Admit prompts up to step `last_step`. current_step: the last step whose prompts the loader has returned."""
        for step, prompts in enumerate(self._next_prompts(last_step - current_step), current_step + 1):
            if step > self._last_admitted_step:
                self._admit(step, prompts)

    def _admit(self, step: int, prompts: Sequence[Prompt]) -> None:
        self._last_admitted_step = step
        if self._runner is not None:
            self._runner.admit(prompts, self._step_seed(step))

    def update_metrics(self, result: GenerationResult | None, rollouts: Rollouts) -> None:
        """Compute the metrics of a step's generation. mine: this engine's result, None without an engine.
        Collective."""
        rows: list[list[float]] = []
        if result is not None:
            ages = result.group_ages
            age_stats = [sum(ages), max(ages, default=0.0), len(ages)]
            rows.append(
                [
                    result.num_slots * result.seconds,
                    result.busy_seconds,
                    *age_stats,
                    result.num_interrupted,
                    result.num_restarted,
                ]
            )
        table = self._comm.all_gather_rows(torch.tensor(rows, dtype=torch.float64).reshape(-1, 7))
        offered, busy, age_sum, oldest, groups, interrupted, restarted = table.T
        self.lost_counts = int(interrupted.sum()), int(restarted.sum())
        self.metrics = staleness_metrics(rollouts) | {
            "rollout/group_age_s_mean": float(age_sum.sum()) / max(1.0, float(groups.sum())),
            "rollout/group_age_s_max": max(oldest.tolist(), default=0.0),
        }
        if total := float(offered.sum()):
            self.metrics["rollout/idle_frac"] = 1 - float(busy.sum()) / total
