"""State of the guards: counts, one-time alarms, and what checkpoints keep of them. `README.md` explains each guard.

The guards act elsewhere: `workers/model_worker.py`, `checkpointing.py`, `algorithms/kl.py`, `megatron/oom_retry.py`.
This module reads their traces in a step's metrics, which are the same on all ranks.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from megarl.config import Config, ConfigError, GuardsConfig
from megarl.observe.health_bands import load_bands
from megarl.parallel.placement import optimizer_key, split_role
from megarl.types.requirements import Requirements

MAX_CONSECUTIVE_ROLLBACKS = 3
"""The run stops after this many consecutive steps that ended in a rollback."""
_ROLLBACK_KL = re.compile(r"guards/(?:(.+)_)?ppo_kl")
"""Metric of a role that was rolled back: its KL; without a name that of the actor."""
KL_TO_REFERENCE = "actor/kl_to_reference"
"""Metric that `guards.kl` limits; that of the policy b is below `b/`."""
_OOM_COUNT = re.compile(r"guards/(.+)_out_of_memory")
"""Metric that counts how often a role's model ran out of memory."""
_SKIP_LIMIT = re.compile(r"guards/(.+)_consecutive_skips")
"""Metric of a role that exceeds `run.max_skipped_updates` consecutive skipped updates."""


def check_guards(config: Config, requirements: Requirements, warnings: list[str]) -> None:
    """Raise ConfigError for a guard on a metric that the algorithm lacks; warn of a guard that can never act."""
    guards = config.guards
    load_bands(guards)
    if guards.ppo_kl is not None and not requirements.has_rollout:
        raise ConfigError(f"guards.ppo_kl is set, but algorithm={requirements.name} has no actor/ppo_kl; remove it")
    if guards.kl is not None and "reference" not in requirements.roles:
        algorithm = f"algorithm={requirements.name} with kl.apply_to={config.kl.apply_to}"
        raise ConfigError(f"guards.kl is set, but {algorithm} has no reference; remove it")
    if guards.ppo_kl is not None and config.run.num_update == 1 and not config.rollout.asynchronous:
        warnings.append(
            "guards.ppo_kl never acts with run.num_update=1: actor/ppo_kl measures a step's earlier updates, and there "
            "are none"
        )


