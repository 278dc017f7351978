"""Generation that outlasts its step: asynchronous streams, pending generations, over-sampling, and their staleness.

All ranks keep the same counts. The lead rank of each engine runs a stream of conversations (`rollout/group_stream.py`)
and keeps the partial groups of its engine. A `PendingGeneration` is one that no step waits for, such as an evaluation:
it continues through training and weight syncs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from megarl.checkpoint import manifest
from megarl.checkpoint.manifest import Write, write_nothing
from megarl.config import Config, ConfigError, RolloutConfig
from megarl.config.keys import max_pending_groups
from megarl.rollout.group_queue import UNLIMITED, GroupQueue, SharedStore
from megarl.rollout.group_stream import OnBusyInterval
from megarl.rollout.partial_rollouts import assign_groups, write_groups
from megarl.rollout.rollout_runner import RolloutRunner
from megarl.rollout.scheduler import GenerationResult, Group
from megarl.types import Comm, Prompt, Rollout, Rollouts

if TYPE_CHECKING:
    from megarl.data.loader import PromptLoader


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
        self._future, self._queue, self._comm, self._wait_phase = future, queue, comm, wait_phase
        self.start_version, self._current_version = start_version, current_version

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
        self._num_engines, self._kv_store = num_engines, kv_store
        self._step_seed, self._on_busy_interval = step_seed, on_busy_interval
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
                    group_queue, samples=samples, max_groups=groups, on_busy_interval=self._on_busy_interval
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
        """Compute the metrics of a step's generation. result: this engine's; None without an engine. Collective."""
        rows: list[list[float]] = []
        if result is not None:
            ages, offered_s = result.group_ages, result.num_slots * result.seconds
            row = [offered_s, result.busy_seconds, sum(ages), max(ages, default=0.0), len(ages)]
            rows.append([*row, result.num_interrupted, result.num_restarted])
        table = self._comm.all_gather_rows(torch.tensor(rows, dtype=torch.float64).reshape(-1, 7))
        offered, busy, age_sum, oldest, groups, interrupted, restarted = table.T
        self.lost_counts = int(interrupted.sum()), int(restarted.sum())
        self.metrics = staleness_metrics(rollouts) | {
            "rollout/group_age_s_mean": float(age_sum.sum()) / max(1.0, float(groups.sum())),
            "rollout/group_age_s_max": max(oldest.tolist(), default=0.0),
        }
        if total := float(offered.sum()):
            self.metrics["rollout/idle_frac"] = 1 - float(busy.sum()) / total


def staleness_metrics(rollouts: Rollouts) -> dict[str, float]:
    """Return mean, median, 95th percentile and maximum of the staleness of the policy's tokens, in weight versions.

    The same on all ranks. Collective.
    """
    counts = torch.zeros(1 + max(rollouts.staleness.tolist(), default=0), dtype=torch.int64)
    for rollout in rollouts.local:
        for turn in rollout.turns:
            for version, tokens in turn.version_spans if turn.is_action else ():
                counts[max(0, rollouts.version - version)] += tokens
    counts = rollouts.comm.all_reduce(counts)
    tokens = max(1, int(counts.sum()))
    cumulative = counts.cumsum(0)
    stats = {"mean": int((counts * torch.arange(len(counts))).sum()) / tokens}
    for name, share in (("p50", 0.5), ("p95", 0.95), ("max", 1.0)):
        stats[name] = float((cumulative < share * tokens).sum())
    return {f"rollout/staleness_{name}": value for name, value in stats.items()}


FOLDER = "partial_groups"
"""Checkpoint folder with one file per engine; until version 0.2 it was `carried`."""


@dataclass(frozen=True)
class OversamplingPlan:
    """Prompts and partial groups of one generation."""

    prompts: Sequence[Prompt]
    """Prompts to start, in order, on whichever engine has capacity."""
    num_needed: int | None = None
    """Groups needed from all engines together; None for all groups."""
    partial_groups: Sequence[Group] = ()
    """Groups that this engine continues."""
    num_partial_groups: int = 0
    """Groups that all engines together continue."""
    num_drawn: int = 0
    """Prompts drawn from the loader, which may be more or fewer than those to start."""
    is_training: bool = False
    """True for the step's own training generation."""


