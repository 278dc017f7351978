"""Over-sampling: more groups in flight than a step needs, which of them are continued or kept, and their metrics.

All ranks hold the same state, except for the groups themselves, which stay on the lead rank of the engine that started
them. `staleness_metrics` reports how many weight versions old the rollouts are when they are trained on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from megarl.checkpoint import manifest
from megarl.checkpoint.manifest import Write, write_nothing
from megarl.config import ConfigError, RolloutConfig
from megarl.config.keys import max_pending_groups
from megarl.rollout.partial_store import assign_groups, write_groups
from megarl.rollout.scheduler import GenerationResult, Group
from megarl.types import Comm, Prompt, Rollouts

if TYPE_CHECKING:
    from megarl.data.loader import PromptLoader


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


FOLDER = "carried"
"""Checkpoint folder with one file per engine."""


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
    and number of engines. replays_routing: whether the trainer replays the engine's routing.
    """

    def __init__(
        self,
        config: RolloutConfig,
        loader: PromptLoader[Prompt] | None,
        comm: Comm,
        engine_index: int | None,
        num_engines: int,
        replays_routing: bool = False,
    ) -> None:
        self._config, self._prompt_loader, self._comm = config, loader, comm
        self._engine_index, self._num_engines, self._replays_routing = engine_index, num_engines, replays_routing
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

        result: this engine's result, None without an engine. taken: prompts that were started.
        """
        rows = (
            []
            if result is None
            else [[result.num_slots, result.seconds, result.busy_seconds, len(result.partials), result.num_stale]]
        )
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
            contents = manifest.read(folder)
            names = (
                []
                if isinstance(contents, str)
                else sorted(name for name in contents[1] if name.startswith(f"{FOLDER}/"))
            )
            files = [folder / name for name in names]
            self._partial_groups = (
                assign_groups(files, self._engine_index, self._num_engines)
                if files and self._engine_index is not None
                else []
            )
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
        if (
            self._num_partial_groups and self._replays_routing and self._config.max_staleness
        ):  # see check_replayed_prefixes
            raise ConfigError(
                f"{folder} has {self._num_partial_groups} groups of partial rollouts (rollout.oversample), "
                "whose routing train.routing_replay=true cannot replay: set it to false until a checkpoint has none, "
                "or rollout.max_staleness to 0, which restarts them"
            )