class Guards:
    """Tracks what the guards did. `log` logs a line, `alarm` raises an alarm."""

    def __init__(self, settings: GuardsConfig, log: Callable[[str], None], alarm: Callable[[str], None]) -> None:
        self._settings, self._log, self._alarm = settings, log, alarm
        self._bands = load_bands(settings)
        self._out_of_band: set[str] = set()
        self._rollbacks = 0
        self._consecutive_rollbacks: dict[str, int] = {}
        """Consecutive steps that ended in a rollback, by role."""
        self._kl_off: set[str] = set()
        """Metrics of the policies whose KL coefficient has been set to 0."""
        self._oom_counts: dict[str, float] = {}
        self._stop_reason = ""
        self.skip_limited_roles: tuple[str, ...] = ()
        """Roles that skipped more than `run.max_skipped_updates` consecutive updates as of the last step."""
        self.restored_step: int | None = None
        """Step of the checkpoint that was restored because of that; None once a step skips no update again."""
        self._num_restores = 0

    def check(self, step: int, metrics: Mapping[str, float]) -> dict[str, float]:
        """Log and alarm on what happened in a step. Return the metrics of the enabled guards."""
        guard_metrics: dict[str, float] = {}
        skipped = [value for name, value in metrics.items() if name.endswith("/skipped")]
        self.skip_limited_roles = tuple(match[1] for match in map(_SKIP_LIMIT.fullmatch, sorted(metrics)) if match)
        if skipped and not any(skipped):
            self.restored_step = None
        if self._num_restores:
            guard_metrics["guards/checkpoint_restores"] = self._num_restores
        if self._settings.ppo_kl is not None:
            guard_metrics["guards/rollbacks"] = self._check_rollback(step, metrics)
        if self._settings.kl is not None:
            guard_metrics["guards/kl_off"] = self._check_kl(step, metrics)
        if self._settings.oom_retry:
            self._check_memory(step, metrics)
        if self._settings.alarms:
            guard_metrics["guards/out_of_band"] = self._check_bands(step, metrics)
        return guard_metrics

    def record_restore(self, step: int) -> None:
        """Record that the models were restored from the checkpoint of step `step`."""
        self.skip_limited_roles, self.restored_step = (), step
        self._num_restores += 1

    def raise_if_stopped(self) -> None:
        """Raise ConfigError if a guard has stopped the run."""
        if self._stop_reason:
            raise ConfigError(self._stop_reason)

    def _check_rollback(self, step: int, metrics: Mapping[str, float]) -> float:
        kl_by_role = {match[1] or "actor": metrics[name] for name in metrics if (match := _ROLLBACK_KL.fullmatch(name))}
        self._consecutive_rollbacks = {role: self._consecutive_rollbacks.get(role, 0) + 1 for role in kl_by_role}
        for role, ppo_kl in kl_by_role.items():
            self._rollbacks += 1
            policy, count = split_role(role)[1], self._consecutive_rollbacks[role]
            name = f"{policy}/actor/ppo_kl" if policy else "actor/ppo_kl"
            above = f"{name} {ppo_kl:.3g} is above guards.ppo_kl={self._settings.ppo_kl:g}"
            remedy = f"lower {optimizer_key(role)}.lr, loss.clip or run.num_update, or raise guards.ppo_kl"
            self._alarm(
                f"step {step}: {above}: rolled the policy back to before the step, skipped its remaining updates and "
                f"restarted the learning-rate warm-up ({_times(self._rollbacks)} in this run). If it happens again: "
                f"{remedy}"
            )
            if count >= MAX_CONSECUTIVE_ROLLBACKS:
                self._stop_reason = (
                    f"step {step}: {above}, and {count} consecutive steps were rolled back, so the run stops: {remedy}"
                )
        return self._rollbacks

    def _check_kl(self, step: int, metrics: Mapping[str, float]) -> float:
        """Alarm once for each policy above the limit. Return the number of policies without a penalty."""
        limit = self._settings.kl
        assert limit is not None
        for name, kl in metrics.items():
            if not name.endswith(KL_TO_REFERENCE) or kl <= limit or name in self._kl_off:
                continue
            self._kl_off.add(name)
            policy = name.removesuffix(KL_TO_REFERENCE).strip("/")
            self._alarm(
                f"step {step}: the KL {f'of policy {policy} ' if policy else ''}to the reference, {kl:.3g} nats a "
                f"token, is above guards.kl={limit:g}: its coefficient is 0 from now on. Check that the rewards still "
                f"measure what you want; to restore the penalty, resume from an older checkpoint with another kl.coef"
            )
        return float(len(self._kl_off))

    def _check_memory(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, count in metrics.items():
            match = _OOM_COUNT.fullmatch(name)
            if match is None or count <= self._oom_counts.get(role := match[1], 0.0):
                continue
            self._oom_counts[role] = count
            budget = metrics.get(f"guards/{role}_token_budget", 0.0)
            recomputes = ", with all layers recomputed" if metrics.get(f"guards/{role}_recomputes") else ""
            self._alarm(
                f"step {step}: out of memory, {_times(count)} so far: micro-batches of the {role.replace('_', ' ')} "
                f"now have at most {budget:.0f} tokens{recomputes}, and the failed work was repeated. To avoid the "
                f"retries: set train.max_tokens_per_gpu={budget:.0f}"
            )

    def _check_bands(self, step: int, metrics: Mapping[str, float]) -> float:
        """Return how many metrics are out of band. A metric missing from this step keeps its state."""
        for name, band in self._bands.items():
            if name not in metrics:
                continue
            value = metrics[name]
            if band.side(value) and name not in self._out_of_band:
                self._out_of_band.add(name)
                remedy = band.get_remedy(value)
                self._alarm(f"step {step}: {name} is {band.describe(value)}" + (f": {remedy}" if remedy else ""))
            elif not band.side(value) and name in self._out_of_band:
                self._out_of_band.remove(name)
                self._log(f"step {step}: {name} is back in its band: {band.describe(value)}")
        return float(len(self._out_of_band))

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain JSON."""
        counts = {"rollbacks": self._rollbacks, "in_a_row": self._consecutive_rollbacks, "kl_off": sorted(self._kl_off)}
        restores = {"returns": self._num_restores, "returned_to": self.restored_step}
        return {**counts, **restores, "short": self._oom_counts, "out": sorted(self._out_of_band)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state; it is empty if the saved run had no guards."""
        self._rollbacks = int(state.get("rollbacks", 0))
        in_a_row, kl_off = state.get("in_a_row", {}), state.get("kl_off", ())
        # A checkpoint of an earlier version has those of the first policy alone.
        self._consecutive_rollbacks = dict(in_a_row) if isinstance(in_a_row, Mapping) else {"actor": int(in_a_row)}
        self._kl_off = ({KL_TO_REFERENCE} if kl_off else set()) if isinstance(kl_off, bool) else set(kl_off)
        self._num_restores, self.restored_step = int(state.get("returns", 0)), state.get("returned_to")
        self._oom_counts = {role: float(count) for role, count in state.get("short", {}).items()}
        self._out_of_band = set(state.get("out", ())) & self._bands.keys()


def _times(count: float) -> str:
    return "once" if count == 1 else f"{count:.0f} times"
