"""Engines that were lost, as all ranks know of them: what it was, whether it goes on, and when they are there again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from megarl.config import Config, ConfigError
from megarl.engine.restart import EngineRestart
from megarl.parallel import ranks

_REMEDIES = {
    "died": "see why in its log; where memory was short, lower rollout.sglang.mem_fraction_static, "
    "rollout.sglang.max_total_tokens or rollout.concurrency",
    "hangs": "see what it was at in its log; where it is only slow, raise rollout.hang_timeout",
    "did not start again": "see why in its log; where it is only slow, raise rollout.start_timeout",
}


@dataclass(frozen=True)
class _EngineLoss:
    """What a lead says of its engine."""

    engine: int
    fault: str
    text: str
    detection_s: float


class EngineRecovery:
    """The same on all ranks, but for their engines.

    engines: how many there are. index: of this rank's. revival: of this rank's engine, where it has processes of it.
    leads: whether it speaks for it. say: a line for the log.
    """

    def __init__(
        self,
        config: Config,
        engines: int,
        index: int | None,
        revival: EngineRestart | None,
        leads: bool,
        say: Callable[[str], None],
    ) -> None:
        self._config, self._num_engines, self._engine_index, self._log = config, engines, index, say
        self._engine_restart, self._is_lead = revival, leads
        self.restarting: set[int] = set()
        """Engines that are being started again."""
        self.unsynced: set[int] = set()
        """Those of them that are there, with the weights that they have loaded themselves."""
        self._faults: dict[int, str] = {}
        """By engine, what it was lost by since a step was finished."""
        self.restarts = 0
        self.detection_s = self.restart_s = 0.0

    def begin_step(self) -> None:
        """A step was finished, and another begins: the figures are of that one."""
        self._faults.clear()
        self.restarts, self.detection_s, self.restart_s = 0, 0.0, 0.0

    @property
    def has_available_engine(self) -> bool:
        """Whether there is an engine that can generate."""
        return len(self.restarting | self.unsynced) < self._num_engines

    def is_available(self, engine: int | None) -> bool:
        return engine is not None and engine not in self.restarting and engine not in self.unsynced

    def exchange_losses(self, error: str = "", look: bool = False) -> bool:
        """Tell all ranks what was lost here; whether something was. Raises ConfigError on all ranks for an error of any
        of them, and where an engine was lost by the same twice in a row. look: see whether the engine is there, too.
        Collective."""
        mine: _EngineLoss | None = None
        if self._engine_restart is not None and self._is_lead:
            if look:
                self._engine_restart.check()
            if (found := self._engine_restart.pop_error()) is not None:
                assert self._engine_index is not None
                mine = _EngineLoss(self._engine_index, found.fault, str(found), found.detection_delay)
        told = ranks.all_gather_objects((error, mine))
        if errors := [text for text, _ in told if text]:
            raise ConfigError(errors[0])
        lost = [one for _, one in told if one is not None]
        for one in lost:
            self._record_loss(one)
        if self._engine_restart is not None and self._engine_index in {one.engine for one in lost}:
            self._engine_restart.ensure_started()
        return bool(lost)

    def wait_restarts(self) -> None:
        """Return when all engines that are away are there again. Collective; raises as `exchange`."""
        while self.restarting:
            waited = 0.0
            if self._engine_restart is not None and self._engine_index in self.restarting:
                waited = self._engine_restart.wait()
            away, self.restarting = self.restarting, set()
            self.exchange_losses()
            back = away - self.restarting
            self.unsynced = (self.unsynced | back) - self.restarting
            longest = max(ranks.all_gather_objects(waited))
            self.restart_s = max(self.restart_s, longest)
            if back:
                names = ", ".join(map(str, sorted(back)))
                self._log(f"engine {names} has started again, {longest:.1f} s after it was found lost")

    def on_weight_sync(self, whole: bool) -> None:
        """All engines that are there have the weights of now; else none of them has."""
        self.unsynced = set() if whole else set(range(self._num_engines)) - self.restarting

    def metrics(self) -> dict[str, float]:
        """Of a step in which an engine was lost."""
        if not self.restarts:
            return {}
        return {
            "rollout/engine_restarts": float(self.restarts),
            "time/engine_unnoticed": self.detection_s,
            "time/engine_restart": self.restart_s,
        }

    def _record_loss(self, lost: _EngineLoss) -> None:
        name, config = f"engine {lost.engine}", self._config
        if self._faults.get(lost.engine) == lost.fault:
            again = f"{name} {_past_tense(lost.fault)} twice in a row, without a step between"
            raise ConfigError(f"{again}: {_REMEDIES[lost.fault]}. {lost.text}")
        self._faults[lost.engine] = lost.fault
        self.restarting.add(lost.engine)
        self.unsynced.discard(lost.engine)
        self.restarts += 1
        self.detection_s = max(self.detection_s, lost.detection_s)
        first = lost.text.partition(";")[0]
        self._log(f"{name} {_past_tense(lost.fault)} and is started again ({first}; see {config.run.dir}/logs)")


def _past_tense(fault: str) -> str:
    return "hung" if fault == "hangs" else fault
