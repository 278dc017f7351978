"""What a policy loss is given, and PPO's clipped one. `policy_losses.py` has the table of all."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megarl.types import TokenLoss

MAX_LOG_RATIO = 20.0
"""Far outside of any clip range; above it exp would overflow and turn even the dual clip's zero gradient into NaN."""


@dataclass(frozen=True)
class Clip:
    """The range [1 - low, 1 + high] of a token's ratio, and the bound of PPO's loss for negative advantages."""

    low: float = 0.2
    high: float | None = None
    """None for `low`."""
    dual: float | None = None


@dataclass(frozen=True)
class Sampled:
    """What a policy loss is given: whole sequences, aligned as in `types/`. Where `loss_mask` is False a loss, its
    gradient and its metrics are 0, whatever stands there."""

    logprobs: torch.Tensor  # [T] of the policy, with a gradient
    old_logprobs: torch.Tensor  # [T] of the one that the ratio is to
    advantages: torch.Tensor  # [T]
    loss_mask: torch.Tensor  # [T] bool
    cu_seqlens: torch.Tensor  # [n + 1]
    marked: torch.Tensor | None = None  # [T] bool, what the loss has chosen out of the whole mini-batch

    @property
    def advantage(self) -> torch.Tensor:
        """[T], 0 where `loss_mask` is False."""
        return torch.where(self.loss_mask, self.advantages, torch.zeros_like(self.logprobs))

    @property
    def log_ratio(self) -> torch.Tensor:
        """[T], 0 where `loss_mask` is False: masked before exp, for 0 * inf would be NaN, in gradients too."""
        return torch.where(self.loss_mask, self.logprobs - self.old_logprobs, torch.zeros_like(self.logprobs))

    @property
    def chosen(self) -> torch.Tensor:
        """[T] bool, the tokens that are marked."""
        return torch.zeros_like(self.loss_mask) if self.marked is None else self.marked & self.loss_mask


def ppo_policy_loss(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    loss_mask: torch.Tensor,
    *,
    clip_low: float,
    clip_high: float | None = None,
    dual_clip: float | None = None,
) -> TokenLoss:
    """Loss per token, [T] (arXiv:1707.06347, eq. 7, negated), bounded for negative advantages by `dual_clip`.

        ratio = exp(logprobs - old_logprobs), at most e^20
        loss  = max(-A * ratio, -A * clip(ratio, 1 - clip_low, 1 + clip_high))
        loss  = min(loss, -A * dual_clip) where A < 0          (arXiv:1912.09729, eq. 5)

    All inputs are [T], aligned as in `types/`; `clip_high` None means `clip_low`. The gradient flows into `logprobs`
    only. Where `loss_mask` is False loss, gradient and metrics are 0, whatever the other inputs are there.

    Metrics: `actor/pg_clipfrac` 1 where clipping changed the loss, `actor/pg_clipfrac_lower` 1 where the dual clip did,
    `actor/ppo_kl` old - new log-probs, the k1 estimate of KL(old || new).
    """
    if dual_clip is not None and dual_clip <= 1.0:
        raise ValueError(f"dual_clip must be greater than 1, not {dual_clip}")
    clip_high = clip_low if clip_high is None else clip_high
    zeros = torch.zeros_like(logprobs)
    # Masked before exp: 0 * inf would be NaN, in the loss as in the gradient.
    log_ratio = torch.where(loss_mask, logprobs - old_logprobs, zeros)
    advantages = torch.where(loss_mask, advantages, zeros)
    ratio = torch.exp(log_ratio.clamp(max=MAX_LOG_RATIO))
    plain = -advantages * ratio
    clipped = -advantages * torch.clamp(ratio, 1.0 - clip_low, 1.0 + clip_high)
    loss = torch.maximum(plain, clipped)
    metrics = {"actor/pg_clipfrac": (clipped > plain).to(loss.dtype), "actor/ppo_kl": -log_ratio.detach()}
    if dual_clip is not None:
        bound = -advantages * dual_clip
        bounded = (advantages < 0) & (loss > bound)
        loss = torch.where(bounded, bound, loss)
        metrics["actor/pg_clipfrac_lower"] = bounded.to(loss.dtype)
    return TokenLoss(loss=loss, metrics=metrics)


def ppo_loss(sampled: Sampled, clip: Clip, options: object = None) -> TokenLoss:
    """`ppo_policy_loss`, as `loss.clip`, `loss.clip_high` and `loss.dual_clip` say; it has no options."""
    return ppo_policy_loss(
        sampled.logprobs,
        sampled.old_logprobs,
        sampled.advantages,
        sampled.loss_mask,
        clip_low=clip.low,
        clip_high=clip.high,
        dual_clip=clip.dual,
    )
