"""Over-sampling: more groups in flight than a step needs, which of them are continued or kept, and their metrics.

All ranks hold the same state, except for the groups themselves, which stay on the lead rank of the engine that started
them. `lag_figures` reports how many weight versions old the rollouts are when they are trained on.
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
from megarl.config.keys import under_way
from megarl.rollout.partial_store import dealt, write_groups
from megarl.rollout.scheduler import Gathered, Group
from megarl.types import Everyone, Prompt, Rollouts

if TYPE_CHECKING:
    from megarl.data.prompt_data import PromptLoader


def lag_figures(rollouts: Rollouts) -> dict[str, float]:
    """Of the tokens that the policy chose: by how many versions the weights that chose them are older than those of
    now, as mean, median, 95th percentile and maximum. The same on all ranks. Collective."""
    counts = torch.zeros(1 + max(rollouts.lag.tolist(), default=0), dtype=torch.int64)
    for rollout in rollouts.here:
        for turn in rollout.turns:
            for version, tokens in turn.runs if turn.is_action else ():
                counts[max(0, rollouts.version - version)] += tokens
    counts = rollouts.everyone.total(counts)
    tokens = max(1, int(counts.sum()))
    reached = counts.cumsum(0)
    found = {"mean": int((counts * torch.arange(len(counts))).sum()) / tokens}
    for name, share in (("p50", 0.5), ("p95", 0.95), ("max", 1.0)):
        found[name] = float((reached < share * tokens).sum())
    return {f"rollout/lag_{name}": value for name, value in found.items()}


FOLDER = "carried"
"""In a checkpoint: a file of each engine."""


@dataclass(frozen=True)
class Plan:
    """prompts: to be begun, in their order, by whichever engine has room. needed: groups that are wanted of all
    engines, None for all of them. carried: groups that this engine goes on with; held: that all do. handed: prompts
    that came from the source, more or fewer than are to be begun. trains: whether it is the step's own generation."""

    prompts: Sequence[Prompt]
    needed: int | None = None
    carried: Sequence[Group] = ()
    held: int = 0
    handed: int = 0
    trains: bool = False


class Oversampling:
    """source: of the prompts that steps are given. engine, engines: the number of this lead's, and how many there are;
    engine is None on a rank that leads none. replays_routing: whether a trainer replays the engine's."""

    def __init__(
        self,
        config: RolloutConfig,
        source: PromptLoader[Prompt] | None,
        everyone: Everyone,
        engine: int | None,
        engines: int,
        replays_routing: bool = False,
    ) -> None:
        self._config, self._source, self._everyone = config, source, everyone
        self._engine, self._engines, self._replays_routing = engine, engines, replays_routing
        self._groups: list[Group] = []
        self._held = 0
        self._step = -1
        self.figures: dict[str, float] = {}

    def plan(self, prompts: Sequence[Prompt], step: int, greedy: bool) -> Plan:
        """Of a generation that is asked for. A step's first one of all prompts that the source handed out for it is
        over-sampled, and goes on with what was kept; any other has exactly the prompts that it is given."""
        trains, source = not greedy and step != self._step, self._source
        if trains:
            self._step = step
        wanted = self._held > 0 or self._config.oversample > 1
        if not trains or not wanted or source is None or not source.ends_with(prompts):
            return Plan(prompts, trains=trains)
        needed = len(prompts)
        begin = max(0, under_way(needed, self._config.oversample) - self._held)
        offered = [*prompts, *source.further(max(0, begin - needed))]
        return Plan(offered[:begin], needed, self._groups, self._held, len(offered), trains)

    def keep(self, plan: Plan, mine: Gathered | None, taken: int, rollouts: Rollouts) -> None:
        """What is left of it. mine: of this engine, None without one; taken: prompts that were begun. Collective."""
        numbers = [] if mine is None else [[mine.slots, mine.seconds, mine.busy, len(mine.partials), mine.anew]]
        table = self._everyone.rows(torch.tensor(numbers, dtype=torch.float64).reshape(-1, 5))
        slots, seconds, busy, partials, anew = table.T
        if plan.trains:
            self.figures = {}
            if offered := float(slots.sum()) * max(seconds.tolist(), default=0.0):
                self.figures["rollout/idle_frac"] = 1 - float(busy.sum()) / offered
        if plan.needed is None:
            return
        assert self._source is not None
        self._source.give_back(plan.handed - taken)
        self._groups, self._held = mine.partials if mine else [], int(partials.sum())
        self.figures |= {"rollout/carried": float(plan.held), "rollout/begun_anew": float(anew.sum())}
        self.figures |= lag_figures(rollouts)

    def save(self) -> Write:
        if self._engine is None or not (self._held or self._config.oversample > 1):
            return write_nothing
        name, groups = f"{FOLDER}/engine_{self._engine:05d}.bin", list(self._groups)
        return lambda folder: {folder / name: write_groups(folder / name, groups)}

    def restore(self, folder: Path) -> None:
        """Raises ConfigError on all ranks where a file is not of this program, or nothing would go on with what is in
        it. Collective."""
        error = ""
        try:
            found = manifest.read(folder)
            names = [] if isinstance(found, str) else sorted(name for name in found[1] if name.startswith(f"{FOLDER}/"))
            files = [folder / name for name in names]
            self._groups = dealt(files, self._engine, self._engines) if files and self._engine is not None else []
        except ConfigError as failure:
            error = str(failure)
        if errors := [text for text in self._everyone.objects(error) if text]:
            raise ConfigError(errors[0])
        self._held = int(self._everyone.total(torch.tensor([len(self._groups)])))
        if self._held and self._config.asynchronous:  # which begins the prompts that come next, and these have been
            raise ConfigError(
                f"{folder} has {self._held} groups of conversations under way (rollout.oversample), with which "
                "rollout.asynchronous=true does not go on: set it to false until a checkpoint has none, which "
                "rollout.oversample=1 brings about"
            )
        if self._held and self._replays_routing and self._config.max_lag:  # see check_replayed_prefixes
            raise ConfigError(
                f"{folder} has {self._held} groups of conversations under way (rollout.oversample), whose routing "
                "train.replay_routing=true cannot replay: set it to false until a checkpoint has none, or "
                "rollout.max_lag to 0, which begins them anew"
            )
