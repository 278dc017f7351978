"""Generation that outlasts its step, asynchronous or over-sampled, and the staleness of its tokens.

All ranks keep the same counts, and the lead rank of each engine runs a stream of conversations
(`rollout/group_stream.py`). A `PendingGeneration` is one that no step waits for, such as an evaluation: it continues
through training and weight syncs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from megarl.checkpoint import manifest
from megarl.checkpoint.manifest import Write, write_nothing
from megarl.config import Config, ConfigError
from megarl.config.keys import max_pending_groups
from megarl.rollout.engine_usage import WIDTH as USAGE_WIDTH
from megarl.rollout.engine_usage import EngineUsage
from megarl.rollout.group_queue import UNLIMITED, GroupQueue, SharedStore
from megarl.rollout.group_stream import AdmittedPrompt, OnBusyInterval
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
    result. keeps_routing: whether the rollouts keep their records of routing.
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
        keeps_routing: bool = True,
    ) -> None:
        self._future, self._queue, self._comm, self._wait_phase = future, queue, comm, wait_phase
        self._keeps_routing = keeps_routing
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
        rollouts = Rollouts.gather(
            local_rollouts, [rollout.group for rollout in local_rollouts], self._comm, self._current_version()
        )
        return rollouts if self._keeps_routing else rollouts.without_routing()


def newest_version(rollouts: Rollouts) -> int:
    """Return the newest version of the weights that sampled any token; -1 without sampled tokens. Collective."""
    local_newest = max((version for rollout in rollouts.local for version, _ in rollout.version_spans), default=-1)
    return max(rollouts.comm.all_gather_objects(local_newest))


FOLDER = "partial_groups"
"""Checkpoint folder with one file per engine of the first policy; until version 0.2 it was `carried`."""


class RolloutStream:
    """The generation of a run whose conversations outlast a step (`rollout.asynchronous`, `rollout.oversample`).

    A step requests groups and gets as many complete ones: with `rollout.oversample` the first that are complete, else
    the next in order. Further prompts start in the order of the loader. So the groups in flight are always those of the
    prompts that follow the loader's position, except for those that steps took before their turn.

    loader: deals out the prompts of this policy, in its tokens. runner: that of this rank's engine, if it leads one,
    with the engine's index. kv_store: shared by all lead ranks. step_seed: returns the seed of a step. policy: name of
    a policy besides the first, whose stream and files have names of their own.
    """

    def __init__(
        self,
        config: Config,
        loader: PromptLoader[Prompt] | None,
        comm: Comm,
        runner: RolloutRunner | None,
        engine_index: int | None,
        num_engines: int,
        kv_store: SharedStore,
        step_seed: Callable[[int], int],
        on_busy_interval: OnBusyInterval,
        policy: str = "",
    ) -> None:
        self.name = "megarl/generation/" + (f"rollout_{policy}/stream" if policy else "stream")
        """Name in the store that the ranks share."""
        self._folder = f"{FOLDER}_{policy}" if policy else FOLDER
        self._config, self._loader, self._comm = config, loader, comm
        self._runner, self._engine_index = runner, engine_index
        self._num_engines, self._kv_store = num_engines, kv_store
        self._step_seed, self._on_busy_interval = step_seed, on_busy_interval
        self._samples = 0
        self._num_pending = 0
        """Admitted groups that no step has collected, over all engines."""
        self._position = 0
        """Position of the loader after the last request."""
        self._step = 0
        """Step of the last request."""
        self._staleness_counts = torch.zeros(0, dtype=torch.int64)
        """Tokens of the step so far by their staleness."""
        self._restored: list[Group] = []
        """Groups of this engine's file in the checkpoint, until the stream starts."""
        self.metrics: dict[str, float] = {}
        self.lost_counts = 0, 0
        """Conversations of the last step that were lost with their engines, and those that started over."""

    @property
    def is_running(self) -> bool:
        return self._samples > 0

    @property
    def keeps_groups(self) -> bool:
        """Whether groups in flight may be ahead of their turn, so that a checkpoint needs them."""
        return self._config.rollout.oversample > 1

    def provides(self, prompts: Sequence[Prompt]) -> bool:
        """Return whether a generation for these prompts takes its groups from the stream: they must be the last that
        the loader has returned."""
        rollout = self._config.rollout
        outlasts = rollout.asynchronous or rollout.oversample > 1 or self._num_pending > 0
        return outlasts and self._loader is not None and self._loader.is_last_batch(prompts)

    def request_groups(self, count: int, samples: int, step: int, version: int) -> None:
        """Request groups for the last `count` prompts of the loader. The first request starts the stream. Collective.

        version: that of the engines' weights.
        """
        assert self._loader is not None
        if self._samples not in (0, samples):
            raise ConfigError(
                f"step {step} wants {samples} samples of each prompt, but {self._samples} were already started; with "
                f"rollout.asynchronous and rollout.oversample an algorithm must always ask for the same number"
            )
        if self._samples and self._loader.position != self._position + count:
            raise ConfigError(
                f"step {step} generates for {count} prompts, but the loader has returned "
                f"{self._loader.position - self._position} since the last generation; with rollout.asynchronous and "
                "rollout.oversample an algorithm must generate for every prompt that it takes from the loader"
            )
        first = self._loader.position - count + self._num_pending
        if not self._samples:
            self._start(samples, version, count)
        self._position = self._loader.position
        rollout, run = self._config.rollout, self._config.run
        if step != self._step:
            self._step, self._staleness_counts = step, torch.zeros(0, dtype=torch.int64)
            if rollout.oversample > 1:
                self.metrics["rollout/partial_groups"] = float(self._num_pending)
        ahead = min(rollout.max_staleness, run.num_rollout - step) if rollout.asynchronous else 0
        self._admit_until(first, self._position - count + self._max_pending(count, ahead))
        self._num_pending -= count

    def _max_pending(self, count: int, ahead: int) -> int:
        """Return the groups in flight for a request of `count`, and `ahead` later steps."""
        return max_pending_groups(count, self._config.rollout.oversample) + ahead * self._config.data.prompts_per_step

    def on_weight_sync(self, step: int) -> None:
        """Set the engines' version to this step. With `rollout.asynchronous`, admit prompts of later steps."""
        if not self._samples:
            return
        if self._runner is not None:
            self._runner.set_version(step)
        rollout, run = self._config.rollout, self._config.run
        ahead = min(1 + rollout.max_staleness, run.num_rollout - step) if rollout.asynchronous else 0
        if ahead > 0:
            per_step = self._config.data.prompts_per_step
            self._admit_until(
                self._position + self._num_pending, self._position + self._max_pending(per_step, ahead - 1)
            )

    def _start(self, samples: int, version: int, count: int) -> None:
        self._samples = samples
        counts = self._comm.all_gather_objects(len(self._restored))
        if self._runner is not None:
            first, rollout = sum(counts[: self._comm.rank]), self._config.rollout
            max_groups = self._max_pending(count, rollout.max_staleness if rollout.asynchronous else 0)
            self._runner.start_stream(
                GroupQueue(UNLIMITED, self._num_engines, self._kv_store, self.name, first=sum(counts)),
                samples=samples,
                max_groups=-(-max_groups // self._num_engines),
                version=version,
                is_ordered=rollout.oversample == 1,
                partial_groups=dict(enumerate(self._restored, first)),
                on_busy_interval=self._on_busy_interval,
            )
        self._restored = []

    def _admit_until(self, first: int, end: int) -> None:
        """Admit the loader's prompts from position `first` to before `end`."""
        if first >= end:
            return
        assert self._loader is not None
        per_step = self._config.data.prompts_per_step
        if self._runner is not None:
            self._runner.admit(
                [
                    AdmittedPrompt(prompt, self._step_seed(1 + position // per_step), position % per_step)
                    for position, prompt in enumerate(self._loader.items_at(first, end - first), first)
                ]
            )
        self._num_pending += end - first

    def update_metrics(self, result: GenerationResult | None, rollouts: Rollouts) -> None:
        """Compute the metrics of a request's generation. result: this engine's; None without an engine. Collective."""
        rows: list[list[float]] = []
        if result is not None:
            ages, offered_s = result.group_ages, result.num_slots * result.seconds
            row = [offered_s, result.busy_seconds, sum(ages), max(ages, default=0.0), len(ages)]
            row += [result.num_interrupted, result.num_restarted, result.num_stale]
            rows.append([*row, *result.usage.to_row()])
        table = self._comm.all_gather_rows(torch.tensor(rows, dtype=torch.float64).reshape(-1, 8 + USAGE_WIDTH))
        offered, busy, age_sum, oldest, groups, interrupted, restarted, stale = table[:, :8].T
        self.lost_counts = int(interrupted.sum()), int(restarted.sum())
        counts = count_staleness(rollouts)
        longer, shorter = sorted((counts, self._staleness_counts), key=len, reverse=True)
        longer[: len(shorter)] += shorter
        self._staleness_counts = longer
        self.metrics |= staleness_metrics(longer) | {
            "rollout/group_age_s_mean": float(age_sum.sum()) / max(1.0, float(groups.sum())),
            "rollout/group_age_s_max": max(oldest.tolist(), default=0.0),
        }
        if len(table):
            self.metrics |= EngineUsage.of_rows(table[:, 8:].tolist()).metrics
        if self._config.rollout.oversample > 1:
            self.metrics["rollout/restarted_rollouts"] = float(stale.sum())
        if total := float(offered.sum()):
            self.metrics["rollout/idle_frac"] = 1 - float(busy.sum()) / total

    def save(self) -> Write:
        """Return a function that writes the groups in flight, if a checkpoint needs them. Collective."""
        if not (self.keeps_groups or self._num_pending) or (
            not self.keeps_groups and self._config.rollout.asynchronous
        ):
            return write_nothing
        groups = list(self._restored)
        if self._samples:
            self._hold_claims(True)
            if self._runner is not None:
                groups = self._runner.snapshot()
            self._hold_claims(False)
        if self._engine_index is None:
            return write_nothing
        name = f"{self._folder}/engine_{self._engine_index:05d}.bin"
        return lambda folder: {folder / name: write_groups(folder / name, groups)}

    def _hold_claims(self, is_held: bool) -> None:
        if not is_held:
            self._comm.all_gather_objects(None)  # all engines have taken their snapshots
        if self._runner is not None:
            self._runner.hold_claims(is_held)
        if is_held:
            self._comm.all_gather_objects(None)

    def restore(self, folder: Path) -> None:
        """Restore groups in flight. Collective. Raises ConfigError on all ranks for a file that this program has not
        written."""
        error = ""
        try:
            names = sorted(manifest.read(folder)[1])
            prefixes = (f"{self._folder}/", *(("carried/",) if self._folder == FOLDER else ()))
            files = [folder / name for name in names if name.startswith(prefixes)]
            self._restored = []
            if files and self._engine_index is not None:
                self._restored = assign_groups(files, self._engine_index, self._num_engines)
        except ConfigError as failure:
            error = str(failure)
        if errors := [text for text in self._comm.all_gather_objects(error) if text]:
            raise ConfigError(errors[0])
        self._num_pending = sum(self._comm.all_gather_objects(len(self._restored)))


def count_staleness(rollouts: Rollouts) -> torch.Tensor:
    """Return [versions] int64, the number of the policy's tokens by their staleness in weight versions.

    The same on all ranks. Collective.
    """
    counts = torch.zeros(1 + max(rollouts.staleness.tolist(), default=0), dtype=torch.int64)
    for rollout in rollouts.local:
        for turn in rollout.turns:
            for version, tokens in turn.version_spans if turn.is_action else ():
                counts[max(0, rollouts.version - version)] += tokens
    return rollouts.comm.all_reduce(counts)


def staleness_metrics(counts: torch.Tensor) -> dict[str, float]:
    """Return mean, median, 95th percentile and maximum of the staleness of tokens. counts: from `count_staleness`."""
    tokens = max(1, int(counts.sum()))
    cumulative = counts.cumsum(0)
    stats = {"mean": int((counts * torch.arange(len(counts))).sum()) / tokens}
    for name, share in (("p50", 0.5), ("p95", 0.95), ("max", 1.0)):
        stats[name] = float((cumulative < share * tokens).sum())
    return {f"rollout/staleness_{name}": value for name, value in stats.items()}