class Oversampling:
    """Plans over-sampled generations and keeps partial groups between steps.

    loader: loader of the training prompts. engine, engines: index of this lead's engine, None on ranks that lead none,
    and number of engines.
    """

    def __init__(
        self,
        config: RolloutConfig,
        loader: PromptLoader[Prompt] | None,
        comm: Comm,
        engine_index: int | None,
        num_engines: int,
    ) -> None:
        self._config, self._prompt_loader, self._comm = config, loader, comm
        self._engine_index, self._num_engines = engine_index, num_engines
        self._partial_groups: list[Group] = []
        self._num_partial_groups = 0
        self._last_step = -1
        self.metrics: dict[str, float] = {}

    def plan(self, prompts: Sequence[Prompt], step: int, greedy: bool) -> OversamplingPlan:
        """Plan a generation.

        A step's first sampling of all prompts that the loader returned for it is over-sampled and continues the partial
        groups. Any other generation has exactly the given prompts.
        """
        is_training, loader = not greedy and step != self._last_step, self._prompt_loader
        if is_training:
            self._last_step = step
        is_oversampling = self._num_partial_groups > 0 or self._config.oversample > 1
        if not is_training or not is_oversampling or loader is None or not loader.is_last_batch(prompts):
            return OversamplingPlan(prompts, is_training=is_training)
        needed = len(prompts)
        num_to_start = max(0, max_pending_groups(needed, self._config.oversample) - self._num_partial_groups)
        drawn = [*prompts, *loader.next_items(max(0, num_to_start - needed))]
        return OversamplingPlan(
            drawn[:num_to_start], needed, self._partial_groups, self._num_partial_groups, len(drawn), is_training
        )

    def record_result(
        self, plan: OversamplingPlan, result: GenerationResult | None, num_started: int, rollouts: Rollouts
    ) -> None:
        """Keep the partial groups and return unused prompts to the loader. Collective.

        result: this engine's; None without an engine. num_started: prompts that were started.
        """
        rows: list[list[float]] = []
        if result is not None:
            rows.append([result.num_slots, result.seconds, result.busy_seconds, len(result.partials), result.num_stale])
        table = self._comm.all_gather_rows(torch.tensor(rows, dtype=torch.float64).reshape(-1, 5))
        slots, seconds, busy, partials, restarted = table.T
        if plan.is_training:
            self.metrics = {}
            if slot_seconds := float(slots.sum()) * max(seconds.tolist(), default=0.0):
                self.metrics["rollout/idle_frac"] = 1 - float(busy.sum()) / slot_seconds
        if plan.num_needed is None:
            return
        assert self._prompt_loader is not None
        self._prompt_loader.return_unused(plan.num_drawn - num_started)
        self._partial_groups, self._num_partial_groups = result.partials if result else [], int(partials.sum())
        self.metrics |= {
            "rollout/partial_groups": float(plan.num_partial_groups),
            "rollout/restarted_rollouts": float(restarted.sum()),
        }
        self.metrics |= staleness_metrics(rollouts)

    def save(self) -> Write:
        if self._engine_index is None or not (self._num_partial_groups or self._config.oversample > 1):
            return write_nothing
        name, groups = f"{FOLDER}/engine_{self._engine_index:05d}.bin", list(self._partial_groups)
        return lambda folder: {folder / name: write_groups(folder / name, groups)}

    def restore(self, folder: Path) -> None:
        """Restore partial groups. Collective.

        Raises ConfigError on all ranks for a file that this program has not written, and for partial groups that this
        configuration cannot continue.
        """
        error = ""
        try:
            names = sorted(manifest.read(folder)[1])
            files = [folder / name for name in names if name.startswith((f"{FOLDER}/", "carried/"))]
            self._partial_groups = []
            if files and self._engine_index is not None:
                self._partial_groups = assign_groups(files, self._engine_index, self._num_engines)
        except ConfigError as failure:
            error = str(failure)
        if errors := [text for text in self._comm.all_gather_objects(error) if text]:
            raise ConfigError(errors[0])
        self._num_partial_groups = int(self._comm.all_reduce(torch.tensor([len(self._partial_groups)])))
        # Asynchronous generation starts the next prompts only, and those of partial groups have been started before.
        if self._num_partial_groups and self._config.asynchronous:
            raise ConfigError(
                f"{folder} has {self._num_partial_groups} groups of partial rollouts (rollout.oversample), which "
                f"rollout.asynchronous=true cannot continue: set it to false until a checkpoint has none, which "
                f"rollout.oversample=1 achieves"
            )
