"""Health bands: the range of each metric in a healthy run, and a remedy on either side (`guards.alarms`).

`README.md` in this folder discusses each band.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Literal

from megarl.config import ConfigError, GuardsConfig

TOLERANCE = 1e-3
"""Relative slack at either bound: whitened advantages have variance 1 only up to rounding."""


@dataclass(frozen=True)
class Band:
    """The expected range of a metric; a bound of None is open."""

    title: str
    """Name in the progress display."""
    lower: float | None
    upper: float | None
    low_remedy: str = ""
    """Advice for values below the band."""
    high_remedy: str = ""
    """Advice for values above the band."""

    def side(self, value: float) -> Literal["", "below", "above", "not a number"]:
        """Return the side of the band on which `value` lies; empty if within."""
        if math.isnan(value):
            return "not a number"
        if self.lower is not None and value < self.lower - TOLERANCE * abs(self.lower):
            return "below"
        if self.upper is not None and value > self.upper + TOLERANCE * abs(self.upper):
            return "above"
        return ""

    def describe(self, value: float) -> str:
        """Format a value with its band, such as `0.31, below 0.4 to 0.6`."""
        side = self.side(value)
        return f"{value:.4g}, {side or 'in'} {self}" if side != "not a number" else f"{side}, of {self}"

    def get_remedy(self, value: float) -> str:
        remedies = {"below": self.low_remedy, "above": self.high_remedy, "not a number": NAN_REMEDY, "": ""}
        return remedies[self.side(value)]

    def __str__(self) -> str:
        if self.lower is None:
            return f"at most {self.upper:g}"
        return f"at least {self.lower:g}" if self.upper is None else f"{self.lower:g} to {self.upper:g}"


LOGPROB_DIFF = "rollout/logprob_diff_mean"
"""A hard limit rather than a band: the run stops above the upper bound, whether `guards.alarms` is set or not
(`controllers/rollout_correction.py`)."""

NAN_REMEDY = "check the rewards and the data of the step"

BANDS: dict[str, Band] = {
    "actor/entropy": Band(
        "entropy",
        0.4,
        0.6,
        low_remedy="raise kl.coef, loss.entropy_coef or loss.clip_high, or lower actor_optimizer.lr",
        high_remedy="lower loss.entropy_coef or rollout.temperature, or raise kl.coef",
    ),
    # A lower bound, although some published lists give an upper one: for 0/1 rewards the variance is p (1 - p). If it
    # is small, nearly all responses are right or nearly all wrong, groups have no spread, and advantages vanish.
    "rollout/reward_variance": Band(
        "reward variance",
        0.1,
        None,
        low_remedy="use prompts that are neither solved nor hopeless, raise rollout.samples_per_prompt or "
        "temperature, or reward steps on the way",
    ),
    "actor/advantage_variance": Band(
        "advantage variance",
        None,
        1.0,
        high_remedy="set advantage.whiten or advantage.norm_by_std, bound the rewards, or raise kl.coef",
    ),
    "critic/vf_clipfrac": Band(
        "clipped values",
        None,
        0.05,
        high_remedy="raise loss.value_clip, lower critic.optimizer.lr, or give the critic critic.warmup_steps",
    ),
    "actor/grad_norm": Band(
        "gradient norm",
        0.5,
        2.0,
        low_remedy="check whether advantages are 0 (rollout/zero_spread_frac), or raise data.prompts_per_step",
        high_remedy="raise kl.coef, lower actor_optimizer.lr, or raise data.prompts_per_step",
    ),
    # No lower bound: the first update of a step has a KL of 0, and so has a run with one update per step.
    "actor/ppo_kl": Band(
        "KL of the updates",
        None,
        0.03,
        high_remedy="lower actor_optimizer.lr, loss.clip or run.num_update, or set guards.ppo_kl to roll back",
    ),
    "perf/tokens_per_second_per_rank": Band(
        "tokens/s per rank",
        None,
        None,
        low_remedy="use megarl timeline to see what ranks wait for; a shared machine, long answers or a slow reward",
    ),
    "perf/mfu": Band(
        "MFU",
        None,
        None,
        low_remedy="use megarl timeline to see what ranks wait for, or raise train.max_tokens_per_gpu",
    ),
    "perf/gpu_utilization": Band(
        "GPU utilization",
        None,
        None,
        low_remedy="use megarl timeline to see what ranks wait for; raise rollout.concurrency or "
        "train.max_tokens_per_gpu, or set rollout.oversample or rollout.asynchronous",
    ),
}
"""Default bands by metric. Throughput and utilization have none that fits every machine; `guards.bands` can set one."""


def load_bands(settings: GuardsConfig) -> dict[str, Band]:
    """Return the watched bands: defaults overridden by `guards.bands`; none unless `guards.alarms` is set.

    Raises ConfigError for an invalid band.
    """
    if settings.bands.get(LOGPROB_DIFF) is not None:
        _parse_bounds(LOGPROB_DIFF, settings.bands[LOGPROB_DIFF])
    if not settings.alarms:
        if settings.bands.keys() - {LOGPROB_DIFF}:
            raise ConfigError("guards.bands is set, but guards.alarms=false disables it; set it to true")
        return {}
    bands = dict(BANDS)
    for metric, bounds in settings.bands.items():
        if bounds is None:
            bands.pop(metric, None)
        elif metric != LOGPROB_DIFF:
            lower, upper = _parse_bounds(metric, bounds)
            bands[metric] = replace(bands.get(metric, Band(metric, None, None)), lower=lower, upper=upper)
    return {name: band for name, band in bands.items() if (band.lower, band.upper) != (None, None)}


def _parse_bounds(metric: str, bounds: Any) -> tuple[float | None, float | None]:
    is_pair = isinstance(bounds, (list, tuple)) and len(bounds) == 2
    is_pair = is_pair and all(type(bound) in (int, float, type(None)) and math.isfinite(bound or 0) for bound in bounds)
    if not is_pair or bounds == [None, None] or (None not in bounds and bounds[0] > bounds[1]):
        raise ConfigError(
            f"guards.bands.{metric} must be two numbers, the lower one first, or null for an open end, such as "
            f"[0.4, 0.6] or [2000, null], not {str(bounds)[:80]}"
        )
    return bounds[0], bounds[1]
