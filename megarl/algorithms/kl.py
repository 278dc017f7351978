"""KL divergence to the reference policy: per-token estimates, and the controller of its coefficient."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Literal

import torch


def kl_estimate(
    logprobs: torch.Tensor,
    ref_logprobs: torch.Tensor,
    kind: Literal["k1", "k2", "k3"],
    loss_mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """KL(policy || reference) in nats, estimated at each token that the policy drew; [T], differentiable.

    With d = logprobs - ref_logprobs: k1 = d is unbiased, k2 = d^2 / 2 has little variance, k3 = exp(-d) - 1 + d is
    unbiased and never negative (http://joschu.net/blog/kl-approx.html). As a loss, k2 has the gradient of the KL in
    expectation and k1 has none. Where `loss_mask` is False the estimate is 0, whatever the log-probs are there.
    """
    difference = logprobs - ref_logprobs
    if loss_mask is not None:
        difference = torch.where(loss_mask, difference, torch.zeros_like(difference))
    if kind == "k1":
        return difference
    if kind == "k2":
        return 0.5 * difference.square()
    if kind == "k3":
        return torch.expm1(-difference) + difference
    raise ValueError(f"kind must be k1, k2 or k3, not {kind!r}")


@dataclass(frozen=True)
class AdaptiveKL:
    """The KL coefficient, steered towards a target KL (arXiv:1909.08593, section 2.2); fixed when target is None.

    A value: `updated` gives the next one.
    """

    coef: float
    target: float | None  # nats per token
    horizon: int  # rollouts
    initial: float | None = field(default=None, compare=False)  # what `coef` began as

    def __post_init__(self) -> None:
        if self.initial is None:
            object.__setattr__(self, "initial", self.coef)
        if self.target is not None and (self.target <= 0 or self.horizon <= 0):
            raise ValueError(f"KL target and horizon must be positive, not {self.target} and {self.horizon}")

    def updated(self, kl: float, rollouts: int) -> AdaptiveKL:
        """The controller after `rollouts` rollouts whose mean KL per token was `kl`.

        error = clip(kl / target - 1, -0.2, 0.2); coef <- coef * (1 + error * rollouts / horizon).
        """
        if not math.isfinite(kl):
            raise ValueError(f"the KL to the reference is {kl}: the policy has diverged")
        if self.target is None:
            return self
        error = min(max(kl / self.target - 1.0, -0.2), 0.2)
        # A batch of more than five horizons would make the factor negative.
        return replace(self, coef=self.coef * max(1.0 + error * rollouts / self.horizon, 0.0))

    def state_dict(self) -> dict[str, float]:
        assert self.initial is not None
        return {"coef": self.coef, "initial": self.initial}

    def restored(self, state: dict[str, float]) -> AdaptiveKL:
        """This controller with a saved coefficient; target and horizon stay those of the configuration, and so does the
        coefficient where the saved one began from another: somebody has set it anew."""
        if state.get("initial", self.initial) != self.initial:
            return self
        return replace(self, coef=float(state["coef"]))
