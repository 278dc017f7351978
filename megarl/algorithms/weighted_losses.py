"""Policy losses that weight a token in place of clipping it away: CISPO by a bounded ratio, SAPO by a soft gate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch

from megarl.algorithms.policy_loss import MAX_LOG_RATIO, Clip, Sampled
from megarl.strict import NotNegative, Range
from megarl.types import TokenLoss


@dataclass(frozen=True)
class CISPOOptions:
    most: Annotated[float, Range(1, 1e6)] = 5.0
    """Upper bound of the ratio as a weight, the paper's 1 + epsilon_high, of which it gives no number. Others' defaults
    are 4 (Tinker) and 6 (NeMo RL)."""
    least: NotNegative = 0.0
    """Lower bound, 1 - epsilon_low; 0 is none, as in the paper."""


@dataclass(frozen=True)
class SAPOOptions:
    tau_positive: Annotated[float, Range(above=0, most=1000)] = 1.0
    """Temperature of the gate where the advantage is positive."""
    tau_negative: Annotated[float, Range(above=0, most=1000)] = 1.05
    """Where it is negative: the gate closes sooner. Both as in the paper."""


def cispo_loss(sampled: Sampled, clip: Clip, options: CISPOOptions) -> TokenLoss:
    """CISPO (MiniMax-M1, arXiv:2506.13585, section 3.1), [T]: REINFORCE with a bounded importance weight.

        loss_t = -sg[clip(rho_t, least, most)] A_t log pi(o_t)

    No token loses its gradient. Metrics: `actor/pg_clipfrac` 1 where the weight was bounded, `actor/ppo_kl`.
    """
    log_ratio = sampled.log_ratio.detach()
    ratio = torch.exp(log_ratio.clamp(max=MAX_LOG_RATIO))
    weight = ratio.clamp(options.least, options.most)
    logprobs = torch.where(sampled.loss_mask, sampled.logprobs, torch.zeros_like(sampled.logprobs))
    metrics = {"actor/pg_clipfrac": (weight != ratio).to(ratio.dtype), "actor/ppo_kl": -log_ratio}
    return TokenLoss(-weight * sampled.advantage * logprobs, metrics)


def sapo_loss(sampled: Sampled, clip: Clip, options: SAPOOptions) -> TokenLoss:
    """Soft adaptive policy optimisation (arXiv:2511.20347), [T]: a sigmoid of the ratio in place of a clip.

        loss_t = -A_t f(rho_t),  f(x) = 4 / tau sigmoid(tau (x - 1))
        tau    = tau_positive where A_t > 0, else tau_negative

    so that f'(1) = 1: on policy the gradient is that of the plain ratio, and it fades as the ratio leaves 1, on either
    side. Metrics: `actor/sapo_gate` the gradient's weight f'(rho) / f'(1), `actor/ppo_kl`.
    """
    log_ratio, advantage = sampled.log_ratio, sampled.advantage
    ratio = torch.exp(log_ratio.clamp(max=MAX_LOG_RATIO))
    tau = torch.full_like(ratio, options.tau_negative).masked_fill_(advantage > 0, options.tau_positive)
    gate = torch.sigmoid(tau * (ratio - 1.0))
    open_by = (4.0 * gate * (1.0 - gate)).detach() * sampled.loss_mask
    metrics = {"actor/sapo_gate": open_by, "actor/ppo_kl": -log_ratio.detach()}
    return TokenLoss(-advantage * gate * (4.0 / tau), metrics)
