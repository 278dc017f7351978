"""Engines that were lost, as all ranks know of them: what it was, whether it goes on, and when they are there again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from megarl.config import Config, ConfigError
from megarl.engine.restart import Revival
from megarl.parallel import ranks

_REMEDIES = {
    "died": "see why in its log; where memory was short, lower rollout.sglang.mem_fraction_static, "
    "rollout.sglang.max_total_tokens or rollout.concurrency",
    "hangs": "see what it was at in its log; where it is only slow, raise rollout.hang_timeout",
    "did not start again": "see why in its log; where it is only slow, raise rollout.start_timeout",
}


@dataclass(frozen=True)
class _Lost:
    """What a lead says of its engine."""

    engine: int
    fault: str
    text: str
    unnoticed: float


class Recovery:
    """The same on all ranks, but for their engines.

    engines: how many there are. index: of this rank's. revival: of this rank's engine, where it has processes of it.
    leads: whether it speaks for it. say: a line for the log.
    """

    def __init__(
        self,
        config: Config,
        engines: int,
        index: int | None,
        revival: Revival | None,
        leads: bool,
        say: Callable[[str], None],
    ) -> None:
        self._config, self._engines, self._index, self._say = config, engines, index, say
        self._revival, self._leads = revival, leads
        self.away: set[int] = set()
        """Engines that are being started again."""
        self.bare: set[int] = set()
        """Those of them that are there, with the weights that they have loaded themselves."""
        self._faults: dict[int, str] = {}
        """By engine, what it was lost by since a step was finished."""
        self.restarts = 0
        self.unnoticed = self.took = 0.0

    def next_step(self) -> None:
        """A step was finished, and another begins: the figures are of that one."""
        self._faults.clear()
        self.restarts, self.unnoticed, self.took = 0, 0.0, 0.0

    @property
    def some_are_there(self) -> bool:
        """Whether there is an engine that can generate."""
        return len(self.away | self.bare) < self._engines

    def is_there(self, engine: int | None) -> bool:
        return engine is not None and engine not in self.away and engine not in self.bare

    def exchange(self, error: str = "", look: bool = False) -> bool:
        """Tell all ranks what was lost here; whether something was. Raises ConfigError on all ranks for an error of any
        of them, and where an engine was lost by the same twice in a row. look: see whether the engine is there, too.
        Collective."""
        mine: _Lost | None = None
        if self._revival is not None and self._leads:
            if look:
                self._revival.look()
            if (found := self._revival.found()) is not None:
                assert self._index is not None
                mine = _Lost(self._index, found.fault, str(found), found.unnoticed)
        told = ranks.all_gather_objects((error, mine))
        if errors := [text for text, _ in told if text]:
            raise ConfigError(errors[0])
        lost = [one for _, one in told if one is not None]
        for one in lost:
            self._note(one)
        if self._revival is not None and self._index in {one.engine for one in lost}:
            self._revival.begin()
        return bool(lost)

    def wait(self) -> None:
        """Return when all engines that are away are there again. Collective; raises as `exchange`."""
        while self.away:
            waited = 0.0
            if self._revival is not None and self._index in self.away:
                waited = self._revival.wait()
            away, self.away = self.away, set()
            self.exchange()
            back = away - self.away
            self.bare = (self.bare | back) - self.away
            longest = max(ranks.all_gather_objects(waited))
            self.took = max(self.took, longest)
            if back:
                names = ", ".join(map(str, sorted(back)))
                self._say(f"engine {names} has started again, {longest:.1f} s after it was found lost")

    def pushed(self, whole: bool) -> None:
        """All engines that are there have the weights of now; else none of them has."""
        self.bare = set() if whole else set(range(self._engines)) - self.away

    def figures(self) -> dict[str, float]:
        """Of a step in which an engine was lost."""
        if not self.restarts:
            return {}
        return {
            "rollout/engine_restarts": float(self.restarts),
            "time/engine_unnoticed": self.unnoticed,
            "time/engine_restart": self.took,
        }

    def _note(self, lost: _Lost) -> None:
        name, config = f"engine {lost.engine}", self._config
        if self._faults.get(lost.engine) == lost.fault:
            again = f"{name} {_was(lost.fault)} twice in a row, without a step between"
            raise ConfigError(f"{again}: {_REMEDIES[lost.fault]}. {lost.text}")
        self._faults[lost.engine] = lost.fault
        self.away.add(lost.engine)
        self.bare.discard(lost.engine)
        self.restarts += 1
        self.unnoticed = max(self.unnoticed, lost.unnoticed)
        first = lost.text.partition(";")[0]
        self._say(f"{name} {_was(lost.fault)} and is started again ({first}; see {config.run.dir}/logs)")


def _was(fault: str) -> str:
    return "hung" if fault == "hangs" else fault
