"""Recovery of lost engines, tracked on all ranks: the fault, whether the run continues, and the restart."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from megarl.config import Config, ConfigError
from megarl.engine.engine_restart import EngineRestart
from megarl.parallel import ranks

_REMEDIES = {
    "died": "see its log; if it ran out of memory, lower rollout.sglang.mem_fraction_static, "
    "rollout.sglang.max_total_tokens or rollout.concurrency",
    "hangs": "see its log; if it is only slow, raise rollout.hang_timeout",
    "did not start again": "see its log; if it is only slow, raise rollout.start_timeout",
}


@dataclass(frozen=True)
class _EngineLoss:
    """An engine loss reported by its lead."""

    engine: int
    fault: str
    text: str
    detection_s: float


class EngineRecovery:
    """State of lost and restarting engines, the same on all ranks.

    engine_index: this rank's engine. engine_restart: restarts it, if this rank manages its processes. is_lead: whether
    this rank leads its engine. label: name of an engine in messages, which its index follows.
    """

    def __init__(
        self,
        config: Config,
        num_engines: int,
        engine_index: int | None,
        engine_restart: EngineRestart | None,
        is_lead: bool,
        log: Callable[[str], None],
        label: str = "engine",
    ) -> None:
        self._config, self._num_engines, self._engine_index, self._log = config, num_engines, engine_index, log
        self._engine_restart, self._is_lead, self._label = engine_restart, is_lead, label
        self.restarting: set[int] = set()
        """Engines that are restarting."""
        self.unsynced: set[int] = set()
        """Engines that have restarted, but not received weights since."""
        self._faults: dict[int, str] = {}
        """Last fault of each engine since the last completed step."""
        self._starts: dict[int, int] = {}
        """Start number of each engine when it was last known to have weights or to restart."""
        self.restarts = 0
        self.detection_s = self.restart_s = 0.0

    def begin_step(self) -> None:
        """Reset the faults and the metrics for a new step."""
        self._faults.clear()
        self.restarts, self.detection_s, self.restart_s = 0, 0.0, 0.0

    @property
    def has_available_engine(self) -> bool:
        """True if at least one engine can generate."""
        return len(self.restarting | self.unsynced) < self._num_engines

    def is_available(self, engine: int | None) -> bool:
        return engine is not None and engine not in self.restarting and engine not in self.unsynced

    def exchange_losses(self, error: str = "", should_check: bool = False) -> bool:
        """Share losses among all ranks, and return whether there were any. Collective.

        should_check: check the engine's health first. Raises ConfigError on all ranks for an `error` of any rank, and
        for an engine lost twice in a row by the same fault.
        """
        local_loss: _EngineLoss | None = None
        start: tuple[int, int, bool] | None = None
        if self._engine_restart is not None and self._is_lead:
            if should_check:
                self._engine_restart.check()
            assert self._engine_index is not None
            # Read before the error, which is set before a restart begins: a restart without its error would be lost.
            start = self._engine_index, self._engine_restart.engine.start_number, self._engine_restart.is_pending
            if (engine_error := self._engine_restart.pop_error()) is not None:
                local_loss = _EngineLoss(
                    self._engine_index, engine_error.fault, str(engine_error), engine_error.detection_delay
                )
        reports = ranks.all_gather_objects((error, local_loss, start))
        if errors := [text for text, *_ in reports if text]:
            raise ConfigError(errors[0])
        lost = [loss for _, loss, _ in reports if loss is not None]
        for loss in lost:
            self._record_loss(loss)
        for engine, number, is_restarting in (started for *_, started in reports if started is not None):
            self._record_start(engine, number, is_restarting)
        if self._engine_restart is not None and self._engine_index in {loss.engine for loss in lost}:
            self._engine_restart.ensure_started()
        return bool(lost)

    def wait_restarts(self) -> None:
        """Wait until all restarting engines have started. Collective; raises as `exchange_losses`."""
        while self.restarting:
            waited = 0.0
            if self._engine_restart is not None and self._engine_index in self.restarting:
                waited = self._engine_restart.wait()
            previous, self.restarting = self.restarting, set()
            self.exchange_losses()
            restarted = previous - self.restarting
            self.unsynced = (self.unsynced | restarted) - self.restarting
            longest = max(ranks.all_gather_objects(waited))
            self.restart_s = max(self.restart_s, longest)
            if restarted:
                names = ", ".join(map(str, sorted(restarted)))
                self._log(f"{self._label} {names} restarted, {longest:.1f} s after its loss was detected")

    def on_weight_sync(self, succeeded: bool) -> None:
        """Record a weight sync: all running engines have the current weights if `succeeded`, otherwise none has."""
        self.unsynced = set() if succeeded else set(range(self._num_engines)) - self.restarting

    def metrics(self) -> dict[str, float]:
        """Return the metrics of a step in which an engine was lost; otherwise empty."""
        if not self.restarts:
            return {}
        return {
            "rollout/engine_restarts": float(self.restarts),
            "time/engine_detection": self.detection_s,
            "time/engine_restart": self.restart_s,
        }

    def _record_start(self, engine: int, number: int, is_restarting: bool) -> None:
        """Record an engine's start number. It may have been started again for another policy that it serves; it then
        lacks the weights of this one."""
        previous, self._starts[engine] = self._starts.get(engine, 1), number
        if engine not in self.restarting:
            if is_restarting:
                self.restarting.add(engine)
            elif number != previous:
                self.unsynced.add(engine)

    def _record_loss(self, loss: _EngineLoss) -> None:
        name, config = f"{self._label} {loss.engine}", self._config
        if self._faults.get(loss.engine) == loss.fault:
            fault_text = f"{name} {_past_tense(loss.fault)} twice in a row without a completed step"
            raise ConfigError(f"{fault_text}: {_REMEDIES[loss.fault]}. {loss.text}")
        self._faults[loss.engine] = loss.fault
        self.restarting.add(loss.engine)
        self.unsynced.discard(loss.engine)
        self.restarts += 1
        self.detection_s = max(self.detection_s, loss.detection_s)
        reason = loss.text.partition(";")[0]
        self._log(f"{name} {_past_tense(loss.fault)} and is being restarted ({reason}; see {config.run.dir}/logs)")


def _past_tense(fault: str) -> str:
    return "hung" if fault == "hangs" else fault
