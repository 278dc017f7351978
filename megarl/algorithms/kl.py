"""KL divergence to the reference policy: per-token estimates, and the controller of its coefficient."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Literal

import torch

from megarl.algorithms.policy_losses import MAX_LOG_RATIO


def kl_estimate(
    logprobs: torch.Tensor,
    ref_logprobs: torch.Tensor,
    estimator: Literal["k1", "k2", "k3", "k3_unbiased"],
    loss_mask: torch.Tensor | None = None,
    old_logprobs: torch.Tensor | None = None,
) -> torch.Tensor:
    """Estimate KL(policy || reference) in nats at each sampled token; [T], differentiable.

    With d = logprobs - ref_logprobs: k1 = d is unbiased, k2 = d^2 / 2 has low variance, k3 = exp(-d) - 1 + d is
    unbiased and never negative (http://joschu.net/blog/kl-approx.html). This holds for the values, on policy. Of the
    gradients in expectation, on policy, k2's is that of the KL, k3's that of the reversed KL(reference || policy), and
    k1's is zero.

    k3_unbiased = k3 exp(logprobs - old_logprobs) is right in value and gradient for tokens that an earlier policy,
    `old_logprobs`, sampled (arXiv:2512.02556, section 3.1). None means on policy. Both ratios are clamped to at most
    e^20. The estimate is 0 where `loss_mask` is False, whatever the log-probs are there.
    """
    mask = torch.ones_like(logprobs, dtype=torch.bool) if loss_mask is None else loss_mask
    zeros = torch.zeros_like(logprobs)
    difference = torch.where(mask, logprobs - ref_logprobs, zeros)
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return 0.5 * difference.square()
    if estimator not in ("k3", "k3_unbiased"):
        raise ValueError(f"estimator must be k1, k2, k3 or k3_unbiased, not {estimator!r}")
    difference = difference.clamp(min=-MAX_LOG_RATIO)
    estimate = torch.expm1(-difference) + difference
    if estimator == "k3":
        return estimate
    behavior_logprobs = logprobs.detach() if old_logprobs is None else old_logprobs
    return estimate * torch.exp(torch.where(mask, logprobs - behavior_logprobs, zeros).clamp(max=MAX_LOG_RATIO))


@dataclass(frozen=True)
class AdaptiveKL:
    """KL coefficient, adapted towards a target KL (arXiv:1909.08593, section 2.2); fixed if target is None.

    Immutable: `updated` returns the next state.
    """

    coef: float
    target: float | None  # nats per token
    horizon: int  # rollouts
    initial: float | None = field(default=None, compare=False)  # first value of `coef`
    max_coef: float = math.inf  # upper bound of an adapted coefficient
    max_kl: float | None = None  # nats per token; above it `coef` falls to 0 permanently

    def __post_init__(self) -> None:
        if self.initial is None:
            object.__setattr__(self, "initial", self.coef)
        if self.target is not None and (self.target <= 0 or self.horizon <= 0):
            raise ValueError(f"KL target and horizon must be positive, not {self.target} and {self.horizon}")

    def updated(self, kl: float, rollouts: int) -> AdaptiveKL:
        """Return the controller after `rollouts` rollouts with mean KL per token `kl`.

        error = clip(kl / target - 1, -0.2, 0.2); coef <- min(coef * (1 + error * rollouts / horizon), max_coef). A KL
        above `max_kl` sets coef to 0 for good. Raises ValueError for a non-finite `kl`.
        """
        if not math.isfinite(kl):
            raise ValueError(f"the KL to the reference is {kl}: the policy has diverged")
        if self.max_kl is not None and kl > self.max_kl:
            return replace(self, coef=0.0)
        if self.target is None:
            return self
        error = min(max(kl / self.target - 1.0, -0.2), 0.2)
        # A batch larger than five horizons would make the factor negative.
        factor = max(1.0 + error * rollouts / self.horizon, 0.0)
        return replace(self, coef=min(self.coef * factor, self.max_coef))

    def state_dict(self) -> dict[str, float]:
        assert self.initial is not None
        return {"coef": self.coef, "initial": self.initial}

    def restored(self, state: dict[str, float]) -> AdaptiveKL:
        """Return this controller with a saved coefficient, unless the user has changed the initial one since."""
        if state.get("initial", self.initial) != self.initial:
            return self
        coef = float(state["coef"])
        return replace(self, coef=coef if self.target is None else min(coef, self.max_coef))
