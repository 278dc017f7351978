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
    kind: Literal["k1", "k2", "k3", "k3_unbiased"],
    loss_mask: torch.Tensor | None = None,
    old_logprobs: torch.Tensor | None = None,
) -> torch.Tensor:
    """KL(policy || reference) in nats, estimated at each token that was drawn; [T], differentiable.

    With d = logprobs - ref_logprobs: k1 = d is unbiased, k2 = d^2 / 2 has little variance, k3 = exp(-d) - 1 + d is
    unbiased and never negative (http://joschu.net/blog/kl-approx.html). So much for their values, where the policy
    itself drew the tokens. Of their gradients in expectation, k2's is then that of the KL, k3's that of the reversed
    KL(reference || policy), and k1 has none.

    k3_unbiased = k3 exp(logprobs - old_logprobs) is right in both, for tokens that `old_logprobs`, an earlier policy,
    drew (arXiv:2512.02556, section 3.1); None: the policy itself drew them, so that value and k3's are the same.
    Neither this ratio nor that to the reference, exp(-d), is taken for more than e^20. Where `loss_mask` is False the
    estimate is 0, whatever the log-probs are there.
    """
    mask = torch.ones_like(logprobs, dtype=torch.bool) if loss_mask is None else loss_mask
    zeros = torch.zeros_like(logprobs)
    difference = torch.where(mask, logprobs - ref_logprobs, zeros)
    if kind == "k1":
        return difference
    if kind == "k2":
        return 0.5 * difference.square()
    if kind not in ("k3", "k3_unbiased"):
        raise ValueError(f"kind must be k1, k2, k3 or k3_unbiased, not {kind!r}")
    difference = difference.clamp(min=-MAX_LOG_RATIO)
    estimate = torch.expm1(-difference) + difference
    if kind == "k3":
        return estimate
    drawn_by = logprobs.detach() if old_logprobs is None else old_logprobs
    return estimate * torch.exp(torch.where(mask, logprobs - drawn_by, zeros).clamp(max=MAX_LOG_RATIO))


@dataclass(frozen=True)
class AdaptiveKL:
    """The KL coefficient, steered towards a target KL (arXiv:1909.08593, section 2.2); fixed when target is None.

    A value: `updated` gives the next one.
    """

    coef: float
    target: float | None  # nats per token
    horizon: int  # rollouts
    initial: float | None = field(default=None, compare=False)  # what `coef` began as
    max_coef: float = math.inf  # what a coefficient that is steered stays at or below
    max_kl: float | None = None  # nats per token, above which `coef` falls to 0, for good

    def __post_init__(self) -> None:
        if self.initial is None:
            object.__setattr__(self, "initial", self.coef)
        if self.target is not None and (self.target <= 0 or self.horizon <= 0):
            raise ValueError(f"KL target and horizon must be positive, not {self.target} and {self.horizon}")

    def updated(self, kl: float, rollouts: int) -> AdaptiveKL:
        """The controller after `rollouts` rollouts whose mean KL per token was `kl`.

        error = clip(kl / target - 1, -0.2, 0.2); coef <- min(coef * (1 + error * rollouts / horizon), most): it rises
        where the KL is above its target. `kl` is finite, as workers see to it that log-probs are. Of one above the
        limit coef <- 0, which no factor brings back.
        """
        if not math.isfinite(kl):
            raise ValueError(f"the KL to the reference is {kl}: the policy has diverged")
        if self.max_kl is not None and kl > self.max_kl:
            return replace(self, coef=0.0)
        if self.target is None:
            return self
        error = min(max(kl / self.target - 1.0, -0.2), 0.2)
        # A batch of more than five horizons would make the factor negative.
        factor = max(1.0 + error * rollouts / self.horizon, 0.0)
        return replace(self, coef=min(self.coef * factor, self.max_coef))

    def state_dict(self) -> dict[str, float]:
        assert self.initial is not None
        return {"coef": self.coef, "initial": self.initial}

    def restored(self, state: dict[str, float]) -> AdaptiveKL:
        """This controller with a saved coefficient; target, horizon and bound stay those of the configuration, and so
        does the coefficient where the saved one began from another: somebody has set it anew."""
        if state.get("initial", self.initial) != self.initial:
            return self
        return replace(
            self, coef=float(state["coef"]) if self.target is None else min(float(state["coef"]), self.max_coef)
        )
