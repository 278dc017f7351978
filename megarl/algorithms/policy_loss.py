"""PPO's clipped policy loss."""

from __future__ import annotations

import torch

from megarl.types import TokenLoss

MAX_LOG_RATIO = 20.0
"""Far outside of any clip range; above it exp would overflow and turn even the dual clip's zero gradient into NaN."""


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
