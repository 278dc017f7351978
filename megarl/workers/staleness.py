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
    from megarl.data.prompt_data import PromptLoader


def staleness_metrics(rollouts: Rollouts) -> dict[str, float]:
    """Of the tokens that the policy chose: by how many versions the weights that chose them are older than those of
    now, as mean, median, 95th percentile and maximum. The same on all ranks. Collective."""
    counts = torch.zeros(1 + max(rollouts.staleness.tolist(), default=0), dtype=torch.int64)
    for rollout in rollouts.local:
        for turn in rollout.turns:
            for version, tokens in turn.version_spans if turn.is_action else ():
                counts[max(0, rollouts.version - version)] += tokens
    counts = rollouts.comm.all_reduce(counts)
    tokens = max(1, int(counts.sum()))
    reached = counts.cumsum(0)
    found = {"mean": int((counts * torch.arange(len(counts))).sum()) / tokens}
    for name, share in (("p50", 0.5), ("p95", 0.95), ("max", 1.0)):
        found[name] = float((reached < share * tokens).sum())
    return {f"rollout/lag_{name}": value for name, value in found.items()}


FOLDER = "carried"
"""In a checkpoint: a file of each engine."""


@dataclass(frozen=True)
class OversamplingPlan:
    """prompts: to be begun, in their order, by whichever engine has room. needed: groups that are wanted of all
    engines, None for all of them. carried: groups that this engine goes on with; held: that all do. handed: prompts
    that came from the source, more or fewer than are to be begun. trains: whether it is the step's own generation."""

    prompts: Sequence[Prompt]
    num_needed: int | None = None
    partial_groups: Sequence[Group] = ()
    num_partial_groups: int = 0
    num_drawn: int = 0
    is_training: bool = False


class Oversampling:
    """source: of the prompts that steps are given. engine, engines: the number of this lead's, and how many there are;
    engine is None on a rank that leads none. replays_routing: whether a trainer replays the engine's."""

    def __init__(
        self,
        config: RolloutConfig,
        source: PromptLoader[Prompt] | None,
        everyone: Comm,
        engine: int | None,
        engines: int,
        replays_routing: bool = False,
    ) -> None:
        self._config, self._prompt_loader, self._comm = config, source, everyone
        self._engine_index, self._num_engines, self._replays_routing = engine, engines, replays_routing
        self._partial_groups: list[Group] = []
        self._num_partial_groups = 0
        self._last_step = -1
        self.metrics: dict[str, float] = {}

    def plan(self, prompts: Sequence[Prompt], step: int, greedy: bool) -> OversamplingPlan:
        """Of a generation that is asked for. A step's first one of all prompts that the source handed out for it is
        over-sampled, and goes on with what was kept; any other has exactly the prompts that it is given."""
        trains, source = not greedy and step != self._last_step, self._prompt_loader
        if trains:
            self._last_step = step
        wanted = self._num_partial_groups > 0 or self._config.oversample > 1
        if not trains or not wanted or source is None or not source.is_last_batch(prompts):
            return OversamplingPlan(prompts, is_training=trains)
        needed = len(prompts)
        begin = max(0, max_pending_groups(needed, self._config.oversample) - self._num_partial_groups)
        offered = [*prompts, *source.next_items(max(0, begin - needed))]
        return OversamplingPlan(
            offered[:begin], needed, self._partial_groups, self._num_partial_groups, len(offered), trains
        )

    def record_result(
        self, plan: OversamplingPlan, mine: GenerationResult | None, taken: int, rollouts: Rollouts
    ) -> None:
        """What is left of it. mine: of this engine, None without one; taken: prompts that were begun. Collective."""
        numbers = (
            []
            if mine is None
            else [[mine.num_slots, mine.seconds, mine.busy_seconds, len(mine.partials), mine.num_stale]]
        )
        table = self._comm.all_gather_rows(torch.tensor(numbers, dtype=torch.float64).reshape(-1, 5))
        slots, seconds, busy, partials, anew = table.T
        if plan.is_training:
            self.metrics = {}
            if offered := float(slots.sum()) * max(seconds.tolist(), default=0.0):
                self.metrics["rollout/idle_frac"] = 1 - float(busy.sum()) / offered
        if plan.num_needed is None:
            return
        assert self._prompt_loader is not None
        self._prompt_loader.return_unused(plan.num_drawn - taken)
        self._partial_groups, self._num_partial_groups = mine.partials if mine else [], int(partials.sum())
        self.metrics |= {"rollout/carried": float(plan.num_partial_groups), "rollout/begun_anew": float(anew.sum())}
        self.metrics |= staleness_metrics(rollouts)

    def save(self) -> Write:
        if self._engine_index is None or not (self._num_partial_groups or self._config.oversample > 1):
            return write_nothing
        name, groups = f"{FOLDER}/engine_{self._engine_index:05d}.bin", list(self._partial_groups)
        return lambda folder: {folder / name: write_groups(folder / name, groups)}

    def restore(self, folder: Path) -> None:
        """Raises ConfigError on all ranks where a file is not of this program, or nothing would go on with what is in
        it. Collective."""
        error = ""
        try:
            found = manifest.read(folder)
            names = [] if isinstance(found, str) else sorted(name for name in found[1] if name.startswith(f"{FOLDER}/"))
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
        if (
            self._num_partial_groups and self._config.asynchronous
        ):  # which begins the prompts that come next, and these have been
            raise ConfigError(
                f"{folder} has {self._num_partial_groups} groups of conversations under way (rollout.oversample), with which "
                "rollout.asynchronous=true does not go on: set it to false until a checkpoint has none, which "
                "rollout.oversample=1 brings about"
            )
        if self._num_partial_groups and self._replays_routing and self._config.max_lag:  # see check_replayed_prefixes
            raise ConfigError(
                f"{folder} has {self._num_partial_groups} groups of conversations under way (rollout.oversample), whose routing "
                "train.replay_routing=true cannot replay: set it to false until a checkpoint has none, or "
                "rollout.max_lag to 0, which begins them anew"
            )
